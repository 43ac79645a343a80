"""Samples that wait for a slot at an engine, in the order in which they are served.

Samples with the same needs share a queue: if its first finds no slot, none does. So the cost of
serving grows with the number of queues, not of samples. One timer ends the wait of samples for
which no engine makes progress.
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
    """What decides which engines may serve a sample."""

    engine: str | None
    """The only engine that may serve it, if one was named."""
    min_version: int


class QueueKey(NamedTuple):
    """What the samples of one queue have in common."""

    needs: Needs
    failed: frozenset[str]
    """Engines that failed them."""


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter:
    """One waiting sample. Equal orders are served first come, first served."""

    sample: Sample
    tokens: int
    """Its expected final number of tokens."""
    failed: Mapping[str, float]
    """Engines at which it failed, with the time; others are preferred."""
    joined_at: float
    granted: asyncio.Future[Slot]
    order: tuple[int, int] = field(init=False)
    key: QueueKey = field(init=False)

    def __post_init__(self) -> None:
        # Fixed now: the line finds the waiter by them when it leaves.
        self.order = (self.sample.order, next(_arrivals))
        needs = Needs(self.sample.engine, self.sample.min_version)
        self.key = QueueKey(needs, frozenset(self.failed))


class WaitingLine:
    """All waiting samples: rollouts before evaluations, then the lowest order first."""

    def __init__(self) -> None:
        self._queues: dict[Priority, dict[QueueKey, list[Waiter]]] = {p: {} for p in Priority}
        self._of_sample: dict[Sample, Waiter] = {}

    def __len__(self) -> int:
        return len(self._of_sample)

    def queues(self, priority: Priority) -> dict[QueueKey, list[Waiter]]:
        """The non-empty queues, each in order. The mapping is a copy, the queues are not."""
        return dict(self._queues[priority])

    def find(self, sample: Sample) -> Waiter | None:
        return self._of_sample.get(sample)

    def join(self, waiter: Waiter) -> None:
        assert waiter.sample not in self._of_sample, waiter.sample.sample_id
        self._of_sample[waiter.sample] = waiter
        queue = self._queues[waiter.sample.priority].setdefault(waiter.key, [])
        insort(queue, waiter, key=_order)

    def leave(self, waiter: Waiter) -> None:
        """Does nothing if it has left already."""
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
    """When an engine that may serve them last made progress."""
    waiters: dict[Waiter, None] = field(default_factory=dict)


class StarvationTimer:
    """Calls `give_up` with each waiter for which no engine made progress for `timeout_s`.

    A sample may wait while any engine that may serve it makes progress with any sample. `give_up`
    must make the waiter leave.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        last_progress: Callable[[Needs], float],
        give_up: Callable[[Waiter], None],
    ) -> None:
        """`last_progress`: of the engines that can serve these needs now."""
        self._timeout_s = timeout_s
        self._last_progress = last_progress
        self._give_up = give_up
        self._by_needs: dict[Needs, _Waiters] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def join(self, waiter: Waiter) -> None:
        """Waiters must join in the order of their arrival."""
        self._by_needs.setdefault(waiter.key.needs, _Waiters()).waiters[waiter] = None
        if self._alarm is None:
            self._set_alarm(waiter.joined_at + self._timeout_s)

    def leave(self, waiter: Waiter) -> None:
        """Does nothing if it has left already."""
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
        """Must be called before what an engine may serve changes."""
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
