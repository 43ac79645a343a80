"""What membership epochs leave behind in the store that their members met in."""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore


def forget_epochs(store: TCPStore, name: str, before: int) -> None:
    """Delete what the group `name` wrote in earlier epochs than `before`.

    torch never does. Whoever still looks for such a key comes too late anyway.
    """
    for key in store.list_keys():
        group, _, rest = key.partition("/")
        epoch = rest.partition("/")[0]
        if group == name and epoch.isdecimal() and int(epoch) < before:
            store.delete_key(key)
