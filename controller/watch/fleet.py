"""Keeps the engines of a run, and the receivers beside them, while it trains.

an engine's process or node is lost  ──► it gets no requests; Ray starts it again where there is
                                         room, and a receiver beside it
an engine is given up                ──► the run goes on with the others, if there are any
rollout.num_engines changes          ──► engines join, or end their requests and leave
SIGTERM, or Ray drains the node      ──► the engine leaves and another joins; a worker ends its
                                         groups, and Ray starts it again
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from buffer.run_state import RunState
from configs.checks import with_live
from configs.schema import Config
from controller.metrics.history import WORKER_LOST
from controller.metrics.weights import ENGINE_JOINED, ENGINE_LEFT, RECEIVER_LEFT
from controller.units import format_number_of
from controller.watch.supervise import RunFailed, cause_of, death, failure, lost_node
from processes.pending import in_thread, value
from rollout_pool.cancelling import end_tasks
from rollout_pool.pool import HasLeft, RolloutPool

SETTING = "num_engines"
LOOK_AGAIN_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 1800.0
"""Pause before another engine takes the place of one that was given up; it doubles each time."""
ROOM_S = 20.0
"""An engine that has no place after this time is reported."""
LEAVE_SLACK_S = 60.0
"""Time to stop, beyond the drain, of an engine that leaves."""


@dataclass(eq=False)
class Fleet:
    """The engines of a run; `run` is called once, when every engine has started.

    fleet = Fleet(pool, state, config, log_of=run_dir.log_of, say=panel.say)
    failed = await fleet.run()    # the RunFailed of the last engine, or of a receiver
    """

    pool: RolloutPool
    state: RunState
    config: Config
    _: KW_ONLY
    log_of: Callable[[str], Path]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._grace_s = self.config.rollout.preemption_grace_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: dict[str, asyncio.Task[None]] = {}
        """By engine; without those that leave."""
        self._receivers: set[str] = set()
        """The receivers that are watched."""
        self._draining: set[str] = set()
        """Workers that were told to end."""
        self._num_given_up = 0
        self._join_at = 0.0
        """No engine takes the place of one that was given up before this time."""
        self._end: asyncio.Future[RunFailed]

    async def run(self) -> RunFailed:
        """Returns what ends the run: the last engine or a receiver was given up."""
        self._end = asyncio.get_running_loop().create_future()
        try:
            for engine in self.pool.engine_names:
                self._keeping[engine] = self._spawn(self._keep(engine))
            for worker in self.pool.worker_names:
                self._spawn(self._watch_worker(worker))
            self._watch_receivers()
            self._spawn(self._follow_setting())
            self._spawn(self._follow_nodes())
            return await self._end
        finally:
            await end_tasks(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._end.done():
            self._end.set_exception(error)

    # Engines that are lost ------------------------------------------------------------------------

    async def _keep(self, engine: str) -> None:
        """Returns when the engine is gone for good."""
        watching = self._spawn(self._watch_process(engine))
        noticing = self._spawn(self._replace_at_notice(engine))
        try:
            what = await value(self.pool.given_up(engine))
            lost = failure(engine, what, self.log_of(engine))
        except RayActorError as error:
            lost = death(engine, error, self.log_of(engine))
        except RayTaskError as error:
            lost = failure(engine, cause_of(error), self.log_of(engine))
        finally:
            watching.cancel()
            noticing.cancel()
        del self._keeping[engine]
        is_last = not self._keeping  # now: another may end during the removal
        pause_s = min(FIRST_PAUSE_S * 2**self._num_given_up, LONGEST_PAUSE_S)
        self._num_given_up += 1
        self._join_at = time.monotonic() + pause_s
        await self._remove(engine, str(lost).partition(";")[0])
        if is_last:
            if not self._end.done():
                self._end.set_result(lost)
            return
        if not self._keeping:
            self.say(str(lost))
            return
        left = format_number_of(len(self._keeping), "engine")
        self.say(f"{lost}\nThe run goes on with {left}; another one joins in {pause_s:.0f} s")

    async def _watch_process(self, engine: str) -> None:
        while True:
            why = await self._loss_of(engine)
            await self.state.forget_engine(engine)
            await self.state.append_event("engine_lost", engine, why)
            try:
                await self._settle(engine)
            except RayActorError:
                return  # for good, as `_keep` learns

    async def _loss_of(self, name: str) -> str:
        """Waits until the process of an engine or a worker is lost; returns how, in words."""
        try:
            await value(self.pool.lost(name))
        except RayActorError as error:
            node = lost_node(str(error))
        why = "lost its process" if node is None else f"is lost with its node {node}"
        if name in self._draining and node is None:
            why = "has ended"
        self.say(f"{name} {why}; Ray starts it again")
        return why

    async def _place_of(self, name: str) -> str:
        """The node of an engine or a worker, once Ray has placed it."""
        placing = asyncio.ensure_future(value(self.pool.node(name)))
        done, _ = await asyncio.wait({placing}, timeout=ROOM_S)
        if not done:
            self.say(f"{name} waits: Ray has found no room for it so far")
        return await placing

    async def _settle(self, engine: str) -> None:
        """Waits for the engine's place, and for a receiver to be beside it."""
        self.pool.receiver_for(engine, await self._place_of(engine))
        self._watch_receivers()

    async def _watch_worker(self, worker: str) -> None:
        """Only tells: a worker that is not started again ends the run by its own watch."""
        while True:
            draining = self._spawn(self._drain_at_notice(worker))
            why = await self._loss_of(worker)
            draining.cancel()
            self._draining.discard(worker)
            await self.state.append_metrics({"worker": worker, "detail": why}, WORKER_LOST)
            try:
                await self._place_of(worker)
            except RayActorError:
                return

    # Processes that are told to end ---------------------------------------------------------------

    async def _replace_at_notice(self, engine: str) -> None:
        while True:
            try:
                await value(self.pool.noticed(engine))
                break
            except RayActorError:  # its process was lost
                try:
                    await value(self.pool.node(engine))
                except RayActorError:
                    return  # for good, as `_keep` learns
        if engine not in self._keeping:
            return  # it leaves already
        self._leave(engine, self._grace_s, "was told to end")
        self._join()

    async def _drain_at_notice(self, worker: str) -> None:
        try:
            await value(self.pool.noticed(worker))
        except RayActorError:
            return
        self._draining.add(worker)
        self.say(
            f"{worker} was told to end: it starts no more groups, and those that it has may end "
            f"for {self._grace_s:g} s"
        )
        try:
            async with asyncio.timeout(self._grace_s + LEAVE_SLACK_S):
                await value(self.pool.drain_worker(worker, self._grace_s))
            await self.state.count("workers_drained")
        except RayActorError:
            return  # it was lost before
        except TimeoutError as error:
            self.say(f"{worker} did not end in order: {error!r}")
        self.pool.restart(worker)

    async def _follow_nodes(self) -> None:
        """Notifies the processes on nodes that Ray is draining."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            if not (nodes := await in_thread(self.pool.draining_nodes)):
                continue
            for name in (*self._keeping, *self.pool.worker_names):
                with contextlib.suppress(RayActorError, TimeoutError, HasLeft):  # it has no place
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        if await value(self.pool.node(name)) in nodes:
                            await value(self.pool.notify(name))

    # More and fewer engines -----------------------------------------------------------------------

    async def _follow_setting(self) -> None:
        seen: dict[str, str] = {}
        while True:
            before = seen
            seen = await self.state.wait_settings_changed([SETTING], seen, LOOK_AGAIN_S)
            wanted = with_live(self.config.rollout, seen).num_engines
            if seen != before or time.monotonic() >= self._join_at:
                while len(self._keeping) < wanted:
                    self._join()
            while len(self._keeping) > wanted:
                self._leave(
                    next(reversed(self._keeping)), self.config.weight_sync.drain_timeout_s, ""
                )

    def _join(self) -> None:
        engine, starting = self.pool.add_engine()

        async def join() -> None:
            try:
                await self._settle(engine)
                await value(starting)
            except (RayActorError, RayTaskError, HasLeft):
                return  # `_keep` learns why
            await self.state.append_event(ENGINE_JOINED, engine, "")

        self.say(f"{engine} joins the run")
        self._keeping[engine] = self._spawn(self._keep(engine))
        self._spawn(join())

    def _leave(self, engine: str, drain_s: float, why: str) -> None:
        """`why`: empty if the setting says so."""
        self._keeping.pop(engine).cancel()

        async def leave() -> None:
            try:
                async with asyncio.timeout(drain_s + LEAVE_SLACK_S):
                    await value(self.pool.leave(engine, drain_s))
            except (RayActorError, RayTaskError, TimeoutError) as error:
                self.say(f"{engine} did not leave in order: {error!r}")
            await self._remove(engine, why or "left the run")

        self.say(f"{engine} {why and f'{why}: it '}leaves the run, once its requests have ended")
        self._spawn(leave())

    async def _remove(self, engine: str, why: str) -> None:
        await self.state.remove_engine(engine)
        self.pool.remove_engine(engine)
        await self.state.append_event(ENGINE_LEFT, engine, why)

    # Receivers ------------------------------------------------------------------------------------

    def _watch_receivers(self) -> None:
        for name in self.pool.receivers_given_up().keys() - self._receivers:
            self._receivers.add(name)
            self._spawn(self._watch_receiver(name))

    async def _watch_receiver(self, name: str) -> None:
        try:
            what = await value(self.pool.receivers_given_up()[name])
        except (RayActorError, ActorUnschedulableError):
            # Its node is gone, and its engines with it. Ray may say that it could not start it
            # again anywhere else.
            await self.state.forget_receiver(name)
            await self.state.append_event(RECEIVER_LEFT, name, "its node is gone")
            return
        if not self._end.done():
            self._end.set_result(failure(name, what, self.log_of(name)))
