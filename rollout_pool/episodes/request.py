"""How an episode is sampled: the request, its interrupt loop and its clock, and whether its program
calls the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.context import Context

from buffer.types import SamplingParams
from configs.rollout_schema import TaskConfig
from rollout_pool.sampling.sample import Completer, Constraint, Interrupted, Priority, Sample

HEEDS_INTERRUPT_S = 10.0
"""Time that an interrupted sample has to stop when its episode times out; then it is cancelled, and
its tokens are lost."""


class EpisodeClock:
    """An episode's timeout, paused while anything waits. Used in one event loop.

        launch      waits for a place     at an engine      must not go on      at an engine   step
        ──►         ░░░░░░░░░░░░░░░░░░    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓    ░░░░░░░░░░░░░░░     ▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓

    An episode must not time out because it waits for a busy engine.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        """When the clock last resumed."""
        self._since = time.monotonic()
        self._num_holds = 0
        self._ring: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float:
        gone_s = 0.0 if self._num_holds else time.monotonic() - self._since
        return max(0.0, self._left_s - gone_s)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        self.note_wait(True)
        try:
            yield
        finally:
            self.note_wait(False)

    def note_wait(self, is_waiting: bool) -> None:
        """Something began or stopped waiting; the clock resumes when nothing waits any more."""
        if is_waiting:
            self._left_s = self.left_s
            self._num_holds += 1
        else:
            self._num_holds -= 1
            assert self._num_holds >= 0
            if not self._num_holds:
                self._since = time.monotonic()
        self._set_timer()

    @contextmanager
    def alarm(self, ring: Callable[[], None]) -> Iterator[None]:
        """Calls `ring` once if the time runs out inside the block. One alarm at a time."""
        assert self._ring is None
        self._ring = ring
        self._set_timer()
        try:
            yield
        finally:
            self._ring = None
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ring is not None and not self._num_holds:
            self._timer = asyncio.get_running_loop().call_later(self.left_s, self._over)

    def _over(self) -> None:
        ring, self._ring, self._timer = self._ring, None, None
        if ring is not None:
            ring()


class EpisodeFailed(RuntimeError):
    """An episode that cannot be scored, and so not trained; the message says why."""


@dataclass(kw_only=True, slots=True, eq=False)
class Activity:
    """Whether the programs that run the episodes of one group call the model."""

    _num_sessions: int = 0
    """Open ones."""
    _num_requests: int = 0
    """In progress."""
    _since: float = field(default_factory=time.monotonic)
    """Of the last change."""

    def note(self, *, sessions: int = 0, requests: int = 0) -> None:
        """Adds to the numbers of open sessions and running requests; negative when some end."""
        self._num_sessions += sessions
        self._num_requests += requests
        self._since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Time for which its open sessions have had no request; 0 if none is open."""
        if self._num_requests or not self._num_sessions:
            return 0.0
        return time.monotonic() - self._since


def _note_nothing(sample: Sample) -> None:
    return


async def go_on(sample: Sample) -> None:
    """Lets an interrupted sample continue at once."""


def constraint_of(task: TaskConfig) -> Constraint:
    """That of every answer of the task."""
    return Constraint(grammar=task.grammar or "", min_tokens=task.min_turn_tokens)


@dataclass(kw_only=True, slots=True)
class EpisodeRequest:
    """How to sample an episode, and the callbacks that follow its samples."""

    session: str
    """Unique in the run; the ids of its samples begin with it."""
    sampling: SamplingParams
    group: str = ""
    """See Sample.group."""
    order: int = 0
    """The order of its group; see Sample.order."""
    priority: Priority = Priority.rollout
    min_version: int = 0
    engine: str | None = None
    span_context: Context | None = None
    """See Sample.span_context: an external program's samples begin in other tasks."""
    on_sample: Callable[[Sample], None] = _note_nothing
    """Called for each sample before it is requested."""
    on_end: Callable[[Sample], None] = _note_nothing
    """Called for a sample that has ended, when its numbers are final; not always called for one
    that failed or was cancelled."""
    activity: Activity = field(default_factory=Activity)
    """Of all episodes of its group."""
    may_go_on: Callable[[Sample], Awaitable[None]] = go_on
    """Awaited before an interrupted sample continues. Meanwhile the episode's clock is paused, as
    it is while a sample waits for a slot at an engine."""

    def new_sample(
        self,
        number: int,
        prompt: list[int],
        max_new_tokens: int,
        clock: EpisodeClock,
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
    ) -> Sample:
        """Makes the episode's sample `number` and calls `on_sample`. `sampling`: None is the
        episode's."""
        sample = Sample(
            sample_id=f"{self.session}.{number}",
            prompt=prompt,
            sampling=sampling or self.sampling,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            constraint=None if constraint == Constraint() else constraint,
            session=self.session,
            group=self.group,
            priority=self.priority,
            order=self.order,
            min_version=self.min_version,
            engine=self.engine,
            span_context=self.span_context,
            on_wait=clock.note_wait,
        )
        self.on_sample(sample)
        return sample

    async def complete(
        self,
        sample: Sample,
        completer: Completer,
        clock: EpisodeClock,
        *,
        is_over: Callable[[], bool],
    ) -> bool:
        """Completes `sample`; after each interruption it waits for `may_go_on` and continues.

        False if it was interrupted when `is_over`: it keeps its tokens, and the rest is never
        requested. Otherwise raises what the completer raises.
        """
        while sample.finish_reason is None:  # else `on_sample` knew its end already
            try:
                await completer.complete(sample)
                break
            except Interrupted:
                if is_over():
                    return False
            with clock.standing_still():
                await self.may_go_on(sample)
        return True
