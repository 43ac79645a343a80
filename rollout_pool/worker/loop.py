"""One rollout worker: keeps as many groups in flight as admission allows.

    fill ──► admit ──► prompt ──► n episodes, scored as they end ──► push   one task per group
      ▲        retries first, then the stream                         │
      └───────────────── credit returns  ◄──── trainer ◄──────────────┘
    announce ──► groups in flight that became too old are cancelled, their prompts run again
    idle    ──► external groups without a request are cancelled while their credits are needed
    failure ──► the prompt runs again, until it is put into quarantine (group_run.py); one during
                which the process of its environment died counts like the death of a worker
    restart ──► the new worker reclaims the groups that ran; each prompt runs again, and after a
                second death alone, so that a third one tells which prompt is at fault. Its samples
                begin with the tokens that were kept (sampling/kept_tokens.py)

Backpressure, from the trainer to the prompt:

    scarce resource           what waits                       until
    credits                   the next admission               the trainer consumes a batch
    slots at the engines      the next admission               fewer samples wait than a group has
    max_groups_in_flight      the next admission               any group ends
    memory of the buffer      a group's push                   the trainer consumes a batch
    scoring processes         a finished episode               a process is free
    slots at the engines      a sample, the oldest group first a sample ends or a limit grows
    fresh enough versions     all samples                      an engine commits a newer version
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from buffer.errors import RunPausedError
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Admission, NewGroup
from buffer.run_state import RunState
from buffer.types import PromptRef, Rerun
from configs.checks import live_names, with_live
from configs.choices import OnStale
from configs.rollout_schema import RolloutConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.rewards.types import Scorer
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.kept_tokens import LOOK_EVERY_S, GroupTokens, KeptSample, read_kept
from rollout_pool.sampling.sample import Completer
from rollout_pool.tasks.registry import epoch_of
from rollout_pool.tasks.source import EpisodeSource, GroupEnd
from rollout_pool.tasks.task import Prompt, Task, TaskStream
from rollout_pool.types import RolloutSpec, WorkerReport
from rollout_pool.worker.counters import Counters
from rollout_pool.worker.evaluate import Evaluator
from rollout_pool.worker.group_run import ExternalGroups, GroupRun, GroupRunner
from rollout_pool.worker.prompt_filter import PromptFilter
from rollout_pool.worker.record import RolloutLog
from rollout_pool.worker.stragglers import RECENT, TAILS, Tail
from rollout_pool.worker.variance import curriculum_of

log = logging.getLogger(__name__)

WATCH_TIMEOUT_S = 60.0
DROPPED_WHEN_STALE = (OnStale.requeue, OnStale.drop)
"""Under other policies a stale group is used: old tokens are masked, or the trainer waits."""
FLUSH_TIMEOUT_S = 5.0
MAX_SKIPPED = 10_000
"""Prompts that a worker skips in a row; after them it gives up."""
IDLE_CHECK_INTERVAL_S = 0.5
"""An admission that is pending at two successive checks lacks a credit."""
MIN_WAIT_S = 0.005
"""Shorter waits for a credit are just the round trip."""
MOST_AT_ONCE = 8
"""Groups that all workers admit together: each its part, or one would take those of the others."""
STOP_AGAIN_S = 10.0
"""Time that the episodes of a cancelled group have to clean up before they are cancelled again."""
_LIVE = live_names(RolloutConfig)


class _Taken(NamedTuple):
    ref: PromptRef
    prompt: Prompt
    position: int = 0
    """The worker's position in its tasks behind it."""
    kept: Mapping[str, KeptSample] = MappingProxyType({})
    """Tokens that a worker before this one sampled for it."""


@dataclass(kw_only=True, eq=False)
class RolloutWorker:
    """`run` generates until `stop`; `evaluator.run` may be called at any time, also after that.

    Example, with two free credits and three prompts in the stream (`WorkerParts` builds a
    worker):

        worker = RolloutWorker(index=0, spec=spec, task=task, ...)
        running = asyncio.create_task(worker.run())
        # group 0-0-ab12cd34 generates prompt 0 and group 0-1-9f8e7d6c prompt 1; the admission of a
        # third waits for a credit. Group 0-1 ends first and is pushed. The trainer leases and
        # consumes it, which frees its credit: the third group starts with prompt 2.
        await worker.evaluator.run(version=7)  # meanwhile, at the same engines
        worker.stop()
        report = await running  # WorkerReport(num_groups=1, ...); groups in flight are given up
    """

    index: int
    spec: RolloutSpec
    task: Task
    stream: TaskStream
    prompt_filter: PromptFilter
    scorer: Scorer
    episode_source: EpisodeSource
    """Runs the episodes of all groups but external ones."""
    external_groups: ExternalGroups | None = None
    evaluator: Evaluator
    buffer: ReplayBuffer
    state: RunState
    services: Sequence[asyncio.Future[Any]]
    """Tasks beside the worker: the watch of the engines, its reports, the endpoint's server. It
    ends when any of them does."""
    completer: Completer
    """Completes the samples of `episode_source`."""
    wait_room: Callable[[int], Awaitable[int]]
    """Returns once fewer samples than so many wait for slots at the engines: the number of groups
    of so many that may start."""
    group_log: RolloutLog | None = None
    counters: Counters
    """May be shared; the worker sends them."""
    stop_again_s: float = STOP_AGAIN_S
    _runs: dict[GroupSamples, GroupRun] = field(default_factory=dict, init=False)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    """Seconds that the last complete groups took, but for external ones."""
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while there is no run."""
    _waiting: str | None = field(default=None, init=False)
    """Id of a group whose prompt is to run alone, until the others have ended."""
    _admission: asyncio.Task[None] | None = field(default=None, init=False)
    _asking: str | None = field(default=None, init=False)
    """Id of the group that is admitted once there is a credit."""
    _unfinished: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    """Tasks that are never cancelled; the worker waits for them at its end."""
    _completed: asyncio.Queue[asyncio.Future[Any] | None] = field(
        default_factory=asyncio.Queue, init=False
    )
    """Tasks that have ended; None wakes the loop."""
    _is_draining: bool = field(default=False, init=False)
    """No group starts any more."""
    _is_ending: bool = field(default=False, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _last_end: float = field(default=0.0, init=False)
    _next_order: int = field(default=0, init=False)
    _in_hand: deque[_Taken] = field(default_factory=deque, init=False)
    """Taken from the stream, not yet given to groups."""

    def __post_init__(self) -> None:
        self._is_idle.set()
        self._curriculum = curriculum_of(self.spec.task, self.spec.seed + self.index)
        self._group_runner = GroupRunner(
            config=self.spec.config,
            scorer=self.scorer,
            buffer=self.buffer,
            state=self.state,
            counters=self.counters,
            group_log=self.group_log,
            curriculum=self._curriculum,
        )
        self._live = self.spec.config
        """The settings as they are now."""
        self._tail = self._new_tail(self._live)

    async def run(self) -> WorkerReport:
        """Generate until `stop`.

        Raises ValueError for a prompt that the settings refuse, TimeoutError if there was no credit
        or no engine and nothing moved for `buffer.wait_timeout_s`, and GroupFailed if all groups
        fail.
        """
        if num_lost := await self.buffer.reclaim(self.index):
            log.warning("%d groups of this worker from before its restart run again", num_lost)
        self._counted = await self.state.counters()  # epochs that it had begun before a restart
        self._live = with_live(self.spec.config, await self.state.live_settings(_LIVE))
        self._group_runner.use(self._live, is_new_filter=True)
        self._tail = self._new_tail(self._live)
        background = self._start_background()
        try:
            while not self._is_ending:
                self._fill()
                self._handle(await self._completed.get())
        finally:
            await self._wind_down(background)
        if self._error is not None:
            raise self._error
        if not await self.buffer.flush(FLUSH_TIMEOUT_S):
            log.warning("Redis has not confirmed that the last groups are on disk")
        return WorkerReport(
            num_groups=self._group_runner.num_groups,
            num_failed=self._group_runner.num_failed,
            num_too_old=self._group_runner.num_too_old,
            num_skipped=self.prompt_filter.num_skipped,
        )

    def stop(self) -> None:
        """End `run`; groups in flight are given up."""
        self._is_ending = True
        self._completed.put_nowait(None)

    async def drain(self, limit_s: float) -> None:
        """End `run`: no group starts, those in flight may end for `limit_s`; the prompts of the
        others run again."""
        self._is_draining = True
        if self._admission is not None:
            await end_tasks([self._admission])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        self.stop()

    # The loop -------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts the next admission, one at a time, if another group may start."""
        if self._admission is not None or self._is_draining:
            return
        # A suspect runs alone.
        has_suspect = len(self._runs) == 1 and any(r.ref.is_suspect for r in self._runs.values())
        if len(self._runs) < (1 if has_suspect else self._live.max_groups_in_flight):
            self._admission = asyncio.create_task(self._admit())
            self._observe(self._admission)

    def _handle(self, completed: asyncio.Future[Any] | None) -> None:
        """Ended groups have removed themselves; any error that is not a group's ends the worker."""
        if completed is self._admission:
            self._admission = None
        if completed is None or completed.cancelled():
            return
        if (error := completed.exception()) is not None:
            self._is_ending = True
            self._error = self._error or error

    def _start_background(self) -> list[asyncio.Task[None]]:
        """Starts the background tasks; the worker ends when any of them does."""
        work: list[Coroutine[Any, Any, None]] = [
            self._renew_credits(),
            self._run_tail(),
            self.counters.run(),
        ]
        if self.spec.config.keep_every_tokens:
            work.append(self._keep_tokens())
        if self.spec.buffer.on_stale is not OnStale.mask_tokens:  # which is not live
            work.append(self._watch_age())
        if self.external_groups is not None:
            work.append(self._watch_idle())
        tasks = [asyncio.create_task(one) for one in work]
        for task in (*tasks, *self.services):
            self._observe(task)
            task.add_done_callback(lambda _: self.stop())
        return tasks

    async def _wind_down(self, background: Sequence[asyncio.Task[None]]) -> None:
        self._is_ending = True
        admission = self._admission
        await end_tasks([*background, *([] if admission is None else [admission])])
        if self.external_groups is not None:
            self.external_groups.close()
        for run in self._runs.values():
            run.give_up("the run is ending")
        await end_tasks([run.work for run in self._runs.values() if run.work], self.stop_again_s)
        while self._unfinished:
            await asyncio.wait(self._unfinished)
        while not self._completed.empty():
            self._handle(self._completed.get_nowait())
        await self.counters.flush()

    def _observe(self, work: asyncio.Future[Any]) -> None:
        work.add_done_callback(self._completed.put_nowait)

    def _see_through(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` to its end, without cancelling it, before the worker ends."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        self._observe(task)

    # Starting groups ------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Waits for room at the engines and for credits, and starts groups."""
        # A group's age counts from its credit: if it aged in a line, the trainer would have to wait
        # for its longest answer with on_stale=wait. Episodes that start, or run a tool, are not in
        # the line, so slow environments take more credits: one at a time, once the groups that are
        # starting will fill the engines.
        room = await self.wait_room(size := self._live.group_size)
        room -= sum(not samples.have_begun for samples in self._runs)
        places = self._live.max_groups_in_flight - len(self._runs)
        number = max(1, min(room, places, MOST_AT_ONCE // self.spec.config.num_workers))
        began = time.monotonic()
        while len(self._in_hand) < number:
            self._in_hand.append(await self._next_of_stream())
            await asyncio.sleep(0)  # a prompt may take milliseconds
        took_s = time.monotonic() - began
        groups = [
            NewGroup(f"{self.index}-{order}-{secrets.token_hex(4)}", taken.ref, taken.position)
            for order, taken in enumerate(islice(self._in_hand, number), self._next_order)
        ]
        ids = [group.group_id for group in groups]
        self._asking = ids[0]
        try:
            admissions = await self._credits(groups)
            ids = [admission.group_id for admission in admissions]
            began = time.monotonic() - took_s
            found = [(one.group_id, await self._take(one)) for one in admissions]
            self.counters.add("episode_s:prompt", (time.monotonic() - began) * size)
            for group_id, taken in found:
                if taken is not None and taken.ref.is_suspect:
                    taken = await self._when_idle(group_id, taken)
                if taken is not None:
                    self._start(group_id, taken)
        except BaseException:
            for group_id in ids:
                self._see_through(self.buffer.abandon(group_id, "stopped", Rerun.always))
            raise
        finally:
            self._asking = self._waiting = None

    def _start(self, group_id: str, taken: _Taken) -> None:
        # The source is chosen last: a program that left meanwhile costs no credit and no prompt.
        external = self.external_groups.take() if self.external_groups else None
        source = external or self.episode_source
        keeps = source.is_repeatable and self.spec.config.keep_every_tokens
        run = GroupRun(
            group_id=group_id,
            ref=taken.ref,
            prompt=taken.prompt,
            episode_source=source,
            samples=GroupSamples(
                group=group_id, order=self._next_order, is_external=source.is_external
            ),
            tokens=GroupTokens(group_id, taken.kept) if keeps else None,
        )
        self._next_order += 1
        run.samples.keeper = run.tokens
        self._runs[run.samples] = run
        self._is_idle.clear()
        run.work = asyncio.create_task(self._group_runner.generate_and_push(run))
        self._see_through(self._settle(run, run.work))

    async def _credits(self, groups: Sequence[NewGroup]) -> list[Admission]:
        """Waits for credits; the time in which the run is paused is nobody's fault."""
        limit_s = self.spec.buffer.wait_timeout_s
        while True:
            started = time.monotonic()
            try:
                admissions = await self.state.retry_while_run_moves(
                    lambda: self.buffer.admit_groups(groups, limit_s, self.index)
                )
            except RunPausedError:
                await self.state.wait_unpaused(WATCH_TIMEOUT_S)
                continue
            # Not counted while groups are in flight: then the engines are busy.
            idle_s = time.monotonic() - max(started, self._last_end)
            if not self._runs and idle_s > MIN_WAIT_S:
                self._see_through(self.state.add_wait("rollout", "trainer", idle_s))
            return admissions

    async def _take(self, admission: Admission) -> _Taken | None:
        """The prompt of an admitted group; None if the group lost its credit."""
        group_id, ref = admission.group_id, admission.prompt
        if ref is None:
            return None
        new = next((taken for taken in self._in_hand if taken.ref == ref), None)
        if new is None:  # it runs again
            if self.prompt_filter.accepts(prompt := self.task.example(ref.index)):
                return _Taken(ref, prompt, kept=await self._find_kept(group_id, ref))
            self.counters.add("prompts_skipped")
            new = self._in_hand[0]
            if not await self.buffer.begin(group_id, new.ref, self.index, new.position):
                return None
        self._in_hand.remove(new)
        self._note_epoch(new.ref.index)
        return new

    def _note_epoch(self, index: int) -> None:
        name, epoch = epoch_of(self.task, index)
        counter = f"epochs_begun:{self.index}{name and f'/{name}'}"
        if (newly := epoch - self._counted.get(counter, 0)) > 0:
            self.counters.add(counter, newly)
            self._counted[counter] = epoch

    async def _find_kept(self, group_id: str, ref: PromptRef) -> Mapping[str, KeptSample]:
        """The tokens kept of a prompt that runs again, as far as they may still be trained."""
        if not (parts := await self.buffer.kept_tokens(group_id, ref)):
            return {}
        leash, version = await self.buffer.get_leash(), await self.state.trainer_version()
        drops_stale = self.spec.buffer.on_stale is not OnStale.mask_tokens
        kept = read_kept(parts, leash, version, drops_stale=drops_stale)
        if kept:
            spans = chain.from_iterable(sample.version_spans for sample in kept.values())
            oldest = min(span.version for span in spans)
            if not await self.buffer.keep_tokens(group_id, oldest, {}):
                return {}
        return kept

    async def _when_idle(self, group_id: str, taken: _Taken) -> _Taken | None:
        """Waits until a suspect can run alone; None if its group lost its credit."""
        ref = taken.ref
        # If the worker dies meanwhile, that is the doing of another prompt: the suspect stays one.
        waiting = replace(ref, reruns=ref.reruns - 1)
        if not await self.buffer.begin(group_id, waiting, self.index, 0):
            return None
        self._waiting = group_id
        await self._is_idle.wait()
        if not await self.buffer.begin(group_id, ref, self.index, 0):
            return None
        return taken

    async def _next_of_stream(self) -> _Taken:
        """Raises ValueError if it skips too many prompts one after the other."""
        for _ in range(MAX_SKIPPED):
            while not self._takes(prompt := next(self.stream)):
                await asyncio.sleep(0)  # each may take milliseconds
            if self.prompt_filter.accepts(prompt):
                ref = PromptRef(task=prompt.task or self.task.name, index=prompt.index)
                return _Taken(ref, prompt, self.stream.position)
            self.counters.add("prompts_skipped")
            await asyncio.sleep(0)
        raise ValueError(
            f"rollout.max_prompt_tokens={self.spec.config.max_prompt_tokens}: {MAX_SKIPPED} "
            "prompts in a row are longer and were skipped; raise the limit"
        )

    def _takes(self, prompt: Prompt) -> bool:
        if self._curriculum is None or self._curriculum.takes(
            kind := self._curriculum.meet(prompt)
        ):
            return True
        self.counters.add(f"passed_over:{kind}")
        return False

    # Ending groups -------------------------------------------------------------------------------

    async def _settle(self, run: GroupRun, work: asyncio.Task[None]) -> None:
        is_done = False
        await asyncio.wait([work])
        try:
            is_done = await self._group_runner.settle(run)
        finally:
            del self._runs[run.samples]
            if not self._runs:
                self._is_idle.set()
            self._last_end = time.monotonic()
            if is_done and not run.samples.is_external:
                self._durations.append(self._last_end - run.samples.started)

    # Background tasks -----------------------------------------------------------------------------

    def _new_tail(self, config: RolloutConfig) -> Tail:
        return TAILS[config.tail](
            groups=self._runs.keys(),
            durations=self._durations,
            interrupt=self.completer.interrupt,
            versions=self.state,
            counters=self.counters,
            is_batch_ready=self._is_batch_ready,
            next_order=lambda: self._next_order,
            max_postponements=config.max_postponements,
            keep_partial=config.keep_partial,
        )

    async def _run_tail(self) -> None:
        """Runs the policy for stragglers, and follows the live settings, with which it changes."""
        seen = dict[str, str]()
        running = asyncio.create_task(self._tail.run())
        looking: asyncio.Task[dict[str, str]] | None = None
        try:
            while True:
                looking = asyncio.create_task(
                    self.state.wait_settings_changed(_LIVE, seen, WATCH_TIMEOUT_S)
                )
                await asyncio.wait({running, looking}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()  # raises
                before, seen = self._live, looking.result()
                now = self._live = with_live(self.spec.config, seen)
                is_new_filter = _of_filter(now) != _of_filter(before)
                self._group_runner.use(now, is_new_filter=is_new_filter)
                self._completed.put_nowait(None)  # another group may start
                if _of_tail(now) != _of_tail(before):
                    await end_tasks([running])
                    self._tail.close()
                    self._tail = self._new_tail(now)
                    running = asyncio.create_task(self._tail.run())
        finally:
            await end_tasks([running] if looking is None else [running, looking])

    async def _is_batch_ready(self) -> bool:
        stats = await self.buffer.stats()
        return stats.ready >= stats.groups_per_step

    async def _watch_age(self) -> None:
        """At each new version, cancels groups whose oldest token no later step could train."""
        version = await self.state.trainer_version()
        while True:
            try:
                version = await self.state.wait_version_above(version, WATCH_TIMEOUT_S)
            except TimeoutError:
                continue  # a long step; a dead trainer is detected elsewhere
            policy = (await self.state.live_settings(["on_stale"])).get("on_stale")
            if OnStale[policy or self.spec.buffer.on_stale.name] not in DROPPED_WHEN_STALE:
                continue
            leash = await self.buffer.get_leash()
            for run in self._runs.values():
                oldest = run.samples.spent.oldest_version
                if oldest is None or leash.is_fresh(version, oldest):
                    continue
                self._cut_short(
                    run,
                    GroupEnd.too_old,
                    f"its oldest token is of version {oldest}, which at version {version} "
                    f"is too old to be trained (max_staleness={leash.max_staleness})",
                )

    async def _watch_idle(self) -> None:
        """Gives up external groups without a request while their credits are needed, the one that
        has idled longest first."""
        limit_s = self.spec.config.openai.idle_timeout_s
        seen: str | None = None
        while True:
            await asyncio.sleep(IDLE_CHECK_INTERVAL_S)  # groups become idle by time alone
            is_waiting = self._asking is not None and self._asking == seen
            is_full = len(self._runs) >= self._live.max_groups_in_flight
            seen = self._asking
            if not (is_waiting or is_full) or not self._idle_for(limit_s):
                continue
            if await self.state.is_paused():  # then no group needs a credit
                continue
            if not await self._is_batch_ready() and (idle := self._idle_for(limit_s)):
                self._cut_short(
                    max(idle, key=lambda run: run.samples.activity.idle_s),
                    GroupEnd.idle,
                    f"no request came for {limit_s:g} s (rollout.openai.idle_timeout_s), and other "
                    "groups needed its credit",
                )

    def _idle_for(self, limit_s: float) -> list[GroupRun]:
        """External groups that could be given up for that reason."""
        return [
            run
            for run in self._runs.values()
            if run.episode_source.is_external
            and run.stopped_for is None
            and run.samples.activity.idle_s > limit_s
        ]

    def _cut_short(self, run: GroupRun, end: GroupEnd, why: str) -> None:
        """Cancels a group although the run goes on."""
        assert run.work is not None
        if run.stopped_for is None and not run.work.done():
            run.stopped_for = end
            run.give_up(why)
            self._see_through(end_tasks([run.work], self.stop_again_s))

    async def _keep_tokens(self) -> None:
        every = self.spec.config.keep_every_tokens
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for run in self._runs.values():
                if run.tokens is not None and run.tokens.is_due(every):
                    # Not cancelled: a part that is missing makes those after it useless.
                    self._see_through(self._group_runner.keep_tokens(run))

    async def _renew_credits(self) -> None:
        """Renews the groups' credits, so that those of a dead worker expire."""
        while True:
            await asyncio.sleep(self.spec.buffer.lease_timeout_s / 3)
            waiting = [] if self._waiting is None else [self._waiting]
            running = [run.group_id for run in self._runs.values()]
            await self.buffer.renew_credits([*running, *waiting])


_of_tail = attrgetter("tail", "keep_partial", "max_postponements")
_of_filter = attrgetter("filter_zero_variance", "max_filtered_ratio")
