"""The life of one run, from an empty folder to its summary.

    model ── redis ── ray ──┬── receivers, engines, workers ──┬── version 0 ── eval
                            └── trainer ranks ── warm start ──┘                 │
      ┌─────────────────────────────────────────────────────────────────────────┘
      └── rollout workers generate ◄──buffer──► trainer trains num_steps ── eval
                    │
                    ├── a process dies: RunFailed with its name and the end of its log
                    └── asked to stop: Stopped

    in every case: the model is saved if possible; pools, Ray and Redis end; no process or file in
    shared memory is left; and the summary says how the run ended

The controller is off the data path: it starts, watches, records and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayTaskError

from buffer.dump.load import restore_buffer
from buffer.redis.scripts import RunNotOpenError
from buffer.redis.server import EmbeddedServer
from buffer.results import BufferStats, TaskProgress
from configs.checks import Section, live_names, with_live
from configs.choices import LoraMode
from configs.environment import RUN_VARIABLE
from configs.introspection import live_settings
from configs.schema import Config
from controller.buffer_access import (
    BufferAddress,
    live_texts,
    opened,
    opened_state,
    raw_client,
    url_of,
)
from controller.cluster.survey import check_cluster
from controller.metrics.history import TUNED, Record
from controller.metrics.prometheus import MetricsServer
from controller.page.app import PageServer
from controller.ray_environment import LOOPBACK
from controller.report.panel import Panel
from controller.report.summary import draw_plots, report_end
from controller.run_dir import RunDir
from controller.signals import Stopped, StopRequest
from controller.start.attach import Attachment
from controller.start.gpus import resolved
from controller.start.placement import CPUS_PER_PROCESS, PlacementError, RayCluster, start_ray
from controller.start.plan import UNKNOWN_DIFF, Plan, explained_diff, max_logprob_diff
from controller.start.preflight import check_inputs, plan_on, probe_text
from controller.start.resume import Resumption, changes_by_resume, find_resumption
from controller.start.teacher import with_url
from controller.start.warm_start import supervised_examples
from controller.training import REDIS_DIED, Pools, Training
from controller.units import format_number_of
from controller.watch.fleet import SETTING
from controller.watch.run_view import RunView
from controller.watch.supervise import POLL_S, error_of, failure
from controller.watch.verdict import parts_at_fault
from processes.pending import Pending, T, in_background
from processes.runs import end_processes, run_processes
from processes.tree import SHARED_MEMORY, shared_memory_files
from rollout_pool.pool import RolloutPool, clear_other_hosts, place_teacher
from rollout_pool.tasks.registry import check_data, data_of
from rollout_pool.types import AdapterSpec, RolloutSpec
from trainer_pool.model.checkpoint_names import model_without_weights
from trainer_pool.model.lora import adapted_layers, last_names
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.pool import TrainerPool
from trainer_pool.state.checkpoint import GROUPS_FILE
from trainer_pool.types import Restored, SupervisedExample, TrainerSpec, WarmStartReport
from weight_sync.types import MergeSpec


def launch(config: Config, stop: StopRequest, announce_folder: Callable[[str], None]) -> None:
    """Run `config` to its end and print the RESULT line; calls `announce_folder` with its folder.

    Raises ValueError for bad input, RunFailed if a part of the run died, and Stopped if `stop` was
    set. In every case no process of the run is left on this machine.
    """
    panel = Panel(config.run.panel)
    with panel.progress("task and model"), stop.interrupting():
        task = check_inputs(config)
        data, text = data_of(task), probe_text(config, task)

    def fill(run_dir: RunDir) -> None:
        run_dir.write_data(data)
        run_dir.write_config(config)
        run_dir.write_experiment(config)

    name, group = config.run.name, config.run.group
    run_dir = RunDir.create(config.run.dir, name, config.experiment, group, fill)
    _see_through(Run(config, run_dir, panel, stop, probe_text=text), announce_folder)


def resume(
    run_dir: RunDir,
    config: Config,
    overrides: Sequence[str],
    stop: StopRequest,
    announce_folder: Callable[[str], None],
) -> None:
    """Continue a run that has ended, from its last checkpoint. Otherwise like `launch`.

    `config`: its settings with `overrides`.
    """
    panel = Panel(config.run.panel)
    with panel.progress("task and model"), stop.interrupting():
        task = check_inputs(config, is_resumed=True)
        check_data(config.task, task, run_dir.read_data())
        text = probe_text(config, task)
    resumption = run_dir.reopen(lambda: find_resumption(run_dir, overrides))
    run = Run(resumption.config, run_dir, panel, stop, resumption, probe_text=text)
    _see_through(run, announce_folder)


def attach(run_dir: RunDir, config: Config, attachment: Attachment, stop: StopRequest) -> None:
    """Be the controller of a run that goes on without one. Otherwise like `launch`."""
    panel = Panel(config.run.panel)
    run_dir.take_over()
    run = Run(config, run_dir, panel, stop, attachment=attachment)
    _see_through(run, lambda folder: None)  # its guard knows it already


def _see_through(run: Run, announce_folder: Callable[[str], None]) -> None:
    run_dir, panel, stop = run.dir, run.panel, run.stop
    os.umask(run_dir.umask)
    announce_folder(run_dir.run_id)
    state, error = "failed", None
    try:
        run.execute()
        state = "finished"
    except Stopped:
        state = "stopped"
        raise
    except Exception as problem:
        error = str(problem)
        if not stop.is_set:
            raise
        state = "stopped"
        panel.say(f"while the run was stopping: {error}")
        raise Stopped from problem
    finally:
        run_dir.end(state, error)
        run_dir.forget_redis_url()
        report_end(run_dir, panel.say, run.drawing)


@dataclass(eq=False)
class Run:
    """One run in execution; `execute` is called once."""

    config: Config
    dir: RunDir
    panel: Panel
    stop: StopRequest
    resumption: Resumption | None = None
    """Where a run goes on that has ended."""
    attachment: Attachment | None = None
    """The parts that go on of a run that has not ended."""
    probe_text: tuple[int, ...] = field(default=(), kw_only=True)
    """Tokens by which its engines and trainer are compared."""

    def __post_init__(self) -> None:
        self._start_timeout_s = self.config.cluster.start_timeout_s
        self._stop_timeout_s = self.config.cluster.stop_timeout_s
        self._is_local = self.config.cluster.ray_address is None
        """Only then it outlives its controller: a Ray that was running before would keep lost
        actors for ever."""
        self.drawing: Future[list[Record]] | None = None
        """The plots, once the run has trained."""
        self._server: EmbeddedServer | None = None
        self._prometheus: MetricsServer | None = None
        self._redis_url = ""
        self._host = self.config.cluster.host or (LOOPBACK if self._is_local else "")
        """Address on which this machine's servers listen; "" until Ray is known."""
        self._shared_memory: frozenset[Path] = frozenset()
        self._is_gpu_shared = False
        self._weights_key = secrets.token_urlsafe(32)
        """Shared by trainer, receivers and engines; new for each run."""

    def execute(self) -> None:
        """Run from the first server to the last evaluation; ends all that it started."""
        os.environ[RUN_VARIABLE] = self.dir.run_id
        with contextlib.ExitStack() as cleanup, self.panel:
            cleanup.callback(self._leave_nothing)
            if self.attachment is None:
                cluster, pools = self._start_up(cleanup)
            else:
                cluster, pools = self.attachment.cluster, self._attach(self.attachment, cleanup)
            training = Training(
                config=self.config,
                run_dir=self.dir,
                pools=pools,
                address=self._address,
                server=self._server,
                ray_processes=cluster.processes(),
                panel=self.panel,
                resumed_step=self.resumption.state.step if self.resumption else None,
                stop=self.stop,
                is_attached=self.attachment is not None,
                on_sample=self._tell_prometheus,
            )
            try:
                asyncio.run(training.run())
            finally:  # nothing more is recorded: drawn beside the end of the pools and of Ray
                drawer = ThreadPoolExecutor(1, thread_name_prefix="plots")
                self.drawing = drawer.submit(draw_plots, self.dir)

    def _attach(self, found: Attachment, cleanup: contextlib.ExitStack) -> Pools:
        self._redis_url, self._server = found.redis_url, found.server
        if found.server is not None:
            cleanup.callback(found.server.stop, self._stop_timeout_s)
        cleanup.callback(found.cluster.stop, self.dir.logs)
        pools = Pools(rollout=found.rollout, trainer=found.trainer)
        cleanup.callback(self._stop_pools, pools)
        self.stop.listen()  # Ray has installed its own handler for SIGTERM
        self._start_prometheus(cleanup)
        self._start_page(cleanup)
        self._look()
        with self._progress("attached") as say:
            say("engines, workers and trainer ranks have gone on")
        return pools

    @property
    def _address(self) -> BufferAddress:
        settings = self.config.buffer
        return BufferAddress(url=self._redis_url, run=self.dir.name, settings=settings)

    # Start-up, each part named and timed ---------------------------------------------------------

    @contextlib.contextmanager
    def _progress(self, name: str) -> Iterator[Callable[[str], None]]:
        """A named part of the start; a stop request takes effect before or after it."""
        self.stop.check()
        with self.panel.progress(name) as say:
            yield say
        self.stop.check()

    def _start_up(self, cleanup: contextlib.ExitStack) -> tuple[RayCluster, Pools]:
        if self.config.idle_settings:
            self.panel.say(self.config.idle_settings)
        scratch = self.config.model.scratch
        if scratch is not None and self.resumption is None:
            with self._progress("model from scratch"):
                build_scratch_model(scratch, self.dir.model, self.config.run.seed)
        examples = self._draw_examples()
        cluster = self._start_servers(cleanup)
        pools = self._place(cluster, cleanup)
        self._give_first_weights(pools, self._start_pools(pools, examples))
        return cluster, pools

    def _draw_examples(self) -> Future[list[SupervisedExample]] | None:
        """Examples of the warm start, meanwhile: the start of Ray mostly waits."""
        if self.resumption is not None or not self.config.trainer.warm_start.num_steps:
            return None
        return in_background(supervised_examples, self.config, self._model_path)

    def _start_servers(self, cleanup: contextlib.ExitStack) -> RayCluster:
        """Ray takes the longest and comes last, unless only Ray knows our address."""
        cluster = None
        if not self._host:
            cluster = self._start_ray(cleanup)
            self._host = cluster.host
        self._start_redis(cleanup)
        self._start_prometheus(cleanup)
        self._start_page(cleanup)
        return cluster or self._start_ray(cleanup)

    def _start_redis(self, cleanup: contextlib.ExitStack) -> None:
        buffer = self.config.buffer
        with self._progress("Redis") as say:
            if buffer.url is None:
                log = self.dir.log_of("redis")
                folder, outlives = self.dir.path / "redis", self._is_local
                server = EmbeddedServer.start(folder, buffer, self._host, log, outlives=outlives)
                cleanup.callback(server.stop, self._stop_timeout_s)
                self._server, self._redis_url = server, server.url
                say("started here")
            else:
                self._redis_url = url_of(buffer, buffer.url)
                say("the server of buffer.url")
            is_known = asyncio.run(self._open_buffer())
            # Of a run that goes on not before: after a failed start the next one would not see
            # that a setting was changed, and leave the old one in Redis.
            self.dir.write_config(self.config)
            if self.resumption is not None and self.resumption.overridden:
                self.dir.write_experiment(self.config)
            if not is_known and (resumption := self.resumption) is not None:
                num_groups = asyncio.run(self._restore_buffer(resumption))
                num_prompts = len(resumption.state.untrained_prompts) - num_groups
                groups = format_number_of(num_groups, "group")
                prompts = format_number_of(num_prompts, "prompt")
                say(f"it has lost the run: the checkpoint has {groups}, and {prompts} to run again")
            self.dir.write_redis_url(self._redis_url)

    async def _open_buffer(self) -> bool:
        """Returns whether it holds groups of this run, which then goes on with them."""
        config, resumption = self.config, self.resumption
        overridden = resumption.overridden if resumption else ()
        async with opened(self._address) as buffer:
            if resumption is None:
                # Even if it has pushed nothing: it may be starting, and its settings would hold.
                with contextlib.suppress(RunNotOpenError):
                    await buffer.stats()
                    raise ValueError(
                        f"run.name={self.dir.name!r}: the Redis of buffer.url already holds a run "
                        "of this name; choose another run.name"
                    )
            live = live_settings()
            # Not for another setting of that name, as rollout.eval.temperature.
            replaced = {one.rpartition(".")[2] for one in overridden} - live.keys()
            replaced |= {
                name
                for name, whole in live.items()
                if any(f"{whole}.".startswith(f"{one}.") for one in overridden)
            }
            if resumption is not None:
                with contextlib.suppress(RunNotOpenError):
                    await self._check_tuned(await buffer.stats(), replaced)
            await buffer.open(
                config.buffer,
                config.trainer.groups_per_step,
                config.rollout.oversampling,
                replaced,
                gradient_accumulation_steps=config.trainer.gradient_accumulation_steps,
            )
            # Set before the first group is sampled, and not before what follows is all done.
            is_known = bool((await buffer.stats()).lineage)
            if resumption is not None:
                for worker in range(config.rollout.num_workers):
                    await buffer.reclaim(worker, counts_as_death=False)
                await self._record_changes(await buffer.stats(), resumption)
        if resumption is not None:
            await self._take_over()
        return is_known

    async def _check_tuned(self, stats: BufferStats, replaced: Collection[str]) -> None:
        """Raises ValueError if settings that were changed during the run do not go with those that
        it is to go on with."""
        held = await live_texts(self._address, stats)
        sections = dict[str, Section]()
        for one in fields(self.config):
            if isinstance(section := getattr(self.config, one.name), Section):
                names = {*live_names(type(section))} - {*replaced}
                texts = {name: text for name, text in held.items() if name in names}
                sections[one.name] = with_live(section, texts)
        try:
            replace(self.config, **sections)  # type: ignore[arg-type]
        except ValueError as error:
            fix = "set a value that goes with the live settings, which the run keeps, or those too"
            raise ValueError(f"{error}; {fix}") from None

    async def _record_changes(self, stats: BufferStats, resumption: Resumption) -> None:
        held = await live_texts(self._address, stats)
        async with opened_state(self._address) as state:
            for change in changes_by_resume(self.config, held, resumption.tuned):
                await state.append_metrics(change, TUNED)

    async def _restore_buffer(self, resumption: Resumption) -> int:
        """Give an empty buffer what the checkpoint knows of it; returns the number of groups."""
        state, file = resumption.state, resumption.checkpoint / GROUPS_FILE
        progress = TaskProgress(positions=state.task_positions, untrained=state.untrained_prompts)
        async with opened(self._address) as buffer, raw_client(self._address) as redis:
            if self.config.trainer.checkpoint_groups and file.exists():
                trained = set(state.consumed_group_ids)
                return await restore_buffer(redis, buffer, self.dir.name, file, progress, trained)
            await buffer.restore_progress(progress)
            return 0

    async def _take_over(self) -> None:
        """The fleet of a run that goes on: none of it is left, but its size is what it was."""
        async with opened_state(self._address) as state:
            await state.forget_fleet()
            size = await state.live_settings([SETTING])
        self.config = replace(self.config, rollout=with_live(self.config.rollout, size))

    def _start_prometheus(self, cleanup: contextlib.ExitStack) -> None:
        port, host = self.config.run.prometheus_port, self._host
        if port is None:
            return
        with self._progress("Prometheus") as say:
            self._prometheus = server = MetricsServer(self._address, host, port)
            cleanup.callback(server.close)
            say(server.url)

    def _tell_prometheus(self, view: RunView) -> None:
        if self._prometheus is not None:
            self._prometheus.parts = parts_at_fault(view)

    def _start_page(self, cleanup: contextlib.ExitStack) -> None:
        if (port := self.config.run.page_port) is None:
            return
        with self._progress("page") as say:
            try:
                server = PageServer(self.dir, LOOPBACK, port)
            except ValueError as error:
                if self.resumption is None and self.attachment is None:
                    raise
                say(f"not served: {error}")  # nobody may be there to choose another port
                return
            cleanup.callback(server.close)
            say(server.url)

    def _start_ray(self, cleanup: contextlib.ExitStack) -> RayCluster:
        with self._progress("Ray") as say:
            try:
                cluster = start_ray(self.config, self.dir)
            except SystemExit:  # from Ray's handler, for a SIGTERM that bypassed the guard
                self.stop.set()
                raise Stopped from None
            finally:
                self.stop.listen()  # Ray has installed its own handler for SIGTERM
            cleanup.callback(cluster.stop, self.dir.logs)
            cpus = "this machine" if self._is_local else f"{cluster.num_cpus:g} CPUs"
            say(f"{cpus}, {cluster.num_gpus:g} GPUs")
        return cluster

    @property
    def _model_path(self) -> str:
        return self.config.model.path or str(self.dir.model)

    def _place(self, cluster: RayCluster, cleanup: contextlib.ExitStack) -> Pools:
        plan = plan_on(self.config, cluster)
        self.config = config = plan.config
        self._is_gpu_shared = plan.devices.is_shared
        self.dir.write_config(self.config)
        if not self._is_local:
            self._check_machines(plan)
        rank: dict[str, float] = {"CPU": CPUS_PER_PROCESS, "GPU": plan.devices.rank_gpus}
        engine: dict[str, float] = {"CPU": CPUS_PER_PROCESS, "GPU": plan.devices.engine_gpus}
        worker: dict[str, float] = {"CPU": CPUS_PER_PROCESS}
        with self._progress("placement") as say:
            say(plan.devices.why)
            # Each engine has a group of its own: it may leave the run alone.
            groups = {
                "ranks": [[rank] * config.trainer.ranks],
                "engines": [[engine]] * config.rollout.num_engines,
                "workers": [[worker] * config.rollout.num_workers],
            }
            if config.task.served_teacher is not None:
                groups["teacher"] = [[engine]]
            # Most GPUs first: processes of one GPU might leave too few on every machine.
            by_size = sorted(groups, key=lambda name: -groups[name][0][0].get("GPU", 0.0))
            reserved = {
                name: cluster.reserve(groups[name], self._start_timeout_s, self.stop)
                for name in by_size
            }
            (ranks,), (workers,) = reserved["ranks"], reserved["workers"]
        spec, teacher = self._rollout_spec(plan), None
        if spec.task.served_teacher is not None:  # before the workers, which get its address
            name, reward = spec.task.served_teacher
            setting = f"task.rewards.{name}.path={reward.path!r}"
            with self._progress("teacher") as say:
                (group,) = reserved["teacher"]
                teacher, ready = place_teacher(spec, group, setting, str(reward.path))
                (url,) = self._wait({teacher.name: ready}, "starting").values()
                say("served by the run")
            spec = replace(spec, task=with_url(spec.task, url))
        pools = Pools(
            rollout=RolloutPool.create(spec, reserved["engines"], workers, teacher),
            trainer=TrainerPool.create(self._trainer_spec(plan), ranks),
        )
        cleanup.callback(self._stop_pools, pools)
        return pools

    def _check_machines(self, plan: Plan) -> None:
        """Raises PlacementError if one of them would break the run; says what else is wrong."""
        with self._progress("machines") as say:
            found = check_cluster(self.config, plan, self.dir.path, self.stop.check)
            if refused := [problem.line for problem in found if problem.breaks]:
                raise PlacementError(
                    "\n".join(["the run cannot start on these machines:", *refused])
                )
            say(format_number_of(len(found), "warning") if found else "as they should be")
        for problem in found:
            self.panel.say(problem.line)

    def _trainer_spec(self, plan: Plan) -> TrainerSpec:
        config = self.config
        return TrainerSpec(
            config=config.trainer,
            algorithm=config.full_algorithm,
            weight_sync=config.weight_sync,
            buffer=config.buffer,
            model_path=self._model_path,
            trust_remote_code=config.model.trust_remote_code,
            lora=config.model.lora,
            redis_url=self._redis_url,
            run=self.dir.name,
            run_dir=str(self.dir.path),
            seed=config.run.seed,
            host=self._host,
            num_threads=plan.threads_per_process,
            uses_gpu=plan.devices.rank_gpus > 0,
            gpu_share=plan.devices.gpu_share,
            serving_dtype=plan.serving_dtype,
            max_logprob_diff=max_logprob_diff(plan.config, plan.devices.rank_gpus > 0),
            probe_text=self.probe_text,
            log_rate=config.rollout.log_rate,
            max_probe_diff=explained_diff(plan.config, plan.devices.rank_gpus > 0),
            weights_key=self._weights_key,
            resume_from=str(self.resumption.checkpoint) if self.resumption else None,
            newest_version=self.resumption.newest_version if self.resumption else 0,
            outlives_controller=self._is_local,
            copies_dir=f"{SHARED_MEMORY}/leash-copies-{self.dir.name}-{secrets.token_hex(4)}",
        )

    def _rollout_spec(self, plan: Plan) -> RolloutSpec:
        config = self.config
        return RolloutSpec(
            config=config.rollout,
            task=config.task,
            data=self.dir.read_data(),
            weight_sync=replace(config.weight_sync, pause_mode=config.pause_mode),
            buffer=config.buffer,
            model_path=self._model_path,
            trust_remote_code=config.model.trust_remote_code,
            redis_url=self._redis_url,
            run=self.dir.name,
            run_dir=str(self.dir.path),
            host=self._host,
            num_threads=plan.threads_per_process,
            uses_gpu=plan.devices.engine_gpus > 0,
            gpu_share=plan.devices.gpu_share,
            seed=config.run.seed,
            engine_key=secrets.token_urlsafe(32),
            weights_key=self._weights_key,
            outlives_controller=self._is_local,
            merge=self._merge_spec(plan),
            adapter=self._adapter_spec(),
        )

    def _merge_spec(self, plan: Plan) -> MergeSpec | None:
        lora = self.config.model.lora
        if lora is None or lora.mode is not LoraMode.merged:
            return None
        dtype = resolved(self.config.trainer.dtype, plan.uses_gpu)
        return MergeSpec(model_path=self._model_path, scale=lora.scale, dtype=dtype)

    def _adapter_spec(self) -> AdapterSpec | None:
        lora = self.config.model.lora
        if lora is None or lora.mode is not LoraMode.versions:
            return None
        trust = self.config.model.trust_remote_code
        model = model_without_weights(self._model_path, trust_remote_code=trust)
        return AdapterSpec(
            rank=lora.rank,
            alpha=lora.alpha,
            layers=last_names(adapted_layers(model, lora, self._model_path)),
            num_slots=self.config.buffer.max_staleness + 2,
        )

    def _start_pools(
        self, pools: Pools, examples: Future[list[SupervisedExample]] | None
    ) -> Mapping[str, Pending[WarmStartReport]]:
        """Returns the warm start, if there is one: it begins once all ranks are there."""
        warming = dict[str, Pending[WarmStartReport]]()
        with self._progress("receivers, engines, workers, trainer ranks") as say:
            began, ready = time.monotonic(), dict[str, str]()
            ranks = dict[str, Pending[Restored]]()

            def on_ready(name: str) -> None:
                ready[name] = f"{name} {time.monotonic() - began:.1f} s"
                say(", ".join(ready.values()))
                if examples and examples.done():
                    examples.result()  # raises its error, before the last part is there
                if examples and ranks and ranks.keys() <= ready.keys() and not warming:
                    warming.update(pools.trainer.warm_start(examples.result()))

            rollout = pools.rollout.start()
            if self._is_gpu_shared:
                # An engine takes its fraction of the memory that is free when it starts.
                self._wait(rollout, "starting", on_ready)
                rollout = {}
            opened_at = self._wait(pools.trainer.open_rendezvous(), "opening the rendezvous")
            (rendezvous,) = opened_at.values()
            ranks.update(pools.trainer.start(rendezvous))
            self._wait(rollout | ranks, "starting", on_ready)
        return warming

    def _give_first_weights(
        self, pools: Pools, warming: Mapping[str, Pending[WarmStartReport]]
    ) -> None:
        if warming:
            with self._progress("warm start") as say:
                report = next(iter(self._wait(warming, "warming up").values()))
                say(f"supervised loss {report.loss_first:.2f} to {report.loss_last:.2f}")
        with self._progress("checkpoint engine"):
            self._wait(pools.trainer.connect(), "connecting")
        which = "version 0" if self.resumption is None else f"step {self.resumption.state.step}"
        with self._progress(f"{which} to the engines"):
            self._wait(pools.trainer.publish_initial(), f"publishing {which}")
        if self.probe_text:
            self._compare(pools.rollout)

    def _compare(self, rollout: RolloutPool) -> None:
        """Raises ValueError if engines and trainer compute different policies."""
        with self._progress("engines and trainer agree") as say:
            found = self._wait(rollout.compare(), "comparing").values()
            for agreement in found:
                if agreement.problem is not None:
                    raise ValueError(agreement.problem)
            mean = max(agreement.mean for agreement in found)
            words = f"{mean:.1g} nats apart, in texts of up to {len(self.probe_text)} tokens"
            if flags := self.config.rollout.engine.quantizes:
                words += (
                    f"; how much {' '.join(flags)} explains is unknown (rollout.engine."
                    f"extra_args), so only more than {UNKNOWN_DIFF:g} would be an error"
                )
            say(words)

    def _wait(
        self,
        refs: Mapping[str, Pending[T]],
        doing: str,
        on_ready: Callable[[str], None] = lambda name: None,
    ) -> dict[str, T]:
        """Results by process name; calls `on_ready` with each name that finishes.

        Raises the error of the first process that fails or exceeds cluster.start_timeout_s.
        """
        names, log_of = {ref: name for name, ref in refs.items()}, self.dir.log_of
        pending, results = list(names), dict[str, T]()
        limit_s = self._start_timeout_s
        deadline = time.monotonic() + limit_s
        while pending:
            self._look()
            ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            if not ready:
                if time.monotonic() < deadline:
                    continue
                name = names[pending[0]]
                raise failure(name, f"was not done {doing} after {limit_s:g} s", log_of(name))
            name = names[ready[0]]
            try:
                results[name] = ray.get(ready[0])
            except (RayTaskError, RayActorError) as error:
                raise error_of(name, error, log_of(name)) from error
            on_ready(name)
        return results

    def _look(self) -> None:
        """While pools start: whether to stop, and whether Redis, for which they wait, lives."""
        self.stop.check()
        if self._server is not None and self._server.wait(0) is not None:
            self.panel.say(REDIS_DIED)
            self._server.restart()

    # The end -------------------------------------------------------------------------------------

    def _stop_pools(self, pools: Pools) -> None:
        self._shared_memory = shared_memory_files(run_processes(self.dir.run_id))
        pools.rollout.close(self._stop_timeout_s)
        pools.trainer.close(self._stop_timeout_s)
        clear_other_hosts(self.dir.path, self._stop_timeout_s)

    def _leave_nothing(self) -> None:
        """Kill what is left of the run after pools, Ray and Redis, and remove their leftovers."""
        limit_s, temporary = self._stop_timeout_s, self.dir.temporary
        killed = end_processes(self.dir.run_id, limit_s, self._shared_memory, temporary)
        self.dir.remove_temporary()
        if killed:
            self.panel.say(f"had to kill: {', '.join(killed)}")
        for line in self.dir.left_elsewhere():
            self.panel.say(line)
