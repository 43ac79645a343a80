"""One rollout worker: keeps as many groups in flight as admission allows.

    admit ──► prompt ──► n episodes, scored as they end ──► push      a task a group, many at once
      ▲         retries first, then the stream                │
      └──────────────── credit comes back ◄── trainer ◄───────┘
    publish ──► groups in flight that became too old are stopped, their prompts run again
    failure ──► the prompt runs again, until it is put into quarantine (finish.py)
    death   ──► the next life reclaims the groups that ran; each prompt runs again, once

Backpressure: no credit, no group. The worker's own bound, `max_groups_in_flight`, only limits its
memory and connections. As soon as a group has ended, whichever way, the next begins.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from buffer.replay_buffer import ReplayBuffer
from buffer.run_state import RunState
from buffer.staleness import is_fresh
from buffer.types import PromptRef
from configs.choices import OnStale
from rollout_pool.cancelling import end_tasks
from rollout_pool.tasks.task import Task, TaskStream
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport
from rollout_pool.worker.counters import Tally
from rollout_pool.worker.evaluate import Evaluator
from rollout_pool.worker.finish import GroupLog, Landing, Trip, Wish
from rollout_pool.worker.generate import Flight, GroupGenerator
from rollout_pool.worker.prompts import PromptReader, TokenizedPrompt
from rollout_pool.worker.stragglers import Interrupter, build_tail

log = logging.getLogger(__name__)

WATCH_TIMEOUT_S = 60.0
DROPPED_WHEN_STALE = (OnStale.requeue, OnStale.drop)
"""Otherwise an old group is of use: its old tokens are masked, or the trainer waits for it."""
FLUSH_TIMEOUT_S = 5.0
MIN_WAIT_S = 0.005
"""Shorter waits for a credit are round trips, not waits."""
STOP_AGAIN_S = 10.0
"""As long the episodes of a group that was stopped may clear up, before they are stopped again."""


class Wishes(Protocol):
    """Groups that somebody outside asked for."""

    def take(self) -> Wish | None:
        """The one that has waited longest and is still wanted; None if there is none."""
        ...

    def close(self) -> None:
        """Refuses those that wait, and all that come later."""
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
        stop_again_s: float = STOP_AGAIN_S,
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
        self._evaluator = evaluator
        self._buffer = buffer
        self._state = state
        self._watching = watching
        self._stopping = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds the first error that was more than a group's own."""
        self._room = asyncio.Semaphore(spec.config.max_groups_in_flight)
        self._flights: dict[Trip, asyncio.Task[None]] = {}
        """With their deliveries, which may be cancelled."""
        self._closing: set[asyncio.Task[Any]] = set()
        """What must come to its end, whatever happens."""
        self._last_landing = 0.0
        self._next_serial = 0
        self._in_hand: tuple[PromptRef, TokenizedPrompt] | None = None
        """Taken from the stream, and no group has it yet."""
        self._wishes = wishes
        self._stop_again_s = stop_again_s
        self._tally = Tally(state)
        self._landing = Landing(
            config=spec.config,
            generator=generator,
            buffer=buffer,
            tally=self._tally,
            group_log=group_log,
        )
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
        ends: list[asyncio.Future[Any]] = [*loops, self._broken, *self._watching]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            await end_tasks(loops)
            if self._wishes is not None:
                self._wishes.close()
            for trip in self._flights:
                trip.flight.give_up("the run is ending")
            await end_tasks(self._flights.values(), self._stop_again_s)
            while self._closing:
                await asyncio.wait(self._closing)
            await self._tally.flush()
        for end in ends:
            if end.done() and not end.cancelled():
                end.result()  # raises what ended the worker
        if not await self._buffer.flush(FLUSH_TIMEOUT_S):
            log.warning("Redis has not told that the last groups are on its disk")
        return WorkerReport(
            num_groups=self._landing.num_groups,
            num_failed=self._landing.num_failed,
            num_too_old=self._landing.num_too_old,
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
                started = time.monotonic()
                admission = await self._buffer.admit(group_id, self._spec.buffer.wait_timeout_s)
                group_id = admission.group_id
                await self._note_wait(started)
                taken = await self._take_prompt(group_id)
            except BaseException:
                self._see_through(self._buffer.abandon(group_id, "stopped"))
                raise
            if taken is None:
                self._room.release()
                continue
            ref, prompt = taken
            # Only now, so that a wish which nobody has any more costs neither credit nor prompt.
            wish = None if self._wishes is None else self._wishes.take()
            flight = Flight(group_id=group_id, ref=ref, prompt=prompt, rank=rank, player=wish)
            flight.on_give_up = None if wish is None else wish.give_up
            self._launch(Trip(flight=flight, wish=wish))

    async def _note_wait(self, started: float) -> None:
        # While groups are in flight the credits are with the engines, and nobody waits in vain.
        idle_s = time.monotonic() - max(started, self._last_landing)
        if not self._flights and idle_s > MIN_WAIT_S:
            await self._state.add_wait("rollout", "trainer", idle_s)

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

    # Groups out -----------------------------------------------------------------------------------

    def _launch(self, trip: Trip) -> None:
        self._tail.begin(trip.flight)
        self._flights[trip] = asyncio.create_task(self._landing.deliver(trip))
        self._see_through(self._fly(trip))

    async def _fly(self, trip: Trip) -> None:
        delivery, is_done = self._flights[trip], False
        await asyncio.wait([delivery])
        try:
            is_done = await self._landing.land(trip, delivery)
        finally:
            del self._flights[trip]
            self._tail.end(trip.flight, is_done=is_done)
            self._last_landing = time.monotonic()
            self._room.release()

    def _see_through(self, work: Coroutine[Any, Any, Any]) -> None:
        """Nobody cancels `work`, and the worker does not end before it. An error of it ends the
        worker."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._note_closed)

    def _note_closed(self, task: asyncio.Task[Any]) -> None:
        self._closing.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._broken.done():
            return
        self._broken.set_exception(error)

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
            for trip, delivery in self._flights.items():
                oldest = trip.flight.oldest_version
                if oldest is None or is_fresh(version, oldest, max_staleness):
                    continue
                if not (trip.is_too_old or delivery.done()):
                    trip.is_too_old = True
                    trip.flight.give_up(
                        f"its oldest token is of version {oldest}, and at version {version} "
                        f"max_staleness={max_staleness} does not let a step train it any more"
                    )
                    self._see_through(end_tasks([delivery], self._stop_again_s))

    async def _renew_credits(self) -> None:
        """A worker that dies gives the credits of its groups back by no longer renewing them."""
        while True:
            await asyncio.sleep(self._spec.buffer.lease_timeout_s / 3)
            await self._buffer.renew_credits([trip.flight.group_id for trip in self._flights])
