"""Policies for groups that take much longer than the others.

continue_across_versions   nothing
interrupt_and_resume       publish ──► all samples stop, keep their tokens and wait
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
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from configs.choices import TailPolicy
from rollout_pool.episodes.request import go_on
from rollout_pool.sampling.sample import Sample
from rollout_pool.worker.group_run import Counters, GroupRun

PUBLISH_TIMEOUT_S = 60.0
RESUME_AFTER_S = 30.0
"""Longest time that interrupted samples wait for the engines to serve the published version."""
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


class WaitingRoom:
    """Interrupted samples, released together, by order."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: list[tuple[Sample, asyncio.Future[None]]] = []

    async def pass_through(self, sample: Sample, at_most_s: float) -> None:
        """Returns when the room is open, or after `at_most_s`."""
        if self.is_open:
            return
        waiting = (sample, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_most_s):
                    await waiting[1]
        finally:
            self._waiting.remove(waiting)

    @property
    def samples(self) -> set[Sample]:
        return {sample for sample, _ in self._waiting}

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        # Those that wake first are requested first.
        for _, released in sorted(self._waiting, key=lambda waiting: waiting[0].order):
            if not released.done():
                released.set_result(None)


@dataclass(kw_only=True, eq=False)
class Tail:
    """The policy for slow groups of one worker, each known from `begin` until `end`.

    This base class does nothing: continue_across_versions.
    """

    interrupt: Callable[[Sample], None]
    versions: Versions
    counters: Counters
    is_batch_ready: Callable[[], Awaitable[bool]]
    """Whether the trainer could take a whole batch now."""
    next_order: Callable[[], int]
    """The order of the group that starts next."""
    max_postponements: int
    keep_partial: bool
    """Whether stopped samples keep their tokens."""

    def begin(self, run: GroupRun) -> None:
        """Called before the group's first sample, or when this policy takes its place."""
        run.may_go_on = go_on

    def end(self, run: GroupRun, *, is_done: bool) -> None:
        """`is_done`: the group is complete."""

    async def run(self) -> None:
        """Interrupts, postpones and releases groups. Never returns."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Another policy takes its place, and `run` has ended: samples that wait go on."""

    async def _wait(self, sample: Sample, room: WaitingRoom, at_most_s: float) -> None:
        """A stopped sample waits until it may continue."""
        # Dropped before the wait, so that its old tokens do not make the group too old meanwhile.
        # A client of the endpoint may have read the tokens of its answer (`on_tokens`): those stay.
        if not self.keep_partial and sample.on_tokens is None:
            sample.drop_tokens()
        await room.pass_through(sample, at_most_s)
        self.counters.add("samples_resumed")


@dataclass(kw_only=True, eq=False)
class InterruptAndResume(Tail):
    _runs: set[GroupRun] = field(default_factory=set, init=False)
    _room: WaitingRoom = field(default_factory=WaitingRoom, init=False)

    def begin(self, run: GroupRun) -> None:
        run.may_go_on = self._may_go_on
        self._runs.add(run)

    def end(self, run: GroupRun, *, is_done: bool) -> None:
        self._runs.discard(run)

    async def run(self) -> None:
        version = await self.versions.trainer_version()
        while True:
            try:
                version = await self.versions.wait_version_above(version, PUBLISH_TIMEOUT_S)
            except TimeoutError:
                continue  # a long step; a dead trainer is detected elsewhere
            self._room.close()
            try:
                for run in self._runs:
                    running = run.running
                    for sample in running:
                        self.interrupt(sample)
                    self.counters.add("samples_interrupted", len(running))
                with contextlib.suppress(TimeoutError):
                    await self.versions.wait_engines_at(version, RESUME_AFTER_S)
            finally:
                self._room.open()

    def close(self) -> None:
        self._room.open()

    async def _may_go_on(self, sample: Sample) -> None:
        await self._wait(sample, self._room, 2 * RESUME_AFTER_S)


@dataclass(kw_only=True, slots=True)
class Lap:
    """Progress of a group."""

    since: float
    """When it began or last resumed."""
    num_postponed: int = 0
    is_waiting: bool = False
    room: WaitingRoom = field(default_factory=WaitingRoom)
    stopped: set[Sample] = field(default_factory=set)
    """Samples interrupted for its current postponement."""


class Pace:
    """How long groups take, and which are slow (pure)."""

    def __init__(self, max_postponements: int) -> None:
        self._max_postponements = max_postponements
        self._recent: deque[float] = deque(maxlen=RECENT)

    def note(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def median_s(self) -> float | None:
        return statistics.median(self._recent) if len(self._recent) >= MIN_RECENT else None

    def is_slow(self, lap: Lap, now: float) -> bool:
        median_s = self.median_s
        return (
            median_s is not None
            and not lap.is_waiting
            and lap.num_postponed < self._max_postponements
            and now - lap.since > SLOW_FACTOR * median_s
        )

    def has_waited(self, lap: Lap, now: float) -> bool:
        """Whether a postponed group has waited as long as the median group takes."""
        return now - lap.since > (self.median_s or 0.0)

    def is_last_time(self, lap: Lap) -> bool:
        """Whether the group will not be postponed again."""
        return lap.num_postponed >= self._max_postponements


@dataclass(kw_only=True, eq=False)
class Postpone(Tail):
    _laps: dict[GroupRun, Lap] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._pace = Pace(self.max_postponements)

    def begin(self, run: GroupRun) -> None:
        super().begin(run)
        if run.source.is_external:
            return
        lap = self._laps[run] = Lap(since=time.monotonic())
        run.may_go_on = partial(self._may_go_on, lap.room)

    def end(self, run: GroupRun, *, is_done: bool) -> None:
        if self._laps.pop(run, None) is not None and is_done:
            self._pace.note(time.monotonic() - run.started)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)  # groups become slow by time alone
            if self._waiting() or self._slow():
                is_ready = await self.is_batch_ready()
                self._release(is_ready)
                slow = self._slow()
                if is_ready and len(slow) + len(self._waiting()) < len(self._laps):
                    for run in slow:
                        self._postpone(run)
                # Environments that were running when their group was postponed may have requested
                # another turn since.
                for run in self._waiting():
                    self._stop(run)

    def close(self) -> None:
        for lap in self._laps.values():
            lap.room.open()

    def _waiting(self) -> list[GroupRun]:
        return [run for run, lap in self._laps.items() if lap.is_waiting]

    def _slow(self) -> list[GroupRun]:
        """Slow groups with a sample to interrupt."""
        now = time.monotonic()
        return [
            run for run, lap in self._laps.items() if run.running and self._pace.is_slow(lap, now)
        ]

    def _postpone(self, run: GroupRun) -> None:
        lap = self._laps[run]
        lap.num_postponed += 1
        lap.is_waiting, lap.since = True, time.monotonic()
        run.order = 0 if self._pace.is_last_time(lap) else self.next_order()
        for sample in run.samples:
            sample.order = run.order
        lap.room.close()
        lap.stopped.clear()
        self.counters.add("groups_postponed")

    def _stop(self, run: GroupRun) -> None:
        """Interrupts the running samples of a postponed group."""
        lap = self._laps[run]
        running = {*run.running}
        for sample in running - lap.room.samples:
            self.interrupt(sample)
        self.counters.add("samples_interrupted", len(running - lap.stopped))
        lap.stopped |= running

    def _release(self, is_batch_ready: bool) -> None:
        waiting, now = self._waiting(), time.monotonic()
        are_alone = len(waiting) == len(self._laps)
        for run in sorted(waiting, key=lambda run: run.order):
            lap = self._laps[run]
            if not is_batch_ready or are_alone or self._pace.has_waited(lap, now):
                lap.is_waiting, lap.since = False, now
                lap.room.open()

    async def _may_go_on(self, room: WaitingRoom, sample: Sample) -> None:
        await self._wait(sample, room, (self._pace.median_s or 0.0) + RESUME_AFTER_S)


TAILS: Mapping[TailPolicy, type[Tail]] = {
    TailPolicy.continue_across_versions: Tail,
    TailPolicy.interrupt_and_resume: InterruptAndResume,
    TailPolicy.postpone: Postpone,
}
