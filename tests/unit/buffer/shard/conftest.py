"""Shards at a real server that check the law and every invariant after each of their verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.redis.replies import Formed, NotFormed, PushRecord, PushReply
from buffer.redis.settings import initial_settings
from buffer.shard import Shard
from configs.schema import BufferConfig
from tests.support.invariants import find_violations_of_shard

VERBS = (
    *("open", "admit", "renew_credits", "abandon", "push", "take_retry", "sweep", "tune"),
    *("form", "lock_step", "unlock", "peek", "take", "record", "validate", "renew", "consume"),
    *("ack", "nack", "quarantine", "release", "discard"),
    *("publish", "reconcile_begin", "reconcile_acked", "reconcile"),
)

Opener = Callable[..., Awaitable["CheckedShard"]]


class CheckedShard(Shard):
    """Holds the law after every verb, and finds nothing to complain of."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        super().__init__(redis, keys)
        self.redis = redis
        self.should_check = True

    async def put(
        self,
        group_id: str,
        *versions: int,
        tokens: int = 10,
        size: int = 100,
        blocked_ms: int = 0,
        num_chunks: int = 0,
        index: int = 0,
        attempt: int = 0,
    ) -> PushReply:
        """Pushes a group with 4 trainable tokens of each of the versions (0 by default)."""
        versions = versions or (0,)
        record = PushRecord(
            group_id=group_id,
            min_version=versions[0],
            max_version=versions[-1],
            versions=" ".join(f"{version}:4" for version in versions),
            tokens=tokens,
            trainable=4 * len(versions),
            bytes=size,
            task="sums",
            index=index,
            attempt=attempt,
        )
        chunks = [b"x" * size] if not num_chunks else [b"index", *(b"y" * 10,) * num_chunks]
        return await self.push(lambda _: (record, chunks), size, blocked_ms)

    async def fill(self, names: Sequence[str], *versions: int) -> None:
        for name in names:
            assert (await self.put(name, *versions)).word == "stored"

    async def lease(
        self, step: int, version: int, num_groups: int, owner: str = "o", **keywords: Any
    ) -> Formed | NotFormed:
        request: dict[str, Any] = {"num_shares": 1, "lease_ms": 60_000} | keywords
        return await self.form(
            step=step, version=version, num_groups=num_groups, owner=owner, **request
        )

    async def train(self, step: int, version: int, num_groups: int, owner: str = "o") -> list[str]:
        """Leases and consumes; the ids."""
        formed = await self.lease(step, version, num_groups, owner)
        assert isinstance(formed, Formed), formed
        done = await self.consume(
            owner=owner, step=step, version=version, oldest=formed.oldest, ids=formed.ids
        )
        assert done == num_groups
        return list(formed.ids)

    async def restore(self, lineage: str, step: int, version: int, resume_version: int) -> Any:
        """A whole reconcile, in parts as small as they can be."""
        begun = await self.reconcile_begin(
            lineage, step=step, version=version, resume_version=resume_version
        )
        assert begun.word == "begun", begun
        while (reply := await self.reconcile(lineage, bound=1)).is_more:
            pass
        return reply

    async def group(self, group_id: str) -> dict[str, str]:
        fields = await self.redis.hgetall(self.keys.group(group_id))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def state(self, group_id: str) -> str | None:
        return (await self.group(group_id)).get("state")


def _checked(name: str) -> Callable[..., Awaitable[Any]]:
    verb = getattr(Shard, name)

    async def call(self: CheckedShard, *args: Any, **keywords: Any) -> Any:
        result = await verb(self, *args, **keywords)
        if self.should_check:
            stats = await self.stats()
            assert stats.is_conserved, (name, args, stats)
            violations = await find_violations_of_shard(self)
            assert not violations, (name, args, violations)
        return result

    return call


for _name in VERBS:
    setattr(CheckedShard, _name, _checked(_name))


@pytest.fixture
async def open_shard(redis_url: str, run_name: str) -> AsyncIterator[Opener]:
    """`await open_shard(max_staleness=1)`: a shard of this test's run."""
    redis = await connect(redis_url)

    async def make(
        groups_per_step: int = 4, shard: int = 0, num_shards: int = 1, **settings: Any
    ) -> CheckedShard:
        opened = CheckedShard(redis, Keys(run_name, shard))
        config = BufferConfig(shards=num_shards, **settings)
        await opened.open(initial_settings(config, groups_per_step, shard, num_shards))
        return opened

    yield make
    await redis.aclose()
