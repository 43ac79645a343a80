"""Our own rate: two producers that push many groups at once, two ranks that lease whole batches."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from uuid import uuid4

from benchmarks.replay_buffer.groups import GroupMaker
from benchmarks.replay_buffer.stage import Stage, lease, open_buffer
from benchmarks.team import IN_FLIGHT, Team, barrier, in_flight
from configs.schema import BufferConfig

_ACK_EVERY = 4
_WAIT_S = 120.0


class Producer:
    """Pushes groups of the maker's kind as fast as one process can."""

    def __init__(
        self,
        url: str,
        run: str,
        groups_per_step: int,
        maker: GroupMaker,
        config: BufferConfig,
        at_once: int = IN_FLIGHT,
    ) -> None:
        self._maker, self._at_once = maker, at_once
        self._runner = asyncio.Runner()
        self._buffer = self._runner.run(open_buffer(url, run, groups_per_step, config))

    def work(self, num_groups: int) -> None:
        life = uuid4().hex[:8]

        async def push(number: int) -> None:
            await self._buffer.push(self._maker.make(f"{life}-{number}"))

        self._runner.run(in_flight(push, num_groups, self._at_once))


class Rank:
    """Leases the next batch while it hands this one over. Rank 0 validates, consumes and acks."""

    def __init__(self, url: str, run: str, groups_per_step: int, rank: int, barrier: Any) -> None:
        self._groups_per_step, self._rank, self._barrier = groups_per_step, rank, barrier
        self._step = 0
        self._runner = asyncio.Runner()
        self._buffer = self._runner.run(open_buffer(url, run, groups_per_step, BufferConfig()))

    def work(self, num_groups: int) -> None:
        """Trains twice as many with both ranks together, so that each has its part."""
        self._runner.run(self._train(2 * num_groups // self._groups_per_step))

    async def _train(self, num_steps: int) -> None:
        last = self._step + num_steps
        leasing = asyncio.create_task(self._lease(self._step + 1))
        for step in range(self._step + 1, last + 1):
            leased = await leasing
            if step < last:
                leasing = asyncio.create_task(self._lease(step + 1))
            await asyncio.to_thread(self._barrier.wait, _WAIT_S)
            if self._rank == 0:
                kept = await self._buffer.validate(leased, 0)
                assert len(kept) == self._groups_per_step
                await self._buffer.consume(leased, kept)
                if step % _ACK_EVERY == 0 or step == last:
                    await self._buffer.ack(step)
        self._step = last

    async def _lease(self, step: int) -> Any:
        return await lease(
            self._buffer, step, self._groups_per_step, share=self._rank, num_shares=2
        )


def leash_team(stage: Stage, num_tokens: int, groups_per_step: int) -> Team:
    run = f"rate-{num_tokens}-{uuid4().hex[:6]}"
    meeting = barrier(2)
    producer = partial(
        Producer, stage.url, run, groups_per_step, GroupMaker(num_tokens), BufferConfig()
    )
    ranks = [partial(Rank, stage.url, run, groups_per_step, rank, meeting) for rank in range(2)]
    return Team([producer, producer, *ranks], stage.cpu_s)
