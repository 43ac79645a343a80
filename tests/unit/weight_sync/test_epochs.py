"""Keys of past epochs in the rendezvous store."""

from __future__ import annotations

from weight_sync.group import forget_epochs, open_store


def test_forget_epochs_deletes_only_earlier_epochs_of_the_group() -> None:
    store = open_store("127.0.0.1", 5.0)
    kept = ["run/3/here/0", "run/11/0/1", "run/choices/0/1", "run-b/1/here/0", "here"]
    # The last is NCCL's: it stands beside the epochs' keys, and ends the members of later ones.
    for key in ["run/1/here/0", "run/2/0/1", "exception_dump", *kept]:
        store.set(key, "1")
    forget_epochs(store, "run", 3)
    assert sorted(store.list_keys()) == sorted(kept)
