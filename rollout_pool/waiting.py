"""Samples that wait for room at an engine, in the order in which they are served.

Those that need the same of an engine stand in one queue: where its first finds no place, none of it
does. So what it costs to serve the line grows with the number of queues, not of samples.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from rollout_pool.samples import Priority, Sample

if TYPE_CHECKING:
    from rollout_pool.router import Place

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
