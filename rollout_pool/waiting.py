"""Samples that wait for room at an engine, in the order in which they are served."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from rollout_pool.samples import Priority, Sample

if TYPE_CHECKING:
    from rollout_pool.router import Place

_arrivals = count()


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter:
    """One sample. Of equal rank the first to come is the first to be served."""

    sample: Sample
    tokens: int
    """That it is expected to hold in the end."""
    failed: Mapping[str, float]
    """Engines at which it failed, with the time: others are preferred."""
    hopeful_at: float
    """When an engine that may serve it last did anything for anyone."""
    granted: asyncio.Future[Place]
    arrival: int = field(default_factory=lambda: next(_arrivals))

    @property
    def order(self) -> tuple[int, int]:
        return self.sample.rank, self.arrival

    @property
    def needs(self) -> tuple[str | None, int]:
        """What decides which engines may serve it."""
        return self.sample.engine, self.sample.min_version


class WaitingLine:
    """All who wait: every rollout before every evaluation, and of each the lowest rank first."""

    def __init__(self) -> None:
        self._lines: dict[Priority, list[Waiter]] = {priority: [] for priority in Priority}
        self._of_sample: dict[Sample, Waiter] = {}

    def __len__(self) -> int:
        return len(self._of_sample)

    def __iter__(self) -> Iterator[Waiter]:
        for line in self._lines.values():
            yield from line

    def of(self, priority: Priority) -> list[Waiter]:
        """A copy, so that it may be walked through while waiters leave."""
        return list(self._lines[priority])

    def find(self, sample: Sample) -> Waiter | None:
        return self._of_sample.get(sample)

    def join(self, waiter: Waiter) -> None:
        assert waiter.sample not in self._of_sample, waiter.sample.sample_id
        self._of_sample[waiter.sample] = waiter
        insort(self._lines[waiter.sample.priority], waiter, key=lambda w: w.order)

    def leave(self, waiter: Waiter) -> None:
        """Nothing happens if it has left before."""
        if self._of_sample.pop(waiter.sample, None) is not None:
            self._lines[waiter.sample.priority].remove(waiter)
