"""The training phase of a run: watches, records and evaluates while both pools work.

If it fails or is stopped, the trainers are asked for a checkpoint and the model. In every case the
final numbers of the buffer are recorded for summary and plots.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from buffer.redis.server import EmbeddedServer, ServerStartError
from configs.checks import with_live
from configs.run_files import Scalar
from configs.schema import Config
from controller.buffer_access import BufferAddress, opened, opened_state
from controller.commands.tune import Autotuner
from controller.evaluation.held_out import evaluate
from controller.evaluation.outside import CommandEvaluations
from controller.history_writer import HistoryWriter
from controller.metrics.history import (
    EVAL_FAILED,
    MetricsLog,
    Record,
    of_kind,
    read_metrics,
)
from controller.metrics.sinks import SinkThread, openers
from controller.ray_environment import OUTLAST_S, RETURN_S
from controller.report.panel import Panel
from controller.run_dir import RunDir
from controller.signals import EXIT_RAY_LOST, EXIT_STOPPED, Stopped, StopRequest
from controller.start.attach import EVALUATING_RESULT, TRAINING
from controller.watch.fleet import LOOK_AGAIN_S, Fleet
from controller.watch.remarks import TRAINER, checkpoint_failed, eval_failed
from controller.watch.run_view import RunView
from controller.watch.stall_watch import ANSWER_S, RESTARTING, Stalled, StallWatch, silent_of
from controller.watch.supervise import RunFailed, cause_of, death, error_of, failure
from processes.child import exit_of, has_ended
from processes.pending import Pending, T, value
from processes.silence import wait_silent
from rollout_pool.pool import HasLeft, RolloutPool
from trainer_pool.pool import TrainerPool
from trainer_pool.state.checkpoint import Best, CheckpointStore
from trainer_pool.types import FINAL_MODEL, TrainReport

log = logging.getLogger(__name__)

FINAL_SAMPLE_S = 5.0
"""Longest wait for the last records and numbers from Redis, which may be what died."""
HANGS = 10.0
"""A rank that does not answer for so many usual steps hangs."""
SAVING = "saving the model"
REDIS_DIED = "redis died: it starts again with its data"
DEATH_GRACE_S = 3.0
"""How long a failure waits for the report of a death that may have caused it."""


@dataclass(kw_only=True, slots=True)
class Pools:
    rollout: RolloutPool
    trainer: TrainerPool
    """Replaced by a new one at each restart of the ranks."""


@dataclass(kw_only=True, eq=False)
class Training:
    """The way from version 0 to the last evaluation; `run` is called once."""

    config: Config
    run_dir: RunDir
    pools: Pools
    address: BufferAddress
    server: EmbeddedServer | None
    """The Redis that was started for the run."""
    ray_processes: Mapping[str, int]
    """Process ids, by name, of the Ray that was started for it."""
    panel: Panel
    stop: StopRequest
    resumed_step: int | None = None
    """Completed steps of a run that goes on."""
    is_attached: bool = False
    """The pools have gone on meanwhile."""
    on_sample: Callable[[RunView], None] = lambda view: None
    """See HistoryWriter."""

    def __post_init__(self) -> None:
        self._training: dict[str, Pending[TrainReport]] = {}
        """Result of each rank's training, once it has started."""
        self._deaths: list[asyncio.Task[RunFailed]] = []
        """Each ends the run."""
        self._trainer_deaths: list[asyncio.Task[RunFailed]] = []
        self._disagreements = asyncio.Queue[RunFailed]()
        """Errors of engines that compute another policy than the trainer."""
        self._stalled_ranks = asyncio.Queue[Stalled]()
        """Why they are to start again."""
        self._is_redis_lost = False
        self._evaluation: asyncio.Task[None] | None = None
        self._may_evaluate = False
        self._eval_every = self.config.rollout.eval_every
        self._steps = dict[int, int]()
        """The step after which each version was the policy."""
        self._unwritten = list[Best]()
        """Evaluated before their checkpoints were written."""
        self._copy_error: Scalar | None = None
        """Why the last step has no copy in host memory."""

    async def run(self) -> None:
        """Train to the last step. Raises Stopped, and RunFailed naming the first dead process."""
        async with AsyncExitStack() as cleanup:
            await self._open(cleanup)
            self._deaths = self._watch(self.pools.rollout.deaths())
            log_of, say = self.run_dir.log_of, self.panel.say
            fleet = Fleet(self.pools.rollout, self._state, self.config, log_of=log_of, say=say)
            self._deaths.append(asyncio.create_task(fleet.run()))
            self._deaths.append(asyncio.create_task(self._disagreements.get()))
            self._deaths.append(asyncio.create_task(self._stall_watch().run()))
            if self.server is not None:
                self._deaths.append(asyncio.create_task(self._keep_redis(self.server)))
            self._trainer_deaths = self._watch(self.pools.trainer.deaths())
            cleanup.callback(lambda: _cancel([*self._deaths, *self._trainer_deaths]))
            # In threads, and also while the run ends: without Ray a call of it blocks for a minute.
            is_over = threading.Event()
            cleanup.callback(is_over.set)
            for name, pid in self.ray_processes.items():
                watch = partial(self._leave_when_it_ends, name, pid, is_over)
                threading.Thread(target=watch, daemon=True).start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(self._history.follow_metrics()),
                        tasks.create_task(self._history.sample_buffer()),
                        tasks.create_task(self._follow_eval_every()),
                        tasks.create_task(self._raise_first_death()),
                        tasks.create_task(self._raise_when_stopped()),
                    ]
                    await self._phases(tasks)
                    _cancel(background)
            except BaseExceptionGroup as group:
                self._may_evaluate = False
                cause = await self._root_cause(group)
                if not isinstance(cause, Stopped):
                    with suppress(OSError):  # a full disk
                        self.run_dir.note_error(str(cause))
                await self._save_model()
                raise cause from None
            finally:
                await self._take_final_sample()

    async def _open(self, cleanup: AsyncExitStack) -> None:
        buffer = await cleanup.enter_async_context(opened(self.address))
        self._state = await cleanup.enter_async_context(opened_state(self.address))
        settings, append = self.config.rollout.eval, self._state.append_metrics
        self._by_command = CommandEvaluations(settings, self.run_dir, append, self.panel.say)
        view = RunView(
            run=self.run_dir.name,
            config=self.config,
            started=self.run_dir.read_record().started,
            named=self.run_dir.named,
        )
        history = read_metrics(self.run_dir.metrics)
        last = max((record.count("step") for record in of_kind(history, "step")), default=0)
        hand_on = [
            cleanup.enter_context(SinkThread(name, opener, step=last, say=self.panel.say)).write
            for name, opener in openers(self.config.run.loggers, self.run_dir).items()
        ]
        log = cleanup.enter_context(MetricsLog(self.run_dir.metrics, hand_on))
        show, say = self.panel.show, self.panel.say
        count_places = self.pools.rollout.count_places
        tuner = Autotuner(self.address, self.run_dir, say, count_places)
        self._history = HistoryWriter(
            buffer,
            self._state,
            log,
            view,
            history,
            self._react,
            show,
            say,
            self.on_sample,
            tuner.look,
        )
        if self.resumed_step is not None:
            await self._history.resume(self.resumed_step)
        if self.is_attached:
            await self._history.attach()

    async def _phases(self, tasks: asyncio.TaskGroup) -> None:
        pools = self.pools
        self._tasks = tasks
        if self.resumed_step is None and not self.is_attached:
            await self._enter_phase("evaluating the start")
            # A failure here, before training, ends the run: it has cost only minutes.
            wait = self._await_result
            start = await evaluate(pools.rollout, 0, may_hold=False, await_result=wait)
            self._record_evaluation(start)
        await self._enter_phase(TRAINING)
        self._may_evaluate = True
        generating = [
            tasks.create_task(self._await_result(n, r)) for n, r in pools.rollout.run().items()
        ]
        report = await self._train()
        await self._enter_phase(EVALUATING_RESULT)
        await self._results(pools.rollout.stop())
        await asyncio.gather(*generating)
        await self._history.drain_metrics(block_s=0)
        if self._evaluation is not None:
            await self._evaluation
        await self._evaluate(report.version)
        await self._by_command.end(report.num_steps)
        self._history.record("phase", {"phase": SAVING})
        try:
            await self._export()
        except (RayTaskError, RayActorError) as error:  # it costs the model alone
            self._say_no_model(f"a trainer rank {cause_of(error)}")
        await self._state.set_phase("finished")

    async def _train(self) -> TrainReport:
        """Train to the last step. If a rank dies or hangs, all start again from the last
        checkpoint, up to trainer.max_restarts times; generation goes on within its credits."""
        store = CheckpointStore(self.run_dir.path / "checkpoints")
        lost: BaseException | None = None
        for restarts_left in range(self.config.trainer.max_restarts, -1, -1):
            try:
                if lost is not None:
                    await self._restart_trainer(store, lost)
                self._training = self.pools.trainer.train()
                report = (await self._results_of_ranks(self._training))[0]
                if report.was_stopped:  # for a controller that was killed while it ended the run
                    self.panel.say(
                        f"the ranks stopped after step {report.num_steps}: "
                        "an earlier controller had asked them to"
                    )
                    why = self.run_dir.read_record().error
                    raise Stopped if why is None else RuntimeError(why)
                await self._results_of_ranks(self.pools.trainer.publish_last())
                return report
            except RunFailed as error:
                lost = error if isinstance(error, Stalled) else await self._lost_rank()
                if lost is None:
                    raise
                if not restarts_left or store.latest() is None:
                    raise lost from None
        raise AssertionError("unreachable")

    async def _results_of_ranks(self, pending: Mapping[str, Pending[T]]) -> list[T]:
        """Raises RunFailed, also if a rank hangs whom no collective of others would miss, and
        Stalled if they are to start again."""
        ending = asyncio.ensure_future(self._results(pending))
        silence = asyncio.create_task(wait_silent(self._all_ranks_answer, self._patience_s))
        stalled = asyncio.create_task(self._stalled_ranks.get())
        tasks: set[asyncio.Future[Any]] = {ending, silence, stalled}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            if stalled.done():
                raise stalled.result()
            raise RunFailed(f"a trainer rank did not answer for {silence.result():.0f} s")
        finally:
            _cancel(tasks)

    def _patience_s(self) -> float:
        """A rank that does not answer for so long is not waited for."""
        usual_s, limit_s = self._history.view.usual_step_s, self.config.trainer.timeout_s
        at_least_s = OUTLAST_S + RETURN_S
        return limit_s if usual_s is None else min(limit_s, max(at_least_s, HANGS * usual_s))

    async def _lost_rank(self) -> BaseException | None:
        # The others fail in a collective, maybe before the death is reported.
        death = await _first_of(self._trainer_deaths, DEATH_GRACE_S)
        return death or await self._hanging_rank(ANSWER_S)

    async def _all_ranks_answer(self, limit_s: float) -> bool:
        return await self._hanging_rank(limit_s) is None

    async def _hanging_rank(self, limit_s: float) -> RunFailed | None:
        """A rank that does not answer: its process is stopped or stuck, or its machine is away."""
        if not (silent := await silent_of(self.pools.trainer.pids(), limit_s)):
            return None
        name = silent[0]
        return failure(name, f"does not answer within {limit_s:g} s", self.run_dir.log_of(name))

    async def _restart_trainer(self, store: CheckpointStore, lost: BaseException) -> None:
        await self._enter_phase(RESTARTING)
        self.is_attached = False  # these ranks are this controller's own
        self._training, self._stalled_ranks = {}, asyncio.Queue()
        # The others may hang in a collective.
        await asyncio.to_thread(self.pools.trainer.close, 0.0)
        await asyncio.wait(self._trainer_deaths, timeout=DEATH_GRACE_S)
        _cancel(self._trainer_deaths)
        self._trainer_deaths = []  # if no others come, these are not the cause
        # Only now: until its end rank 0 may have completed a checkpoint, and acknowledged groups
        # that an earlier one does not contain.
        found = store.latest()
        assert found is not None
        folder, _ = found
        self.panel.say(f"{str(lost).partition(';')[0]}: the ranks start again")
        began = time.monotonic()
        pool = self.pools.trainer = self.pools.trainer.again(folder)
        self._trainer_deaths = self._watch(pool.deaths())
        limit_s = self.config.cluster.start_timeout_s
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
        self.panel.say(
            f"the ranks go on from step {restored.step} ({source}), after {seconds:.0f} s"
        )
        await self._history.resume(restored.step, source)
        # The repeated steps have other weights than those that were evaluated.
        self._steps = {v: step for v, step in self._steps.items() if step <= restored.step}
        self._unwritten = [one for one in self._unwritten if one.step <= restored.step]
        await self._enter_phase(TRAINING)

    async def _results(self, pending: Mapping[str, Pending[T]]) -> list[T]:
        return await asyncio.gather(*(self._await_result(n, r) for n, r in pending.items()))

    async def _enter_phase(self, phase: str) -> None:
        await self._state.set_phase(phase)
        self._history.record("phase", {"phase": phase})

    def _react(self, record: Record) -> None:
        if record.kind == "step":
            self._steps[record.count("version") + 1] = record.count("step")
            self._evaluate_if_due(record)
            error = record.values.get("memory_copy_error")
            if error is not None and error != self._copy_error:
                self.panel.say(f"step {record.count('step')} has no copy in memory: {error}")
            self._copy_error = error
        elif record.kind == "agreement":
            if "error" in record.values:
                self._disagreements.put_nowait(RunFailed(str(record.values["error"])))
        else:
            if {"error", "groups_error"} & record.values.keys():
                self.panel.say(checkpoint_failed(record).sentence)
            is_last = record.count("step") >= self.config.trainer.num_steps
            if self._may_evaluate and not is_last and "error" not in record.values:
                self._by_command.note_checkpoint(record.count("step"), self._tasks)
            written, self._unwritten = self._unwritten, []
            for one in written:
                self._note_best(one)

    # Evaluation ----------------------------------------------------------------------------------

    async def _follow_eval_every(self) -> None:
        """From Redis, as every live setting: the run's history lacks a value that was set by hand,
        or by a `make tune` that was killed before it recorded it."""
        seen = dict[str, str]()
        while True:
            seen = await self._state.wait_settings_changed(["eval_every"], seen, LOOK_AGAIN_S)
            self._eval_every = with_live(self.config.rollout, seen).eval_every

    def _evaluate_if_due(self, step: Record) -> None:
        """One evaluation at a time: while a slow one runs, the next due version is skipped."""
        every, number = self._eval_every, step.count("step")
        version = step.count("version") + 1
        is_last = number >= self.config.trainer.num_steps
        is_idle = self._evaluation is None or self._evaluation.done()
        is_due = every and number % every == 0 and not is_last
        if is_due and is_idle and self._may_evaluate:
            self._evaluation = self._tasks.create_task(
                self._evaluate(version, may_hold=self.config.rollout.eval.pinned)
            )

    async def _evaluate(self, version: int, *, may_hold: bool = False) -> None:
        """A failed evaluation is reported and does not end the run, as bad input does."""
        pool, wait = self.pools.rollout, self._await_result
        try:
            values = await evaluate(pool, version, may_hold=may_hold, await_result=wait)
        except RuntimeError as error:  # also of a dead process, which its own watch reports
            log.warning("the evaluation of version %d failed", version, exc_info=True)
            why = str(error).partition("\n")[0]  # the last lines of a log follow
            failed = self._history.record(EVAL_FAILED, {"version": version, "why": why})
            self.panel.say(eval_failed(failed).sentence)
            return
        recorded = self._record_evaluation(values)
        if self.config.trainer.keep_best is not None:
            self._keep_best(recorded, self.config.trainer.keep_best)

    def _record_evaluation(self, values: Mapping[str, Scalar]) -> Record:
        for name in values:
            if name.startswith("failed/"):
                self.panel.say(f"the evaluation of the set {name[7:]} failed: {values[name]}")
        return self._history.record("eval", values)

    def _keep_best(self, evaluated: Record, metric: str) -> None:
        """A failure is reported and does not end the run."""
        own = f"version_min/{metric.partition('/')[2]}"  # of a set, which is answered later
        version = evaluated.count(own if own in evaluated.values else "version_min")
        step, value = self._steps.get(version), evaluated.number(metric)
        trainer = self.config.trainer
        if step is None or not math.isfinite(value):
            return
        if step % trainer.checkpoint_every and step < trainer.num_steps:
            return  # a later version was evaluated than the one asked for: it has none
        self._note_best(Best(step=step, metric=metric, value=value))

    def _note_best(self, one: Best) -> None:
        store = CheckpointStore(self.run_dir.path / "checkpoints")
        why = "it was not written, or is gone already: raise trainer.keep_checkpoints"
        try:
            is_kept = store.note_best(one)
        except (OSError, ValueError) as error:
            is_kept, why = False, str(error)
        if is_kept is None:
            self._unwritten.append(one)
        elif not is_kept:
            what = f"the checkpoint of step {one.step}, with {one.metric} {one.value:.3g}"
            self.panel.say(f"{what}, is not kept as the best: {why}")

    # The end -------------------------------------------------------------------------------------

    async def _raise_when_stopped(self) -> None:
        await self.stop.wait()
        raise Stopped

    async def _save_model(self) -> None:
        """Ask the ranks to finish their step and save the model, then the workers to end."""
        if self.is_attached and not self._training:  # another controller has begun it
            self._training = self.pools.trainer.train()
        if not self._training or self._is_redis_lost:
            return
        limit_s = self.config.cluster.stop_timeout_s
        self._history.record("phase", {"phase": SAVING})
        self.pools.trainer.stop()
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
        # Not before: the ranks' last step needs their groups.
        ends = [value(ref) for ref in self.pools.rollout.stop().values()]
        workers = asyncio.gather(*ends, return_exceptions=True)
        await asyncio.wait([workers], timeout=FINAL_SAMPLE_S)  # what they push still counts

    async def _export(self) -> None:
        await asyncio.gather(*(value(ref) for ref in self.pools.trainer.export().values()))

    def _say_no_model(self, why: str) -> None:
        words = f"no {FINAL_MODEL}: {why}"
        if self.run_dir.has_checkpoint:
            words += f"; `{self.run_dir.command('export')}` writes the model of the last checkpoint"
        self.panel.say(words)

    async def _take_final_sample(self) -> None:
        """Record what is still in the stream, and the buffer's final numbers."""
        try:
            async with asyncio.timeout(FINAL_SAMPLE_S):
                await self._history.drain_metrics(block_s=0)
                await self._history.sample_once()
        except (OSError, TimeoutError, RuntimeError) as error:
            self.panel.say(f"the final numbers are from before Redis was lost ({error!r})")

    # Stalls --------------------------------------------------------------------------------------

    def _stall_watch(self) -> StallWatch:
        return StallWatch(
            self.config.run.stall,
            self._history.view,
            self.run_dir,
            processes=self._ask,
            restart=self._restart_stalled,
            record=self._history.record,
            say=self.panel.say,
        )

    def _ask(self, part: str) -> Mapping[str, Pending[Any]]:
        """Something that each process replies to which may keep others waiting."""
        ranks, pool, stats = self.pools.trainer.pids(), self.pools.rollout, self._history.view.stats
        if part == TRAINER or stats is None:
            return ranks
        engines = [name for name in pool.engine_names if name in stats.engine_versions]
        return {**ranks, **{name: pool.node(name) for name in (*engines, *pool.worker_names)}}

    def _restart_stalled(self, why: Stalled, names: Sequence[str]) -> None:
        if any(name.startswith(TRAINER) for name in names):
            self._stalled_ranks.put_nowait(why)
            return
        for name in names:
            self.panel.say(f"{name} starts again")
            with suppress(HasLeft):
                self.pools.rollout.restart(name)

    # Deaths and their causes ---------------------------------------------------------------------

    def _watch(self, ends: Mapping[str, Pending[str]]) -> list[asyncio.Task[RunFailed]]:
        return [asyncio.create_task(self._death_of(name, ref)) for name, ref in ends.items()]

    async def _death_of(self, name: str, ref: Pending[str]) -> RunFailed:
        try:
            what = await value(ref)
        except RayActorError as error:
            return death(name, error, self.run_dir.log_of(name))
        return failure(name, what, self.run_dir.log_of(name))

    async def _keep_redis(self, server: EmbeddedServer) -> RunFailed:
        """Start the run's server again when it dies, with its data at the same address: its clients
        wait meanwhile. Ends when it has died once more than buffer.max_restarts allows."""
        for number in range(1, self.config.buffer.max_restarts + 1):
            await _end_of(server.pid)
            self.panel.say(REDIS_DIED)
            try:
                await asyncio.to_thread(server.restart)
            except ServerStartError as error:
                self._is_redis_lost = True
                return RunFailed(f"redis died and does not start again: {error}")
            self._history.record("redis_restarted", {"number": number})
        await _end_of(server.pid)
        self._is_redis_lost = True
        return failure("redis", "died", self.run_dir.log_of("redis"))

    def _leave_when_it_ends(self, name: str, pid: int, is_over: threading.Event) -> None:
        """Without its Ray this process can neither start nor end anything, and calls of Ray hang.
        The guard ends all that is left and, unless the run is to stop, has it resumed, as after the
        death of a controller.
        """
        has_ended(pid, None)
        if is_over.is_set():
            return
        self.panel.stop()
        self.panel.say(f"Ray's {name} died: nothing of the run can go on without it")
        sys.stdout.flush()
        os._exit(EXIT_STOPPED if self.stop.is_set else EXIT_RAY_LOST)

    async def _raise_first_death(self) -> None:
        first = await _first_of(self._deaths, None)
        assert first is not None
        raise first

    async def _await_result(self, name: str, ref: Pending[T]) -> T:
        try:
            return await value(ref)
        except (RayTaskError, RayActorError) as error:
            raise error_of(name, error, self.run_dir.log_of(name)) from error

    async def _root_cause(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        """A death explains errors in other processes, which often arrive first."""
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, Stopped | ValueError):
            return first
        return await _first_of([*self._deaths, *self._trainer_deaths], DEATH_GRACE_S) or first


async def _end_of(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        await exit_of(pid)


async def _first_of(
    deaths: list[asyncio.Task[RunFailed]], timeout_s: float | None
) -> BaseException | None:
    """Returns what the first watch to end has found or failed with, if it was not cancelled."""
    while watching := [death for death in deaths if not death.cancelled()]:
        done, _ = await asyncio.wait(
            watching, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        ended = next((death for death in done if not death.cancelled()), None)
        if ended is not None:
            return ended.exception() or ended.result()
        if not done:
            break
    return None


def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
