"""What a worker counts for the run, gathered and told every second instead of group by group.

What is counted of one group when it has ended, whichever way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Protocol

from buffer.types import TrajectoryGroup
from rollout_pool.worker.generate import Flight

TELL_EVERY_S = 1.0
LENGTHS = ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16384, "<=16k"), (65536, "<=64k"))
"""From 1k on those of the groups that the buffer drops."""
LONGER = ">64k"


def length_bucket(num_tokens: int) -> str:
    """Which of the buckets a sample of so many tokens belongs to."""
    return next((name for most, name in LENGTHS if num_tokens <= most), LONGER)


class Counting(Protocol):
    """What is used of RunState."""

    async def count(self, name: str, amount: float = 1) -> None: ...


class Tally:
    """Counters that are not told yet. Used in one event loop."""

    def __init__(self, state: Counting) -> None:
        self._state = state
        self._waiting: Counter[str] = Counter()
        self._telling: asyncio.Task[None] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self._waiting[name] += amount  # type: ignore[assignment]  # seconds are no integers

    async def flush(self) -> None:
        """Tells all that was added so far.

        What was begun to be told is told to its end, also if this is cancelled; the next flush
        waits for it. What could not be told stays for that one.
        """
        if self._telling is not None:
            await asyncio.wait([self._telling])
        self._telling = asyncio.create_task(self._tell())
        await asyncio.shield(self._telling)

    async def _tell(self) -> None:
        told, self._waiting = self._waiting, Counter()
        results = await asyncio.gather(
            *(self._state.count(name, amount) for name, amount in told.items()),
            return_exceptions=True,
        )
        errors = []
        for name, result in zip(told, results, strict=True):
            if isinstance(result, BaseException):
                self.add(name, told[name])
                errors.append(result)
        if errors:
            raise errors[0]

    async def keep_telling(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            await self.flush()


def count_flight(tally: Tally, flight: Flight) -> None:
    """What its samples cost."""
    tally.add("tokens_generated", flight.num_tokens + flight.num_wasted)
    tally.add("tokens_wasted", flight.num_wasted)
    tally.add("samples_retried", flight.num_failures)
    tally.add("logprobs_refused", flight.num_refused)
    tally.add("rewards_failed", flight.num_unscored)


def count_completed(tally: Tally, flight: Flight, group: TrajectoryGroup) -> None:
    """A group that came to its end, by the length of its longest sample; how its episodes ended."""
    _count_length(tally, "completed", flight)
    ends = {trajectory.episode: trajectory.finish_reason for trajectory in group.trajectories}
    for end in ends.values():
        tally.add(f"episodes_ended:{end}")


def count_given_up(tally: Tally, flight: Flight) -> None:
    """A group that will never be pushed: all its tokens were in vain."""
    _count_length(tally, "given_up", flight)
    tally.add("tokens_wasted", flight.num_tokens)


def count_stopped(tally: Tally, flight: Flight) -> None:
    """A group that the end of the run cut short: nothing was wrong with it."""
    tally.add("groups_stopped")
    tally.add("tokens_stopped", flight.num_tokens)


def _count_length(tally: Tally, what: str, flight: Flight) -> None:
    bucket = length_bucket(flight.longest)
    tally.add(f"{what}:{bucket}")
    tally.add(f"{what}_s:{bucket}", time.monotonic() - flight.started)
