"""Any verb in any state: after thousands of random ones the law and every invariant hold."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from buffer.types import PromptRef, Rerun
from configs.choices import OnFull, OnStale, Selector

MODES = [
    {"on_stale": OnStale.requeue, "selector": Selector.stalest, "capacity_bytes": 900},
    {"on_stale": OnStale.drop, "selector": Selector.fifo, "on_full": OnFull.drop_stalest},
    {"on_stale": OnStale.mask_tokens, "selector": Selector.freshest, "capacity_groups": 12},
    {"on_stale": OnStale.wait, "selector": Selector.fifo, "max_attempts": 1},
]


class Walk:
    """Calls verbs with arguments that are often right and sometimes absurd."""

    def __init__(self, shard: Any, seed: int) -> None:
        self.shard = shard
        self.dice = random.Random(seed)
        self.version = self.step = self.num_lineages = 0
        self.lineage = ""

    @property
    def some_id(self) -> str:
        return f"g{self.dice.randrange(40)}"

    @property
    def some_ids(self) -> list[str]:
        return [self.some_id for _ in range(self.dice.randrange(1, 6))]

    @property
    def some_owner(self) -> str:
        return self.dice.choice("pq")

    @property
    def some_oldest(self) -> int | None:
        return self.dice.choice([None, max(0, self.version - 1)])

    async def push(self) -> None:
        newest = self.dice.randrange(max(0, self.version - 3), self.version + 1)
        versions = sorted({newest, self.dice.randrange(newest + 1)})
        size, chunks = self.dice.randrange(1, 200), self.dice.choice([0, 0, 0, 2])
        await self.shard.put(self.some_id, *versions, size=size, num_chunks=chunks)

    async def admit(self) -> None:
        await self.shard.admit(self.some_id, self.dice.choice([1, 60_000]))

    async def renew_credits(self) -> None:
        await self.shard.renew_credits(self.some_ids, 1)

    async def abandon(self) -> None:
        prompt = PromptRef(task="sums", index=1, attempt=self.dice.randrange(4))
        how = self.dice.choice([(), (Rerun.as_stale, prompt), (Rerun.always, prompt)])
        await self.shard.abandon(self.some_id, "test", *how)

    async def form(self) -> None:
        self.step += self.dice.randrange(2)
        lease_ms = self.dice.choice([1, 60_000])
        count, owner = self.dice.randrange(1, 4), self.some_owner
        await self.shard.lease(self.step, self.version, count, owner, lease_ms=lease_ms)

    async def take(self) -> None:
        await self.shard.take(self.version, self.some_ids, self.some_owner, 60_000, self.step)

    async def validate(self) -> None:
        await self.shard.validate(
            version=self.version,
            owner=self.some_owner,
            lease_ms=60_000,
            oldest=self.some_oldest,
            ids=self.some_ids,
        )

    async def consume(self) -> None:
        await self.shard.consume(
            owner=self.some_owner,
            step=self.step,
            version=self.version,
            oldest=self.some_oldest,
            ids=self.some_ids,
        )

    async def nack(self) -> None:
        await self.shard.nack(self.some_owner, "test", self.some_ids)

    async def renew(self) -> None:
        await self.shard.renew(self.some_owner, self.dice.choice([1, 60_000]), self.some_ids)

    async def ack(self) -> None:
        lineage = self.dice.choice(["", self.lineage, "nobody"])
        await self.shard.ack(self.step - self.dice.randrange(3), lineage, bound=2)

    async def quarantine(self) -> None:
        await self.shard.quarantine(self.some_owner, "undecodable", self.some_id)

    async def release(self) -> None:
        await self.dice.choice([self.shard.release, self.shard.discard])(self.some_id)

    async def publish(self) -> None:
        self.version += 1
        await self.shard.publish(self.version)

    async def tune(self) -> None:
        await self.shard.tune(self.dice.randrange(5))

    async def sweep(self) -> None:
        await self.shard.sweep(bound=3)

    async def reconcile_begin(self) -> None:
        self.num_lineages += 1
        back = max(0, self.version - self.dice.randrange(3))
        self.version += 1
        self.lineage = f"l{self.num_lineages}"
        self.step = max(0, self.step - self.dice.randrange(4))
        begun = await self.shard.reconcile_begin(
            self.lineage, step=self.step, version=back, resume_version=self.version
        )
        assert begun.word == "begun"

    async def reconcile(self) -> None:
        await self.shard.reconcile_acked(self.lineage, self.some_ids[:1])
        for _ in range(self.dice.randrange(8)):
            await self.shard.reconcile(self.lineage, bound=2)


@pytest.mark.parametrize("mode", range(len(MODES)))
async def test_no_order_of_verbs_breaks_a_shard(open_shard: Any, mode: int) -> None:
    shard = await open_shard(groups_per_step=9, max_staleness=2, **MODES[mode])
    walk = Walk(shard, seed=mode)
    often = [walk.push] * 6 + [walk.form, walk.consume, walk.admit] * 3 + [walk.reconcile] * 3
    others = [
        *(walk.renew_credits, walk.abandon, walk.take, walk.validate, walk.nack, walk.renew),
        *(walk.ack, walk.quarantine, walk.release, walk.publish, walk.tune, walk.sweep),
        walk.reconcile_begin,
    ]
    verbs: list[Callable[[], Awaitable[None]]] = often + others
    for number in range(200):
        await walk.dice.choice(verbs)()
        if number % 50 == 49:  # forget who was pushed, so that ids may be used again
            async for key in shard.redis.scan_iter(shard.keys("group:*")):
                state = await shard.redis.hget(key, "state")
                if state is not None and (state == b"acked" or state.startswith(b"dropped:")):
                    await shard.redis.delete(key)
    stats = await shard.stats()
    assert stats.pushed > 20 and stats.trained > 0
