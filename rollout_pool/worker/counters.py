"""What a worker counts for the run, gathered and sent every second instead of group by group."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Protocol

from buffer.types import TrajectoryGroup
from rollout_pool.worker.group_run import GroupRun

SEND_EVERY_S = 1.0
LENGTHS = ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16384, "<=16k"), (65536, "<=64k"))
"""From 1k on, the buckets of the groups that the buffer drops."""
LONGER = ">64k"


def length_bucket(num_tokens: int) -> str:
    """The bucket of a sample of `num_tokens` tokens."""
    return next((name for most, name in LENGTHS if num_tokens <= most), LONGER)


class CounterStore(Protocol):
    """The part of RunState that is used here."""

    async def count(self, name: str, amount: float = 1) -> None: ...


class Counters:
    """Counts that have not been sent yet. Used in one event loop."""

    def __init__(self, store: CounterStore) -> None:
        self._store = store
        self._unsent: Counter[str] = Counter()
        self._sending: asyncio.Task[None] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self._unsent[name] += amount  # type: ignore[assignment]  # seconds are no integers

    # How a group ended ----------------------------------------------------------------------------

    def add_samples(self, run: GroupRun) -> None:
        """The cost of a group's samples, however the group ended."""
        self.add("tokens_generated", run.num_tokens + run.num_wasted)
        self.add("tokens_wasted", run.num_wasted)
        self.add("samples_retried", run.num_failures)
        self.add("logprobs_refused", run.num_refused)
        self.add("rewards_failed", run.num_unscored)

    def add_completed(self, run: GroupRun, group: TrajectoryGroup) -> None:
        """A complete group, by the length of its longest sample, and how its episodes ended."""
        self._add_length("completed", run)
        ends = {trajectory.episode: trajectory.finish_reason for trajectory in group.trajectories}
        for end in ends.values():
            self.add(f"episodes_ended:{end}")

    def add_given_up(self, run: GroupRun) -> None:
        """A group that will never be pushed: all its tokens are wasted."""
        self._add_length("given_up", run)
        self.add("tokens_wasted", run.num_tokens)

    def add_stopped(self, run: GroupRun) -> None:
        """A group cut short by the end of the run; nothing was wrong with it."""
        self.add("groups_stopped")
        self.add("tokens_stopped", run.num_tokens)

    def _add_length(self, what: str, run: GroupRun) -> None:
        bucket = length_bucket(run.longest)
        self.add(f"{what}:{bucket}")
        self.add(f"{what}_s:{bucket}", time.monotonic() - run.started)

    # Sending --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends every second. Never returns."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends all that was added so far. What could not be sent stays for the next flush."""
        # A cancelled flush leaves its sending to come to its end, so that nothing is sent twice;
        # the next flush waits for it.
        if self._sending is not None:
            await asyncio.wait([self._sending])
        self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        sent, self._unsent = self._unsent, Counter()
        results = await asyncio.gather(
            *(self._store.count(name, amount) for name, amount in sent.items()),
            return_exceptions=True,
        )
        errors = []
        for name, result in zip(sent, results, strict=True):
            if isinstance(result, BaseException):
                self.add(name, sent[name])
                errors.append(result)
        if errors:
            raise errors[0]
