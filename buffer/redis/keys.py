"""Redis keys of a run. All keys of one shard share a hash tag, so they are in one slot.

docs/buffer.md#every-key lists what each holds. Shard 0, the home of a run, has the prefix
{leash:RUN}; shard 1 has {leash:RUN:1}, and so on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True, frozen=True)
class Keys:
    """Keys of one shard of a run. Raises ValueError if the run's name cannot be part of a key."""

    run: str
    shard: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.run):
            raise ValueError(
                f"run.name={self.run!r}: use 1 to 128 letters, digits, '.', '_' and '-' "
                "(it is part of every Redis key)"
            )

    @property
    def prefix(self) -> str:
        return f"{{leash:{self.run}:{self.shard}}}" if self.shard else f"{{leash:{self.run}}}"

    def __call__(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def group(self, group_id: str) -> str:
        return self(f"group:{group_id}")

    def payload(self, group_id: str) -> str:
        return self(f"payload:{group_id}")

    def wake(self, name: str) -> str:
        return self(f"wake:{name}")


def check_group_id(group_id: str) -> str:
    """Returns the id. Raises ValueError if it cannot be part of a key or of a list of ids."""
    # With a ':' the payload of 'a:1' would have the key of the first chunk of 'a'.
    # Printable because terminals show ids.
    is_name = group_id.isprintable() and " " not in group_id and ":" not in group_id
    if not 0 < len(group_id) <= 256 or not is_name:
        raise ValueError(
            f"group_id={group_id!r}: must have 1 to 256 printable characters, no white space and "
            "no ':'"
        )
    return group_id
