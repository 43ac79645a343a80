"""All shards of a run: which one a group lives in, and how a call is spread over them.

With several shards an admitted group's id ends in `@<shard>`, for admission chose a shard with
room. Any other id lives where its hash says. Both are pure functions of the id, so that every
process finds a group without asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from zlib import crc32

from buffer.shard import Shard

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


T = TypeVar("T")


class ShardSet:
    """The shards in their order; the first is home."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self.home = self._shards[0]

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def __getitem__(self, number: int) -> Shard:
        return self._shards[number]

    @property
    def home_last(self) -> tuple[Shard, ...]:
        """For what must hold in all shards before home says so."""
        return (*self._shards[1:], self.home)

    def of(self, group_id: str) -> Shard:
        return self._shards[shard_of(group_id, len(self))]

    async def each(self, call: Callable[[Shard], Awaitable[T]]) -> list[T]:
        """Replies of all shards, in their order."""
        return list(await asyncio.gather(*map(call, self._shards)))

    async def holding(
        self, group_ids: Iterable[str], call: Callable[[Shard, list[str]], Awaitable[T]]
    ) -> list[T]:
        """Replies of the shards that hold any of these groups, each asked for its own."""
        parts = ids_by_shard(group_ids, len(self))
        return list(await asyncio.gather(*(call(self._shards[k], ids) for k, ids in parts.items())))

    async def sum(
        self, group_ids: Iterable[str], call: Callable[[Shard, list[str]], Awaitable[int]]
    ) -> int:
        return sum(await self.holding(group_ids, call))
