"""Samples that wait for a slot at an engine, in the order in which they are served.

Samples that need the same of an engine share a queue: where its first finds no slot, none of it
does. So the cost of serving the line grows with the number of queues, not of samples. One timer
watches over all of them and ends the wait of samples that no engine makes progress for.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from rollout_pool.sampling.engine_state import Slot
from rollout_pool.sampling.sample import Priority, Sample

_arrivals = count()


class Needs(NamedTuple):
    """The requirements that decide which engines may serve a sample."""

    engine: str | None
    """The only engine that may serve it, if one was named."""
    min_version: int


class QueueKey(NamedTuple):
    """The samples of one queue have these in common."""

    needs: Needs
    failed: frozenset[str]
    """Engines that failed them, at whatever time."""


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter:
    """One sample. Those of equal order are served first come, first served."""

    sample: Sample
    tokens: int
    """Tokens that it is expected to hold in the end."""
    failed: Mapping[str, float]
    """Engines at which it failed, with the time: others are preferred."""
    joined_at: float
    granted: asyncio.Future[Slot]
    order: tuple[int, int] = field(init=False)
    key: QueueKey = field(init=False)

    def __post_init__(self) -> None:
        # Taken now: the line finds it by them when it leaves.
        self.order = (self.sample.order, next(_arrivals))
        needs = Needs(self.sample.engine, self.sample.min_version)
        self.key = QueueKey(needs, frozenset(self.failed))


class WaitingLine:
    """All that wait: every rollout before every evaluation, and the lowest order first."""

    def __init__(self) -> None:
        self._queues: dict[Priority, dict[QueueKey, list[Waiter]]] = {p: {} for p in Priority}
        self._of_sample: dict[Sample, Waiter] = {}

    def __len__(self) -> int:
        return len(self._of_sample)

    def queues(self, priority: Priority) -> dict[QueueKey, list[Waiter]]:
        """None of them empty, each in order. A copy of the mapping, not of the queues."""
        return dict(self._queues[priority])

    def find(self, sample: Sample) -> Waiter | None:
        return self._of_sample.get(sample)

    def join(self, waiter: Waiter) -> None:
        assert waiter.sample not in self._of_sample, waiter.sample.sample_id
        self._of_sample[waiter.sample] = waiter
        queue = self._queues[waiter.sample.priority].setdefault(waiter.key, [])
        insort(queue, waiter, key=_order)

    def leave(self, waiter: Waiter) -> None:
        """Nothing happens if it has left before."""
        if self._of_sample.get(waiter.sample) is not waiter:
            return
        del self._of_sample[waiter.sample]
        queues = self._queues[waiter.sample.priority]
        queue = queues[waiter.key]
        del queue[bisect_left(queue, waiter.order, key=_order)]
        if not queue:
            del queues[waiter.key]


def _order(waiter: Waiter) -> tuple[int, int]:
    return waiter.order


@dataclass(kw_only=True, slots=True)
class _Waiters:
    """Waiters with the same needs, first come first."""

    progress_at: float = float("-inf")
    """When an engine that may serve them was last seen to make progress."""
    waiters: dict[Waiter, None] = field(default_factory=dict)


class StarvationTimer:
    """Calls `give_up` with each waiter for which no engine did anything for `timeout_s`.

    A sample may wait as long as an engine that may serve it makes progress with any sample. The
    waiter that is given up must leave.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        last_progress: Callable[[Needs], float],
        give_up: Callable[[Waiter], None],
    ) -> None:
        """`last_progress`: of the engines that may serve such needs now."""
        self._timeout_s = timeout_s
        self._last_progress = last_progress
        self._give_up = give_up
        self._by_needs: dict[Needs, _Waiters] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def join(self, waiter: Waiter) -> None:
        """Waiters join in the order in which they came."""
        self._by_needs.setdefault(waiter.key.needs, _Waiters()).waiters[waiter] = None
        if self._alarm is None:
            self._set_alarm(waiter.joined_at + self._timeout_s)

    def leave(self, waiter: Waiter) -> None:
        """Nothing happens if it has left before."""
        waiting = self._by_needs.get(waiter.key.needs)
        if waiting is None:
            return
        waiting.waiters.pop(waiter, None)
        if not waiting.waiters:
            del self._by_needs[waiter.key.needs]
        if not self._by_needs and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def note_progress(self) -> None:
        """Must be called before an engine changes in what it may serve."""
        for needs, waiting in self._by_needs.items():
            waiting.progress_at = max(waiting.progress_at, self._last_progress(needs))

    def _check(self) -> None:
        self._alarm = None
        self.note_progress()
        now = time.monotonic()
        for waiting in list(self._by_needs.values()):
            while (first := next(iter(waiting.waiters), None)) is not None:
                if self._deadline(waiting, first) > now:
                    break
                self.leave(first)
                self._give_up(first)
        deadlines = [
            self._deadline(waiting, next(iter(waiting.waiters)))
            for waiting in self._by_needs.values()
        ]
        if deadlines:
            self._set_alarm(min(deadlines))

    def _deadline(self, waiting: _Waiters, first: Waiter) -> float:
        return max(first.joined_at, waiting.progress_at) + self._timeout_s

    def _set_alarm(self, at: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(at, self._check)
