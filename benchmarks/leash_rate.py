"""Our own rate: two producers that push many groups at once, two ranks that lease whole batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from benchmarks.groups import GroupMaker
from benchmarks.team import IN_FLIGHT, Team, barrier
from buffer.redis.connection import connect
from buffer.replay_buffer import ReplayBuffer
from configs.schema import BufferConfig

_ACK_EVERY = 4
_WAIT_S = 120.0


async def open_buffer(
    url: str, run: str, groups_per_step: int, config: BufferConfig
) -> ReplayBuffer:
    """One more client of the run, which is opened if it is new."""
    buffer = ReplayBuffer(await connect(url), run, config)
    await buffer.open(config, groups_per_step)
    return buffer


@dataclass(slots=True)
class MakeProducer:
    url: str
    run: str
    num_tokens: int
    groups_per_step: int

    def __call__(self) -> _Producer:
        return _Producer(self)


@dataclass(slots=True)
class MakeRank:
    url: str
    run: str
    groups_per_step: int
    rank: int
    barrier: Any

    def __call__(self) -> _Rank:
        return _Rank(self)


class _Producer:
    def __init__(self, spec: MakeProducer) -> None:
        self._loop = asyncio.new_event_loop()
        self._maker = GroupMaker(spec.num_tokens)
        self._buffer = self._loop.run_until_complete(
            open_buffer(spec.url, spec.run, spec.groups_per_step, BufferConfig())
        )

    def work(self, num_groups: int) -> None:
        self._loop.run_until_complete(self._push_all(num_groups))

    async def _push_all(self, num_groups: int) -> None:
        life = uuid4().hex[:8]
        numbers = iter(range(num_groups))

        async def one_after_the_other() -> None:
            for number in numbers:
                await self._buffer.push(self._maker.make(f"{life}-{number}"))

        await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))


class _Rank:
    """Leases the next batch while it hands this one over. Rank 0 validates, consumes and acks."""

    def __init__(self, spec: MakeRank) -> None:
        self._spec = spec
        self._step = 0
        self._loop = asyncio.new_event_loop()
        self._buffer = self._loop.run_until_complete(
            open_buffer(spec.url, spec.run, spec.groups_per_step, BufferConfig())
        )

    def work(self, num_groups: int) -> None:
        """Of both ranks together twice as many are trained, so that each has its share."""
        self._loop.run_until_complete(self._train(2 * num_groups // self._spec.groups_per_step))

    async def _train(self, num_steps: int) -> None:
        last = self._step + num_steps
        leasing = asyncio.create_task(self._lease(self._step + 1))
        for step in range(self._step + 1, last + 1):
            lease = await leasing
            if step < last:
                leasing = asyncio.create_task(self._lease(step + 1))
            await asyncio.to_thread(self._spec.barrier.wait, _WAIT_S)
            if self._spec.rank == 0:
                kept = await self._buffer.validate(lease, 0)
                assert len(kept) == self._spec.groups_per_step
                await self._buffer.consume(lease, kept)
                if step % _ACK_EVERY == 0 or step == last:
                    await self._buffer.ack(step)
        self._step = last

    async def _lease(self, step: int) -> Any:
        return await self._buffer.lease(
            step=step,
            version=0,
            num_groups=self._spec.groups_per_step,
            share=self._spec.rank,
            num_shares=2,
            timeout_s=_WAIT_S,
        )


def leash_team(url: str, num_tokens: int, groups_per_step: int, server_cpu_s: Any) -> Team:
    run = f"rate-{num_tokens}-{uuid4().hex[:6]}"
    meeting = barrier(2)
    producers = [MakeProducer(url, run, num_tokens, groups_per_step) for _ in range(2)]
    ranks = [MakeRank(url, run, groups_per_step, rank, meeting) for rank in range(2)]
    return Team([*producers, *ranks], server_cpu_s)
