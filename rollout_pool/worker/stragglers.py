"""Policies for groups that take much longer than the others.

continue_across_versions   nothing
interrupt_and_resume       announce ──► all samples stop, keep their tokens and wait
                           the engines serve the new version, or RESUME_AFTER_S have passed
                           ──► all continue, the stalest first
postpone                   a full batch is ready ──► groups far slower than the median stop and wait
                           the batch is taken, or only they are left, or they waited as long as the
                           median group takes ──► they continue behind groups started meanwhile

The policy may change during the run (`make tune`): samples that wait under the old one go on, and
the new one takes over the groups in flight.

With keep_partial=False a stopped sample begins again at its prompt instead of keeping its tokens.

A group is postponed at most `max_postponements` times; after the last time it is served first until
it ends. Every wait here is bounded, so no group starves. External groups are not postponed and do
not count for the median: how long they take does not depend on the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from configs.choices import TailPolicy
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import Sample
from rollout_pool.worker.counters import Counters

ANNOUNCE_TIMEOUT_S = 60.0
RESUME_AFTER_S = 30.0
"""Longest time that interrupted samples wait for the engines to serve the new version."""
SLOW_FACTOR = 2.0
"""A group is slow if it takes this many times the median of the last ones."""
RECENT = 64
MIN_RECENT = 4
"""Groups needed for a meaningful median."""
LOOK_EVERY_S = 0.5
"""Shortest time between two looks at the buffer, and shortest wait of a postponed group."""


class Versions(Protocol):
    """The part of RunState used here."""

    async def trainer_version(self) -> int: ...
    async def wait_version_above(self, version: int, timeout_s: float) -> int: ...
    async def wait_engines_at(self, version: int, timeout_s: float) -> dict[str, int]: ...


@dataclass(kw_only=True, eq=False)
class Tail:
    """The policy for slow groups of one worker.

    This base class does nothing: continue_across_versions.
    """

    groups: Collection[GroupSamples]
    """The groups in flight now; the worker changes it."""
    durations: Sequence[float]
    """Seconds that the last complete groups took; the worker changes it."""
    interrupt: Callable[[Sample], None]
    versions: Versions
    counters: Counters
    is_batch_ready: Callable[[], Awaitable[bool]]
    """Returns whether the trainer could take a whole batch now."""
    next_order: Callable[[], int]
    """The order of the group that starts next."""
    max_postponements: int
    keep_partial: bool
    """Stopped samples keep their tokens."""

    async def run(self) -> None:
        """Interrupts, postpones and releases groups. Never returns."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Lets samples that wait go on: another policy takes its place, and `run` has ended."""
        self._release_in_order(self.groups)

    def _release_in_order(self, groups: Iterable[GroupSamples]) -> None:
        for group in sorted(groups, key=lambda group: group.order):
            group.release()


class InterruptAndResume(Tail):
    async def run(self) -> None:
        version = await self.versions.trainer_version()
        while True:
            try:
                version = await self.versions.wait_version_above(version, ANNOUNCE_TIMEOUT_S)
            except TimeoutError:
                continue  # a long step; a dead trainer is detected elsewhere
            try:
                for group in self.groups:
                    group.hold(2 * RESUME_AFTER_S, keep_partial=self.keep_partial)
                    running = group.running
                    for sample in running:
                        self.interrupt(sample)
                    self.counters.add("samples_interrupted", len(running))
                with contextlib.suppress(TimeoutError):
                    await self.versions.wait_engines_at(version, RESUME_AFTER_S)
            finally:
                self._release_in_order(self.groups)


@dataclass(kw_only=True, slots=True)
class Lap:
    """Progress of a group."""

    since: float
    """When it began, was postponed or resumed."""
    num_postponed: int = 0
    stopped: set[Sample] = field(default_factory=set)
    """Samples interrupted for its current postponement."""


@dataclass(kw_only=True, eq=False)
class Postpone(Tail):
    _laps: dict[GroupSamples, Lap] = field(default_factory=dict, init=False)
    """By groups in flight that may be postponed."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)  # groups become slow by time alone
            self._follow_groups()
            if self._waiting() or self._slow():
                is_ready = await self.is_batch_ready()
                self._follow_groups()
                self._release_due(is_ready)
                slow = self._slow()
                if is_ready and len(slow) + len(self._waiting()) < len(self._laps):
                    for group in slow:
                        self._postpone(group)
                # Environments that were running when their group was postponed may have requested
                # another turn since.
                for group in self._waiting():
                    self._stop(group)

    def _follow_groups(self) -> None:
        self._laps = {
            group: self._laps.get(group) or Lap(since=group.started)
            for group in self.groups
            if not group.is_external
        }

    @property
    def _median_s(self) -> float | None:
        return statistics.median(self.durations) if len(self.durations) >= MIN_RECENT else None

    def _waiting(self) -> list[GroupSamples]:
        return [group for group in self._laps if group.is_held]

    def _slow(self) -> list[GroupSamples]:
        """Slow groups with a sample to interrupt."""
        now, median_s = time.monotonic(), self._median_s
        return [
            group
            for group, lap in self._laps.items()
            if median_s is not None
            and now - lap.since > SLOW_FACTOR * median_s
            and lap.num_postponed < self.max_postponements
            and not group.is_held
            and group.running
        ]

    def _postpone(self, group: GroupSamples) -> None:
        lap = self._laps[group]
        lap.num_postponed += 1
        lap.since = time.monotonic()
        lap.stopped.clear()
        is_last_time = lap.num_postponed >= self.max_postponements
        group.move(0 if is_last_time else self.next_order())
        longest_wait_s = (self._median_s or 0.0) + RESUME_AFTER_S
        group.hold(longest_wait_s, keep_partial=self.keep_partial)
        self.counters.add("groups_postponed")

    def _stop(self, group: GroupSamples) -> None:
        """Interrupts the running samples of a postponed group."""
        lap, running = self._laps[group], {*group.running}
        for sample in group.to_stop:
            self.interrupt(sample)
        self.counters.add("samples_interrupted", len(running - lap.stopped))
        lap.stopped |= running

    def _release_due(self, is_batch_ready: bool) -> None:
        waiting, now = self._waiting(), time.monotonic()
        if is_batch_ready and len(waiting) < len(self._laps):
            enough_s = self._median_s or 0.0
            waiting = [group for group in waiting if now - self._laps[group].since > enough_s]
        for group in waiting:
            self._laps[group].since = now
        self._release_in_order(waiting)


TAILS: Mapping[TailPolicy, type[Tail]] = {
    TailPolicy.continue_across_versions: Tail,
    TailPolicy.interrupt_and_resume: InterruptAndResume,
    TailPolicy.postpone: Postpone,
}
