"""All shards of a run, and how a call is spread over those that hold the groups in question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from buffer.shard import Shard
from buffer.sharding import ids_by_shard, shard_of

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
