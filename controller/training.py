"""The training phase of a run: watches, records and evaluates while both pools work.

If it fails or is stopped, the trainers are asked for a checkpoint and the model. In every case the
final numbers of the buffer are recorded for summary and plots.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from buffer.redis.server import EmbeddedServer, ServerStartError
from configs.schema import Config
from controller.buffer_access import BufferAddress, open_buffer, open_state
from controller.metrics.records import (
    EVAL_FAILED,
    MetricsLog,
    Record,
    Scalar,
    of_kind,
    read_metrics,
)
from controller.metrics.sinks import SinkThread, openers
from controller.recorder import Recorder
from controller.report.panel import Panel
from controller.report.state import RunView
from controller.run_dir import RunDir
from controller.signals import EXIT_RAY_LOST, Stopped, StopRequest
from controller.start.attach import EVALUATING_RESULT, TRAINING
from controller.start.teacher import ServedTeacher
from controller.watch.evaluation import evaluate, try_evaluate
from controller.watch.fleet import Fleet
from controller.watch.remarks import checkpoint_failed_words, eval_failed_words
from controller.watch.supervise import RunFailed, cause_of, death, error_of, failure
from processes.child import exit_of
from processes.pending import Pending, T, value
from rollout_pool.pool import RolloutPool
from trainer_pool.pool import TrainerPool
from trainer_pool.state.checkpoint import CheckpointStore
from trainer_pool.types import FINAL_MODEL, TrainReport

FINAL_SAMPLE_S = 5.0
"""For the last records and numbers from Redis, which may be what died."""
ANSWER_S = 10.0
"""A rank answers at once, also in the middle of a step."""
SAVING = "saving the model"
DEATH_GRACE_S = 3.0
"""How long a failure waits for the report of a death that may have caused it."""


@dataclass(kw_only=True, slots=True)
class Pools:
    rollout: RolloutPool
    trainer: TrainerPool
    new_trainer: Callable[[Path], TrainerPool]
    """Ranks that go on from a checkpoint, in the place of those of `trainer`, which are gone."""


class Training:
    """From version 0 to the last evaluation; `run` is called once."""

    def __init__(
        self,
        *,
        config: Config,
        run_dir: RunDir,
        pools: Pools,
        address: BufferAddress,
        server: EmbeddedServer | None,
        ray_processes: Mapping[str, int],
        panel: Panel,
        started: float,
        stop: StopRequest,
        teacher: ServedTeacher | None = None,
        resumed_step: int | None = None,
        is_attached: bool = False,
    ) -> None:
        """`server`, `teacher`, `ray_processes` (ids by name): what was started for the run.
        `resumed_step`: completed steps of a run that goes on. `is_attached`: the pools have gone
        on meanwhile."""
        self._config = config
        self._dir = run_dir
        self._pools = pools
        self._address = address
        self._server = server
        self._ray_processes = ray_processes
        self._teacher = teacher
        self._panel = panel
        self._started = started
        self._stop = stop
        self._resumed_step = resumed_step
        self._is_attached = is_attached
        self._training: dict[str, Pending[TrainReport]] = {}
        """Result of each rank's training, once it has started."""
        self._deaths: list[asyncio.Task[RunFailed]] = []
        """Each ends the run."""
        self._trainer_deaths: list[asyncio.Task[RunFailed]] = []
        self._is_redis_lost = False
        self._evaluation: asyncio.Task[None] | None = None
        self._may_evaluate = False
        self._copy_error: Scalar | None = None
        """Of the last step: why it has no copy in host memory."""

    async def run(self) -> None:
        """Train to the last step. Raises Stopped, and RunFailed naming the first dead process."""
        async with AsyncExitStack() as cleanup:
            await self._open(cleanup)
            self._deaths = self._watch(self._pools.rollout.worker_deaths())
            self._deaths.append(asyncio.create_task(self._keep_engines()))
            if self._server is not None:
                self._deaths.append(asyncio.create_task(self._keep_redis(self._server)))
            if self._teacher is not None:
                self._deaths.append(asyncio.create_task(self._teacher.death()))
            self._trainer_deaths = self._watch(self._pools.trainer.deaths())
            cleanup.callback(lambda: _cancel([*self._deaths, *self._trainer_deaths]))
            try:
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(self._recorder.follow_metrics()),
                        tasks.create_task(self._recorder.sample_buffer()),
                        tasks.create_task(self._raise_first_death()),
                        tasks.create_task(self._raise_when_stopped()),
                        *(
                            tasks.create_task(self._leave_when_it_ends(name, pid))
                            for name, pid in self._ray_processes.items()
                        ),
                    ]
                    await self._phases(tasks)
                    _cancel(background)
            except BaseExceptionGroup as group:
                self._may_evaluate = False
                cause = await self._root_cause(group)
                await self._save_model()
                raise cause from None
            finally:
                await self._take_final_sample()

    async def _open(self, cleanup: AsyncExitStack) -> None:
        self._buffer = await open_buffer(self._address)
        cleanup.push_async_callback(self._buffer.close)
        self._state = await open_state(self._address)
        cleanup.push_async_callback(self._state.close)
        view = RunView.of_run(self._dir.name, self._config, self._started)
        history = read_metrics(self._dir.metrics)
        last = max((record.count("step") for record in of_kind(history, "step")), default=0)
        sinks = [
            cleanup.enter_context(SinkThread(name, opener, step=last, say=self._panel.say))
            for name, opener in openers(self._config.run.loggers, self._dir).items()
        ]
        hand_on = [sink.write for sink in sinks]
        log = cleanup.enter_context(MetricsLog(self._dir.metrics, hand_on))
        self._recorder = Recorder(
            self._buffer,
            self._state,
            log,
            self._panel.show,
            view,
            self._react,
            history,
            say=self._panel.say,
        )
        if self._resumed_step is not None:
            await self._recorder.resume(self._resumed_step)
        if self._is_attached:
            await self._recorder.attach()

    async def _phases(self, tasks: asyncio.TaskGroup) -> None:
        pools = self._pools
        self._tasks = tasks
        if self._resumed_step is None and not self._is_attached:
            await self._enter_phase("evaluating the start")
            # A failure here, before training, ends the run: it has cost only minutes.
            wait = self._await_result
            start = await evaluate(pools.rollout, 0, may_hold=False, await_result=wait)
            self._recorder.record("eval", start)
        await self._enter_phase(TRAINING)
        self._may_evaluate = True
        generating = [
            tasks.create_task(self._await_result(n, r)) for n, r in pools.rollout.run().items()
        ]
        report = await self._train()
        await self._enter_phase(EVALUATING_RESULT)
        await asyncio.gather(*(self._await_result(n, r) for n, r in pools.rollout.stop().items()))
        await asyncio.gather(*generating)
        await self._recorder.drain_metrics(block_s=0)
        if self._evaluation is not None:
            await self._evaluation
        await self._evaluate(report.version)
        self._recorder.record("phase", {"phase": SAVING})
        try:
            await self._export()
        except (RayTaskError, RayActorError) as error:  # it costs the model alone
            self._say_no_model(f"a trainer rank {cause_of(error)}")
        await self._state.set_phase("finished")

    async def _train(self) -> TrainReport:
        """Train to the last step. If a rank dies or hangs, all start again from the last
        checkpoint, up to trainer.max_restarts times; generation goes on within its credits."""
        store = CheckpointStore(self._dir.path / "checkpoints")
        lost: RunFailed | None = None
        for restarts_left in range(self._config.trainer.max_restarts, -1, -1):
            try:
                if lost is not None:
                    await self._restart_trainer(store, lost)
                self._training = self._pools.trainer.train()
                report = (await self._results(self._training))[0]
                if report.was_stopped:  # for a controller that was killed while it ended the run
                    self._panel.say(
                        f"the ranks stopped after step {report.num_steps}: "
                        "an earlier controller had asked them to"
                    )
                    raise Stopped
                await self._results(self._pools.trainer.publish_last())
                return report
            except RunFailed:
                # The others fail in a collective, maybe before the death is reported.
                lost = await self._first_of(self._trainer_deaths, DEATH_GRACE_S)
                lost = lost or await self._hanging_rank()
                if lost is None:
                    raise
                if not restarts_left or store.latest() is None:
                    raise lost from None
        raise AssertionError("unreachable")

    async def _hanging_rank(self) -> RunFailed | None:
        """A rank that does not answer: its process is stopped or stuck, or its machine is away."""
        asked = {
            asyncio.ensure_future(value(ref)): name
            for name, ref in self._pools.trainer.pids().items()
        }
        _, silent = await asyncio.wait(asked, timeout=ANSWER_S)
        for asking in silent:
            asking.cancel()
        names = sorted(asked[asking] for asking in silent)
        if not names:
            return None
        return failure(
            names[0], f"does not answer within {ANSWER_S:g} s", self._dir.log_of(names[0])
        )

    async def _restart_trainer(self, store: CheckpointStore, lost: RunFailed) -> None:
        await self._enter_phase("restarting the trainer")
        self._training = {}
        # The others may hang in a collective.
        await asyncio.to_thread(self._pools.trainer.close, 0.0)
        await asyncio.wait(self._trainer_deaths, timeout=DEATH_GRACE_S)
        _cancel(self._trainer_deaths)
        # Only now: until its end rank 0 may have completed a checkpoint, and acknowledged groups
        # that an earlier one does not contain.
        found = store.latest()
        assert found is not None
        folder, _ = found
        self._panel.say(f"{str(lost).partition(';')[0]}: the ranks start again")
        began = time.monotonic()
        pool = self._pools.trainer = self._pools.new_trainer(folder)
        self._trainer_deaths = self._watch(pool.deaths())
        limit_s = self._config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                (rendezvous,) = await self._results(pool.open_rendezvous())
                restored, *_ = await self._results(pool.start(rendezvous))
                await self._results(pool.connect())
                await self._results(pool.publish_initial())
        except TimeoutError:
            raise RunFailed(
                "the trainer ranks did not start again within "
                f"cluster.start_timeout_s={limit_s:g}; their logs may say why: logs/trainer-*.log. "
                "If Ray has no room for a lost one, resume the run with fewer trainer.num_ranks"
            ) from None
        source = "memory" if restored.from_memory else "disk"
        seconds = time.monotonic() - began
        self._panel.say(
            f"the ranks go on from step {restored.step} ({source}), after {seconds:.0f} s"
        )
        await self._recorder.resume(restored.step, source)
        await self._enter_phase(TRAINING)

    async def _results(self, pending: Mapping[str, Pending[T]]) -> list[T]:
        return await asyncio.gather(*(self._await_result(n, r) for n, r in pending.items()))

    async def _enter_phase(self, phase: str) -> None:
        await self._state.set_phase(phase)
        self._recorder.record("phase", {"phase": phase})

    def _react(self, record: Record) -> None:
        if record.kind == "step":
            self._evaluate_if_due(record)
            error = record.values.get("memory_copy_error")
            if error is not None and error != self._copy_error:
                self._panel.say(f"step {record.count('step')} has no copy in memory: {error}")
            self._copy_error = error
        elif {"error", "groups_error"} & record.values.keys():
            self._panel.say(checkpoint_failed_words(record))

    # Evaluation ----------------------------------------------------------------------------------

    def _evaluate_if_due(self, step: Record) -> None:
        """One evaluation at a time: while a slow one runs, the next due version is skipped."""
        every, number = self._config.rollout.eval_every, step.count("step")
        version = step.count("version") + 1
        is_last = number >= self._config.trainer.num_steps
        is_idle = self._evaluation is None or self._evaluation.done()
        is_due = every and number % every == 0 and not is_last
        if is_due and is_idle and self._may_evaluate:
            self._evaluation = self._tasks.create_task(
                self._evaluate(version, may_hold=self._config.rollout.eval.pinned)
            )

    async def _evaluate(self, version: int, *, may_hold: bool = False) -> None:
        """A failed evaluation is reported and does not end the run."""
        pool, wait = self._pools.rollout, self._await_result
        kind, record = await try_evaluate(pool, version, may_hold=may_hold, await_result=wait)
        recorded = self._recorder.record(kind, record)
        if kind == EVAL_FAILED:
            self._panel.say(eval_failed_words(recorded))

    # The end -------------------------------------------------------------------------------------

    async def _raise_when_stopped(self) -> None:
        await self._stop.wait()
        raise Stopped

    async def _save_model(self) -> None:
        """Ask the ranks to finish their step, save a checkpoint and export the model."""
        if not self._training or self._is_redis_lost:
            return
        limit_s = self._config.cluster.stop_timeout_s
        self._recorder.record("phase", {"phase": SAVING})
        self._pools.trainer.stop()
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(value(ref) for ref in self._training.values()))
                await self._export()
        except TimeoutError:
            self._say_no_model(
                f"it was not written within cluster.stop_timeout_s={limit_s:g} after the request"
            )
        except (RayTaskError, RayActorError) as error:
            self._say_no_model(f"a trainer rank {cause_of(error)}")

    async def _export(self) -> None:
        await asyncio.gather(*(value(ref) for ref in self._pools.trainer.export().values()))

    def _say_no_model(self, why: str) -> None:
        words = f"no {FINAL_MODEL}: {why}"
        if self._dir.has_checkpoint:
            words += f"; `{self._dir.command('export')}` writes the model of the last checkpoint"
        self._panel.say(words)

    async def _take_final_sample(self) -> None:
        """Record what is still in the stream, and the buffer's final numbers."""
        try:
            async with asyncio.timeout(FINAL_SAMPLE_S):
                await self._recorder.drain_metrics(block_s=0)
                await self._recorder.sample_once()
        except (OSError, TimeoutError, RuntimeError) as error:
            self._panel.say(f"the final numbers are from before Redis was lost ({error!r})")

    # Deaths and their causes ---------------------------------------------------------------------

    def _watch(self, ends: Mapping[str, Pending[str]]) -> list[asyncio.Task[RunFailed]]:
        return [asyncio.create_task(self._death_of(name, ref)) for name, ref in ends.items()]

    async def _death_of(self, name: str, ref: Pending[str]) -> RunFailed:
        try:
            what = await value(ref)
        except RayActorError as error:
            return death(name, error, self._dir.log_of(name))
        return failure(name, what, self._dir.log_of(name))

    async def _keep_engines(self) -> RunFailed:
        fleet = Fleet(
            self._pools.rollout,
            self._state,
            self._config,
            log_of=self._dir.log_of,
            say=self._panel.say,
        )
        return await fleet.run()

    async def _keep_redis(self, server: EmbeddedServer) -> RunFailed:
        """Start the run's server again when it dies, with its data at the same address: its clients
        wait meanwhile. Ends when it has died once more than buffer.max_restarts allows."""
        for number in range(1, self._config.buffer.max_restarts + 1):
            await _end_of(server.pid)
            self._panel.say("redis died: it starts again with its data")
            try:
                await asyncio.to_thread(server.restart)
            except ServerStartError as error:
                self._is_redis_lost = True
                return RunFailed(f"redis died and does not start again: {error}")
            self._recorder.record("redis_restarted", {"number": number})
        await _end_of(server.pid)
        self._is_redis_lost = True
        return failure("redis", "died", self._dir.log_of("redis"))

    async def _leave_when_it_ends(self, name: str, pid: int) -> None:
        """Without its Ray this process can neither start nor end anything, and calls of Ray hang.
        The guard ends all that is left and has the run resumed, as after the death of a controller.
        """
        await _end_of(pid)
        self._panel.stop()
        self._panel.say(f"Ray's {name} died: nothing of the run can go on without it")
        sys.stdout.flush()
        os._exit(EXIT_RAY_LOST)

    async def _raise_first_death(self) -> None:
        done, _ = await asyncio.wait(self._deaths, return_when=asyncio.FIRST_COMPLETED)
        raise next(iter(done)).result()

    async def _first_of(
        self, deaths: list[asyncio.Task[RunFailed]], timeout_s: float
    ) -> RunFailed | None:
        done, _ = await asyncio.wait(deaths, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result() if done else None

    async def _await_result(self, name: str, ref: Pending[T]) -> T:
        """The result of another process; an error names the process."""
        try:
            return await value(ref)
        except (RayTaskError, RayActorError) as error:
            raise error_of(name, error, self._dir.log_of(name)) from error

    async def _root_cause(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        """A death explains errors in other processes, which often arrive first."""
        first = _first(group)
        if isinstance(first, Stopped | ValueError):
            return first
        deaths = [*self._deaths, *self._trainer_deaths]
        return await self._first_of(deaths, DEATH_GRACE_S) or first


async def _end_of(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        await exit_of(pid)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
