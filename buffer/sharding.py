"""Which shard a group lives in.

With several shards an admitted group's id ends in `@<shard>`, for admission chose a shard with
room. Any other id lives where its hash says. Both are pure functions of the id, so that every
process finds a group without asking.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

_MARK = "@"


def shard_of(group_id: str, num_shards: int) -> int:
    """Index of the shard that holds the group."""
    if num_shards == 1:
        return 0
    _, mark, number = group_id.rpartition(_MARK)
    # A number that another count of shards could have given is an ordinary part of the name.
    if mark and number.isdecimal() and int(number) < num_shards:
        return int(number)
    return crc32(group_id.encode()) % num_shards


def id_in_shard(group_id: str, shard: int, num_shards: int) -> str:
    """The id under which a group that is admitted to `shard` is known from then on.

    Raises ValueError if the id holds '@' already, which would leave its shard in doubt.
    """
    if num_shards == 1:
        return group_id
    if _MARK in group_id:
        raise ValueError(
            f"group_id={group_id!r}: with buffer.shards={num_shards}, ids to admit must not "
            "contain '@' (it marks the shard)"
        )
    return f"{group_id}{_MARK}{shard}"


def ids_by_shard(group_ids: Iterable[str], num_shards: int) -> dict[int, list[str]]:
    """The ids of each shard that has any, in the order in which they came."""
    parts: dict[int, list[str]] = {}
    for group_id in group_ids:
        parts.setdefault(shard_of(group_id, num_shards), []).append(group_id)
    return parts
