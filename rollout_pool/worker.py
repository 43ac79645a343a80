"""One rollout worker: keeps as many groups in flight as admission allows.

    admit ──► prompt ──► n episodes, scored as they end ──► push      a task a group, many at once
      ▲         retries first, then the stream                │
      └──────────────── credit comes back ◄── trainer ◄───────┘
    publish ──► groups in flight that became too old are stopped, their prompts run again
    failure ──► the prompt runs again, until it is put into quarantine
    death   ──► the next life reclaims the groups that ran; each prompt runs again, once

Backpressure: no credit, no group. The worker's own bound, `max_groups_in_flight`, only limits its
memory and connections. As soon as a group has ended, whichever way, the next begins.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from buffer.replay_buffer import ReplayBuffer
from buffer.run_state import RunState
from buffer.staleness import is_fresh
from buffer.types import PromptRef, TrajectoryGroup
from configs.choices import OnStale
from rollout_pool.cancelling import end_tasks
from rollout_pool.envs.episode import Episode
from rollout_pool.envs.runner import EpisodeAsk
from rollout_pool.evaluate import Evaluator
from rollout_pool.filtering import VarianceFilter, Verdict
from rollout_pool.flight_counts import count_completed, count_flight, count_given_up
from rollout_pool.generate import Flight, GroupFailed, GroupGenerator
from rollout_pool.prompts import PromptReader, TokenizedPrompt
from rollout_pool.tail import Interrupter, build_tail
from rollout_pool.tally import Tally
from rollout_pool.tasks.task import Prompt, Task, TaskStream
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 16
"""So many groups failing one after the other are no accident: the worker ends with the error."""
WATCH_TIMEOUT_S = 60.0
DROPPED_WHEN_STALE = (OnStale.requeue, OnStale.drop)
"""Otherwise an old group is of use: its old tokens are masked, or the trainer waits for it."""
FLUSH_TIMEOUT_S = 5.0
MIN_WAIT_S = 0.005
"""Shorter waits for a credit are round trips, not waits."""


class GroupLog(Protocol):
    """Writes down what the worker made, for people to read."""

    async def write(self, group: TrajectoryGroup, prompt_text: str) -> None: ...


class Wish(Protocol):
    """A group that somebody outside plays: each of its episodes is `run`."""

    async def run(self, prompt: Prompt, ask: EpisodeAsk) -> Episode: ...

    def refuse(self, why: str) -> None:
        """There will be no such group."""
        ...


class Wishes(Protocol):
    async def next_wish(self) -> Wish:
        """Waits until somebody asks for a group."""
        ...


class RolloutWorker:
    """`run` generates until `stop`; `evaluate` may be called at any time, also afterwards."""

    def __init__(
        self,
        *,
        index: int,
        spec: RolloutSpec,
        task: Task,
        stream: TaskStream,
        reader: PromptReader,
        generator: GroupGenerator,
        evaluator: Evaluator,
        buffer: ReplayBuffer,
        state: RunState,
        watching: Sequence[asyncio.Future[Any]],
        interrupter: Interrupter,
        group_log: GroupLog | None = None,
        wishes: Wishes | None = None,
    ) -> None:
        """`watching` tells the router about the engines: if any of it ends, the worker cannot go
        on. `interrupter` is the completer of the generator's samples. A group that is wished for
        is run before the worker's own.
        """
        self._index = index
        self._spec = spec
        self._task = task
        self._stream = stream
        self._reader = reader
        self._prompts = reader.stream(stream)
        self._generator = generator
        self._evaluator = evaluator
        self._buffer = buffer
        self._state = state
        self._watching = watching
        self._stopping = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds the error of the first group that failed for more than its own reasons."""
        self._room = asyncio.Semaphore(spec.config.max_groups_in_flight)
        self._flights: dict[Flight, asyncio.Task[None]] = {}
        self._last_landing = 0.0
        self._too_old: set[str] = set()
        self._failures_in_a_row = 0
        self._num_groups = self._num_failed = self._num_too_old = 0
        self._next_serial = 0
        self._in_hand: tuple[PromptRef, TokenizedPrompt] | None = None
        """Taken from the stream, and no group has it yet."""
        self._group_log = group_log
        self._wishes = wishes
        self._wished: deque[Wish] = deque()
        self._tally = Tally(state)
        self._filter: VarianceFilter | None = None
        if spec.config.filter_zero_variance:
            self._filter = VarianceFilter(spec.config.max_filtered_ratio)
        self._tail = build_tail(
            spec.config,
            interrupter=interrupter,
            versions=state,
            tally=self._tally,
            is_batch_ready=self._is_batch_ready,
            next_rank=lambda: self._next_serial,
        )

    async def run(self) -> WorkerReport:
        """Generate until `stop`.

        Raises ValueError for a prompt that the settings refuse, TimeoutError if no credit came, or
        no engine could be asked, within `buffer.wait_timeout_s`, and GroupFailed if nothing
        succeeds any more.
        """
        if num_lost := await self._buffer.reclaim(self._index):
            log.warning("%d groups of this worker's earlier life run again", num_lost)
        loops: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._admit_groups()),
            asyncio.create_task(self._renew_credits()),
            asyncio.create_task(self._tail.run()),
            asyncio.create_task(self._tally.keep_telling()),
            asyncio.create_task(self._stopping.wait()),
        ]
        if self._spec.buffer.on_stale in DROPPED_WHEN_STALE:
            loops.append(asyncio.create_task(self._watch_age()))
        if self._wishes is not None:
            loops.append(asyncio.create_task(self._hear_wishes(self._wishes)))
        ends: list[asyncio.Future[Any]] = [*loops, self._broken, *self._watching]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            await end_tasks(loops)
            for wish in self._wished:
                wish.refuse("the run is ending")
            await self._give_up_all()
            await self._tally.flush()
        for end in ends:
            if end.done() and not end.cancelled():
                end.result()  # raises what ended the worker
        if not await self._buffer.flush(FLUSH_TIMEOUT_S):
            log.warning("Redis has not told that the last groups are on its disk")
        return WorkerReport(
            num_groups=self._num_groups,
            num_failed=self._num_failed,
            num_too_old=self._num_too_old,
            num_skipped=self._reader.num_skipped,
        )

    def stop(self) -> None:
        """End `run`; groups in flight are given up."""
        self._stopping.set()

    async def evaluate(self, version: int, engine: str | None = None) -> EvalReport:
        """Answers to the held-out prompts by `version` or a later one; by `engine` alone if it is
        held at that version."""
        return await self._evaluator.run(version, engine)

    # Groups in ------------------------------------------------------------------------------------

    async def _admit_groups(self) -> None:
        while True:
            await self._room.acquire()
            rank = self._next_serial
            self._next_serial += 1
            group_id = f"{self._index}-{rank}-{secrets.token_hex(4)}"
            try:
                group_id = await self._wait_for_credit(group_id)
                taken = await self._take_prompt(group_id)
            except BaseException:
                await self._buffer.abandon(group_id, "stopped")
                raise
            if taken is None:
                self._room.release()
                continue
            ref, prompt = taken
            player = self._wished.popleft() if self._wished else None
            self._launch(
                Flight(group_id=group_id, ref=ref, prompt=prompt, rank=rank, player=player)
            )

    async def _hear_wishes(self, wishes: Wishes) -> None:
        while True:
            self._wished.append(await wishes.next_wish())

    async def _wait_for_credit(self, group_id: str) -> str:
        """The id under which the group was admitted."""
        started = time.monotonic()
        admission = await self._buffer.admit(group_id, self._spec.buffer.wait_timeout_s)
        # While groups are in flight the credits are with the engines, and nobody waits in vain.
        idle_s = time.monotonic() - max(started, self._last_landing)
        if not self._flights and idle_s > MIN_WAIT_S:
            await self._state.add_wait("rollout", "trainer", idle_s)
        return admission.group_id

    async def _take_prompt(self, group_id: str) -> tuple[PromptRef, TokenizedPrompt] | None:
        """The group's prompt, which the buffer knows from then on; None if it lost its credit."""
        ref = await self._buffer.take_retry(group_id)
        if ref is not None:
            if (prompt := self._reader.read(self._task.example(ref.index))) is not None:
                return ref, prompt
            self._tally.add("prompts_skipped")
        if self._in_hand is None:
            self._in_hand = self._next_of_stream()
        ref, prompt = self._in_hand
        if not await self._buffer.begin(group_id, ref, self._index, self._stream.position):
            return None
        self._in_hand = None
        return ref, prompt

    def _next_of_stream(self) -> tuple[PromptRef, TokenizedPrompt]:
        skipped = self._reader.num_skipped
        prompt = next(self._prompts)
        self._tally.add("prompts_skipped", self._reader.num_skipped - skipped)
        return PromptRef(task=self._task.name, index=prompt.prompt.index), prompt

    def _launch(self, flight: Flight) -> None:
        self._tail.begin(flight)
        task = asyncio.create_task(self._fly(flight))
        self._flights[flight] = task
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._last_landing = time.monotonic()
        if task.cancelled() or self._broken.done():
            return
        if (error := task.exception()) is not None:
            self._broken.set_exception(error)

    # Groups out -----------------------------------------------------------------------------------

    async def _fly(self, flight: Flight) -> None:
        is_done = False
        try:
            group = await self._generator.run(flight)
            is_done = True
            await self._hand_over(flight, group)
        except GroupFailed as error:
            await self._fail(flight, error)
        except asyncio.CancelledError:
            await self._give_up(flight)
            raise
        except Exception:  # of the push, or one of ours: whichever, the credit is not needed
            await self._buffer.abandon(flight.group_id, "failed")
            raise
        finally:
            del self._flights[flight]
            self._tail.end(flight, is_done=is_done)
            self._room.release()
            count_flight(self._tally, flight)
            if not is_done:
                count_given_up(self._tally, flight)

    async def _hand_over(self, flight: Flight, group: TrajectoryGroup) -> None:
        self._failures_in_a_row = 0
        count_completed(self._tally, flight, group)
        verdict = Verdict.keep
        if self._filter is not None:
            verdict = self._filter.judge(group, flight.num_unscored)
        if verdict is Verdict.leave_out:
            await self._buffer.abandon(group.group_id, "zero_variance")
            self._tally.add("groups_filtered")
            self._tally.add("tokens_filtered", flight.num_tokens)
            return
        if verdict is Verdict.keep_all_equal:
            self._tally.add("zero_variance_kept")
        await self._buffer.push(group)
        self._num_groups += 1
        if self._group_log is not None:
            await self._group_log.write(group, flight.prompt.prompt.text)

    async def _give_up_all(self) -> None:
        flights = list(self._flights.values())
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def _fail(self, flight: Flight, error: GroupFailed) -> None:
        log.warning("%s", error)
        if flight.player is not None:  # whoever played it may be to blame: no fault of the prompt
            await self._buffer.abandon(flight.group_id, "outside")
            return
        most = self._spec.config.max_group_failures
        if await self._buffer.fail(flight.group_id, flight.ref, most) < 0:
            self._tally.add("prompts_quarantined")
            log.warning("prompt %d failed %d times: put aside", flight.ref.index, most)
        self._num_failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise error

    async def _give_up(self, flight: Flight) -> None:
        if flight.group_id in self._too_old:
            self._too_old.discard(flight.group_id)
            self._num_too_old += 1
            await self._buffer.abandon(flight.group_id, "too_old", requeue=flight.ref)
        else:
            await self._buffer.abandon(flight.group_id, "stopped")

    async def _is_batch_ready(self) -> bool:
        stats = await self._buffer.stats()
        return stats.ready >= stats.groups_per_step

    async def _watch_age(self) -> None:
        """At each publish, stop groups whose oldest token no later step could train."""
        version = await self._state.trainer_version()
        while True:
            try:
                version = await self._state.wait_version_above(version, WATCH_TIMEOUT_S)
            except TimeoutError:
                continue  # a long step; the trainer's own waits notice a dead one
            max_staleness = await self._buffer.get_max_staleness()
            for flight, task in self._flights.items():
                oldest = flight.oldest_version
                if oldest is not None and not is_fresh(version, oldest, max_staleness):
                    self._too_old.add(flight.group_id)
                    task.cancel()

    async def _renew_credits(self) -> None:
        """A worker that dies gives the credits of its groups back by no longer renewing them."""
        while True:
            await asyncio.sleep(self._spec.buffer.lease_timeout_s / 3)
            await self._buffer.renew_credits([flight.group_id for flight in self._flights])
