"""Samples that wait for room at an engine, in the order in which they are served.

Those that need the same of an engine stand in one queue: where its first finds no place, none of it
does. So what it costs to serve the line grows with the number of queues, not of samples.

Ends the wait of samples that no engine does anything for.

A sample may hope as long as an engine that may serve it does something for anyone. One timer
watches over all who wait, and those with the same needs hope together.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from rollout_pool.sampling.engine_state import Place
from rollout_pool.sampling.sample import Priority, Sample

_arrivals = count()


class Needs(NamedTuple):
    """What decides which engines may serve a sample."""

    engine: str | None
    """That it was asked for by name."""
    min_version: int


class QueueKey(NamedTuple):
    """What the samples of one queue have in common."""

    needs: Needs
    failed: frozenset[str]
    """Engines that failed them, at whatever time."""


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter:
    """One sample. Of equal rank the first to come is the first to be served."""

    sample: Sample
    tokens: int
    """That it is expected to hold in the end."""
    failed: Mapping[str, float]
    """Engines at which it failed, with the time: others are preferred."""
    joined_at: float
    granted: asyncio.Future[Place]
    order: tuple[int, int] = field(init=False)
    key: QueueKey = field(init=False)

    def __post_init__(self) -> None:
        # As they are now: its place in the line is found by them when it leaves.
        self.order = (self.sample.rank, next(_arrivals))
        needs = Needs(self.sample.engine, self.sample.min_version)
        self.key = QueueKey(needs, frozenset(self.failed))


class WaitingLine:
    """All who wait: every rollout before every evaluation, and of each the lowest rank first."""

    def __init__(self) -> None:
        self._queues: dict[Priority, dict[QueueKey, list[Waiter]]] = {p: {} for p in Priority}
        self._of_sample: dict[Sample, Waiter] = {}

    def __len__(self) -> int:
        return len(self._of_sample)

    def queues(self, priority: Priority) -> dict[QueueKey, list[Waiter]]:
        """None of them empty, each in order. A copy of the mapping, not of the queues."""
        return dict(self._queues[priority])

    def sizes(self) -> Iterator[tuple[Needs, int]]:
        for queues in self._queues.values():
            for key, queue in queues.items():
                yield key.needs, len(queue)

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
class _Hopeful:
    """Who waits with the same needs, the first to come first."""

    progress_at: float = float("-inf")
    """When an engine that may serve them last did anything for anyone, as far as was looked."""
    waiters: dict[Waiter, None] = field(default_factory=dict)


class Hope:
    """Calls `give_up` with each waiter that has waited `timeout_s` in vain, which must leave."""

    def __init__(
        self,
        timeout_s: float,
        *,
        last_progress: Callable[[Needs], float],
        give_up: Callable[[Waiter], None],
    ) -> None:
        """`last_progress`: at the engines that may serve such needs now."""
        self._timeout_s = timeout_s
        self._last_progress = last_progress
        self._give_up = give_up
        self._hopeful: dict[Needs, _Hopeful] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def join(self, waiter: Waiter) -> None:
        """`waiter` must have come after all others that are here."""
        self._hopeful.setdefault(waiter.key.needs, _Hopeful()).waiters[waiter] = None
        if self._alarm is None:
            self._set_alarm(waiter.joined_at + self._timeout_s)

    def leave(self, waiter: Waiter) -> None:
        """Nothing happens if it has left before."""
        hopeful = self._hopeful.get(waiter.key.needs)
        if hopeful is None:
            return
        hopeful.waiters.pop(waiter, None)
        if not hopeful.waiters:
            del self._hopeful[waiter.key.needs]
        if not self._hopeful and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def look(self) -> None:
        """Takes note of progress; to be called before an engine changes in what it may serve."""
        for needs, hopeful in self._hopeful.items():
            hopeful.progress_at = max(hopeful.progress_at, self._last_progress(needs))

    def _ring(self) -> None:
        self._alarm = None
        self.look()
        now = time.monotonic()
        for hopeful in list(self._hopeful.values()):
            while (first := next(iter(hopeful.waiters), None)) is not None:
                if self._deadline(hopeful, first) > now:
                    break
                self.leave(first)
                self._give_up(first)
        deadlines = [
            self._deadline(hopeful, next(iter(hopeful.waiters)))
            for hopeful in self._hopeful.values()
        ]
        if deadlines:
            self._set_alarm(min(deadlines))

    def _deadline(self, hopeful: _Hopeful, first: Waiter) -> float:
        return max(first.joined_at, hopeful.progress_at) + self._timeout_s

    def _set_alarm(self, at: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(at, self._ring)
