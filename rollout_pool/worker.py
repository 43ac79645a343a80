"""One rollout worker: keeps as many groups in flight as admission allows.

    admit ──► prompt ──► n samples, scored as they end ──► push       a task a group, many at once
      ▲         retries first, then the stream               │
      └──────────────── credit comes back ◄── trainer ◄──────┘
    publish ──► groups in flight that became too old are stopped, their prompts run again

Backpressure: no credit, no group. The worker's own bound, `max_groups_in_flight`, only limits its
memory and connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from typing import Any

from buffer.replay_buffer import ReplayBuffer
from buffer.run_state import RunState
from buffer.staleness import is_fresh
from buffer.types import PromptRef
from configs.choices import OnStale
from rollout_pool.cancelling import end_tasks
from rollout_pool.evaluate import Evaluator
from rollout_pool.generate import Flight, GroupGenerator
from rollout_pool.prompts import PromptReader, TokenizedPrompt
from rollout_pool.sampling import SamplesFailed
from rollout_pool.tasks.task import Task, TaskStream
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
        watching: asyncio.Future[None],
    ) -> None:
        """`watching` tells the router about the engines; without it the worker cannot go on."""
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

    async def run(self) -> WorkerReport:
        """Generate until `stop`.

        Raises ValueError for a prompt that the settings refuse, TimeoutError if no credit came, or
        no engine could be asked, within `buffer.wait_timeout_s`, and SamplesFailed if nothing
        succeeds any more.
        """
        loops: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._admit_groups()),
            asyncio.create_task(self._renew_credits()),
            asyncio.create_task(self._stopping.wait()),
        ]
        if self._spec.buffer.on_stale in DROPPED_WHEN_STALE:
            loops.append(asyncio.create_task(self._watch_age()))
        ends: list[asyncio.Future[Any]] = [*loops, self._broken, self._watching]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            await end_tasks(loops)
            await self._give_up_all()
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

    async def evaluate(self, version: int) -> EvalReport:
        """Greedy answers to the held-out prompts by `version` or a later one."""
        return await self._evaluator.run(version)

    # Groups in ------------------------------------------------------------------------------------

    async def _admit_groups(self) -> None:
        for serial in itertools.count():
            await self._room.acquire()
            group_id = f"{self._index}-{serial}-{secrets.token_hex(4)}"
            try:
                group_id = await self._wait_for_credit(group_id)
                ref, prompt = await self._next_prompt()
            except BaseException:
                await self._buffer.abandon(group_id, "stopped")
                raise
            self._launch(Flight(group_id=group_id, ref=ref, prompt=prompt))

    async def _wait_for_credit(self, group_id: str) -> str:
        """The id under which the group was admitted."""
        started = time.monotonic()
        admission = await self._buffer.admit(group_id, self._spec.buffer.wait_timeout_s)
        # While groups are in flight the credits are with the engines, and nobody waits in vain.
        idle_s = time.monotonic() - max(started, self._last_landing)
        if not self._flights and idle_s > MIN_WAIT_S:
            await self._state.add_wait("rollout", "trainer", idle_s)
        return admission.group_id

    async def _next_prompt(self) -> tuple[PromptRef, TokenizedPrompt]:
        while (ref := await self._buffer.take_retry()) is not None:
            if (prompt := self._reader.read(self._task.example(ref.index))) is not None:
                return ref, prompt
        skipped = self._reader.num_skipped
        prompt = next(self._prompts)
        await self._state.set_task_position(self._index, self._stream.position)
        if self._reader.num_skipped > skipped:
            await self._state.count("prompts_skipped", self._reader.num_skipped - skipped)
        return PromptRef(task=self._task.name, index=prompt.prompt.index), prompt

    def _launch(self, flight: Flight) -> None:
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
        try:
            group = await self._generator.run(flight)
            await self._buffer.push(group)
            self._num_groups += 1
            self._failures_in_a_row = 0
        except SamplesFailed as error:
            await self._fail(flight, error)
        except asyncio.CancelledError:
            await self._give_up(flight)
            raise
        except Exception:  # of the push, or one of ours: whichever, the credit is not needed
            await self._buffer.abandon(flight.group_id, "failed")
            raise
        finally:
            del self._flights[flight]
            self._room.release()
            await self._count(flight)

    async def _give_up_all(self) -> None:
        flights = list(self._flights.values())
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def _fail(self, flight: Flight, error: SamplesFailed) -> None:
        log.warning("%s", error)
        await self._buffer.abandon(flight.group_id, "failed")
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

    async def _count(self, flight: Flight) -> None:
        for name, amount in (
            ("tokens_generated", flight.num_tokens),
            ("logprobs_refused", flight.num_refused),
            ("rewards_failed", flight.num_unscored),
        ):
            if amount:
                await self._state.count(name, amount)

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
