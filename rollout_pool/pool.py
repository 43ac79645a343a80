"""The rollout pool as the controller sees it: Ray actors, thin wrappers around plain classes.

    node 0:  engine-0  engine-1  ◄── receiver-0        worker-0  worker-1
    node 1:  engine-2  engine-3  ◄── receiver-1        (wherever there is room)

A receiver stages new weights for all engines of its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray._private.state import state as ray_state
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from buffer.run_state import RunState
from configs.environment import PROCESS_VARIABLE
from processes.leftovers import (
    hosts_with_leftovers,
    list_path,
    remove_leftovers,
    remove_listed,
)
from processes.pending import Pending
from rollout_pool.engines.engine import EngineSpec, SGLangEngine
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.rewards.hosts import RayScorer, RemoteScoring, ScorerActor
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport
from rollout_pool.worker.build import WorkerParts

SEED_STRIDE = 1_000_003
"""Step between the sampling seeds of two engines; large, so that neighbouring runs share none."""
STOP_TIMEOUT_S = 60.0
"""Longest wait for a worker's `run` to end."""


class _Placed:
    """An actor that Ray starts again when its process dies, on another node if it must.

    SIGTERM, which the processes of a machine get before it is taken away, does not end it, as Ray
    would: the controller lets it leave. A second one ends it at once.
    """

    _notice: Future[None]

    def __new__(cls, *_: object, **__: object) -> Self:
        # Ray calls this in the process's main thread, the only one that may set a handler, and has
        # set its own before; `__init__` and all else run in the thread of the event loop.
        self = super().__new__(cls)
        self._notice = Future()
        self._notice.set_running_or_notify_cancel()  # else a call that is cancelled cancels it

        def note(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            self._note_notice()

        signal.signal(signal.SIGTERM, note)
        return self

    def _note_notice(self) -> None:
        with contextlib.suppress(InvalidStateError):  # it is not the first
            self._notice.set_result(None)

    async def notify(self) -> None:
        """Does what SIGTERM does."""
        self._note_notice()

    async def wait_notice(self) -> None:
        """Returns once this process was told to end."""
        await asyncio.wrap_future(self._notice)

    async def group(self) -> PlacementGroup:
        """Its place."""
        group = get_current_placement_group()
        assert group is not None
        return group

    async def node(self) -> str:
        """Id of the node where it runs."""
        return str(ray.get_runtime_context().get_node_id())

    async def wait_lost(self) -> None:
        """Never returns; Ray raises at the reference when this process has died."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()


class EngineActor(_Placed):
    """One engine in a process of its own. Every method is a coroutine; none blocks the others.

    When its process dies, Ray starts it again, on another node if it must, and repeats the calls
    that were not answered: `keep` then starts the engine again, which catches up.
    """

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        _log_to_stderr()
        self._spec = spec
        self._engine = SGLangEngine(engine_spec(spec, index, _listen_host(spec.host)))
        self._life: EngineLife | None = None
        self._state: RunState | None = None
        self._error: Exception | None = None
        self._has_begun = asyncio.Event()
        self._keeping: asyncio.Task[str] | None = None
        self._is_leaving = False

    async def keep(self) -> str:
        """Start the engine and keep it serving; returns why it was given up, but not after `stop`
        or `leave`. A controller that attaches calls it again."""
        if self._is_leaving:
            return "was leaving when its controller died"
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        return await asyncio.shield(self._keeping)

    async def _keep(self) -> str:
        try:
            self._life = await self._begin()
        except Exception as error:
            self._error = error
            return f"did not start: {error}"
        finally:
            self._has_begun.set()
        return await self._life.wait_given_up()

    async def _begin(self) -> EngineLife:
        spec, engine = self._spec, self._engine
        self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)
        life = EngineLife(engine, config=spec.weight_sync, key=spec.weights_key, state=self._state)
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            await life.start()
            return life
        await self._state.forget_engine(engine.spec.name)
        with contextlib.suppress(OSError, ValueError):  # another host has the list then
            await asyncio.to_thread(remove_listed, engine.spec.leftovers_path)
        life.start_again("lost its process")
        return life

    async def wait_ready(self) -> None:
        """Raises EngineError if the server did not start, ValueError if it can't commit as set."""
        await self._has_begun.wait()
        if self._error is not None:
            raise self._error

    async def gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave this engine, as CUDA_VISIBLE_DEVICES names them."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    async def hold(self, version: int, wait_s: float, limit_s: float) -> bool:
        return self._life is not None and await self._life.hold(version, wait_s, limit_s)

    async def release(self) -> None:
        if self._life is not None:
            await self._life.release()

    async def leave(self, drain_s: float) -> None:
        """End as EngineLife.leave does. The process can be killed then."""
        self._is_leaving = True
        if self._life is not None:
            await self._life.leave(drain_s)

    async def stop(self, timeout_s: float) -> None:
        if self._life is not None:
            await self._life.stop(timeout_s)
        if self._state is not None:
            await self._state.close()


class ReceiverActor(_Placed, ReceiverKeeper):
    """The receiver of one node. Its death never ends the run: `keep` runs again."""

    def __init__(self, spec: RolloutSpec, name: str) -> None:
        _log_to_stderr()
        super().__init__(spec, name, _listen_host(spec.host))
        self._keeping: asyncio.Task[str] | None = None

    async def keep(self, gpu_ids: list[str]) -> str:
        """`run`, which Ray calls again after it has restarted this actor, and a controller that
        attaches. `gpu_ids`: of the node's first engine; the receiver shares the first."""
        if self._keeping is None:
            if gpu_ids:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids[0]
            self._keeping = asyncio.create_task(self.run())
        return await asyncio.shield(self._keeping)


class WorkerActor(_Placed):
    """One rollout worker in a process of its own.

    When its process dies, Ray restarts the actor and repeats the calls that were not answered. The
    first of them prepares the new worker; `run` reclaims the groups of the one before and goes on.
    """

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        _log_to_stderr()
        # Looked up by name: with a handle among its arguments Ray could not restart this actor
        # once the driver's object store has forgotten it.
        scorers = [RayScorer(ray.get_actor(name)) for name in _scorer_names(spec)]
        scoring = RemoteScoring(scorers) if scorers else None
        self._spec = spec
        self._parts = WorkerParts(spec, index, scoring=scoring, host=_listen_host(spec.host))
        self._getting_ready: asyncio.Task[None] | None = None
        self._running: asyncio.Task[WorkerReport] | None = None
        self._is_draining = False
        self._stopping = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._is_closed = asyncio.Event()

    async def start(self) -> None:
        """Prepare, while the engines start. Raises ValueError for a bad task or model."""
        if self._getting_ready is None:
            self._getting_ready = asyncio.create_task(self._parts.prepare())
        await asyncio.shield(self._getting_ready)

    async def spec(self) -> RolloutSpec:
        return self._spec

    async def run(self) -> WorkerReport:
        """The report comes after `stop`. A controller that attaches calls it again."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> WorkerReport:
        await self.start()
        if self._stopping.is_set():
            self._parts.worker.stop()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            await self._parts.note_restart()
        try:
            report = await self._parts.worker.run()
        finally:
            self._has_ended.set()
        if self._is_draining:
            await self._stopping.wait()  # unless the process ends before: Ray repeats the call
        return report

    async def drain(self, limit_s: float) -> None:
        """End `run` as RolloutWorker.drain does, but do not answer it: the next process goes on.
        This one can be killed then."""
        self._is_draining = True
        if self._getting_ready is not None and self._getting_ready.done():
            await self._parts.worker.drain(limit_s)
        if self._running is not None:
            await self._has_ended.wait()

    async def evaluate(self, version: int, engine: str | None) -> EvalReport:
        await self.start()
        return await self._parts.worker.evaluate(version, engine)

    async def stop(self) -> None:
        """End `run`; evaluations are still answered.

        Returns only after `run` has ended: if the process dies before, Ray repeats the call.
        """
        self._stopping.set()
        if self._getting_ready is not None and self._getting_ready.done():
            self._parts.worker.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._has_ended.wait()

    async def wait_dead(self) -> str:
        """Returns after `close`; Ray raises at the reference when the process is gone for good.
        (Ray logs an error for a call that is open when the actor is killed.)"""
        await self._is_closed.wait()
        return "was closed"

    async def close(self) -> None:
        await self._parts.close()
        self._is_closed.set()


@dataclass(kw_only=True, slots=True, frozen=True)
class _Member:
    """One actor. Ray gives handles no useful static type."""

    name: str
    handle: Any


@dataclass(kw_only=True, slots=True, frozen=True)
class _Engine:
    member: _Member
    group: PlacementGroup
    """Its place, which holds no other process."""
    keeping: Pending[str]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Receiver:
    member: _Member
    keeping: Pending[str]


class RolloutPool:
    """Engines and workers. Methods return pending results, by process name, at once.

    Engines may join and leave while it runs, and Ray may start a lost one again on another node;
    `receiver_for` sees to it that each node with an engine has a receiver.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        engine_groups: Sequence[PlacementGroup],
        workers: Sequence[_Member],
        scorers: Sequence[_Member],
    ) -> None:
        """Use `create` or `adopt`."""
        self._spec = spec
        self._bundle: dict[str, float] = engine_groups[0].bundle_specs[0]
        self._groups = list(engine_groups)
        self._engines: dict[str, _Engine] = {}
        self._receivers: dict[str, _Receiver] = {}
        """By the node's id."""
        self._workers = list(workers)
        self._scorers = list(scorers)

    @classmethod
    def create(
        cls,
        spec: RolloutSpec,
        engine_groups: Sequence[PlacementGroup],
        worker_group: PlacementGroup,
    ) -> RolloutPool:
        """An engine in each of `engine_groups`, a worker in each bundle of the other, and scorers,
        if any, spread over all nodes. They are created, but do nothing before `start`."""
        lifetime = _lifetime(spec)
        workers = [
            _create(
                WorkerActor,
                name,
                (spec, index),
                **_inside(worker_group, index),
                max_restarts=spec.config.max_worker_restarts,
                max_task_retries=-1,
                lifetime=lifetime,
            )
            for index, name in enumerate(_worker_names(spec))
        ]
        scorers = [
            _create(
                ScorerActor,
                name,
                (
                    spec.task,
                    spec.config.reward_processes,
                    spec.config.reward_timeout_s,
                    str(Path(spec.run_dir) / "logs" / f"rewards-{index}.log"),
                    spec.data,
                ),
                num_cpus=1,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
                lifetime=lifetime,
            )
            for index, name in enumerate(_scorer_names(spec))
        ]
        return cls(spec, engine_groups, workers, scorers)

    @classmethod
    def adopt(cls, actors: Mapping[str, Any], timeout_s: float) -> RolloutPool:
        """The pool that a controller which died has created, from the `actors` that go on.

        Raises LookupError if one is gone, and Ray's errors if one does not answer.
        """
        spec: RolloutSpec = ray.get(actors["worker-0"].spec.remote(), timeout=timeout_s)
        members = {name: _Member(name=name, handle=actor) for name, actor in actors.items()}
        workers = [members[name] for name in _worker_names(spec)]
        scorers = [members[name] for name in _scorer_names(spec)]
        engines = [members[name] for name in sorted(members) if name.startswith("engine-")]
        receivers = [members[name] for name in sorted(members) if name.startswith("receiver-")]
        groups = ray.get([e.handle.group.remote() for e in engines], timeout=timeout_s)
        nodes = ray.get([r.handle.node.remote() for r in receivers], timeout=timeout_s)
        if not engines or not receivers:
            raise LookupError("no engine, or no receiver")
        ray.get([w.handle.pid.remote() for w in workers], timeout=timeout_s)
        pool = cls(spec, groups, workers, scorers)
        for engine, group in zip(engines, groups, strict=True):
            keeping = engine.handle.keep.remote()
            pool._engines[engine.name] = _Engine(member=engine, group=group, keeping=keeping)
        for receiver, node in zip(receivers, nodes, strict=True):
            keeping = receiver.handle.keep.remote(engines[0].handle.gpu_ids.remote())
            pool._receivers[node] = _Receiver(member=receiver, keeping=keeping)
        return pool

    def worker_group(self, timeout_s: float) -> PlacementGroup:
        """The place of the workers."""
        group: PlacementGroup = ray.get(self._workers[0].handle.group.remote(), timeout=timeout_s)
        return group

    def start(self) -> dict[str, Pending[Any]]:
        """Engines load while workers prepare and receivers start."""
        engines = dict(self._add_engine(group) for group in self._groups)
        workers = {w.name: w.handle.start.remote() for w in self._workers}
        scorers = {s.name: s.handle.start.remote() for s in self._scorers}
        receivers: dict[str, Pending[None]] = {}
        for name, engine in self._engines.items():
            (node,) = placement_group_table(engine.group)["bundles_to_node_id"].values()
            receivers |= self.receiver_for(name, node)
        return {**engines, **receivers, **scorers, **workers}

    def run(self) -> dict[str, Pending[WorkerReport]]:
        """Reports come after `stop`."""
        return {worker.name: worker.handle.run.remote() for worker in self._workers}

    def evaluate(self, version: int, engine: str | None = None) -> tuple[str, Pending[EvalReport]]:
        """The evaluating worker's name and its report on `version` or later; if an engine is held
        at `version`, pass it as `engine`."""
        worker = self._workers[0]
        return worker.name, worker.handle.evaluate.remote(version, engine)

    def stop(self) -> dict[str, Pending[None]]:
        """Let the workers end `run`."""
        return {worker.name: worker.handle.stop.remote() for worker in self._workers}

    def worker_deaths(self) -> dict[str, Pending[str]]:
        """Resolve, or raise RayActorError, when a worker's process is gone for good."""
        return {worker.name: worker.handle.wait_dead.remote() for worker in self._workers}

    def lost(self, name: str) -> Pending[None]:
        """Raises RayActorError when the process of an engine or a worker dies; Ray may start it
        again."""
        lost: Pending[None] = _once(self._handle(name).wait_lost).remote()
        return lost

    def noticed(self, name: str) -> Pending[None]:
        """Resolves when the process of an engine or a worker is told to end, by SIGTERM or by
        `notify`; raises RayActorError when it dies."""
        noticed: Pending[None] = _once(self._handle(name).wait_notice).remote()
        return noticed

    def notify(self, name: str) -> Pending[None]:
        notified: Pending[None] = _once(self._handle(name).notify).remote()
        return notified

    def draining_nodes(self) -> frozenset[str]:
        """Ids of the nodes that Ray is draining, for its autoscaler or after `ray drain-node`."""
        return frozenset(ray_state.get_draining_nodes())

    def node(self, name: str) -> Pending[str]:
        """Id of the node of an engine or a worker, once Ray has placed it."""
        node: Pending[str] = self._handle(name).node.remote()
        return node

    def _handle(self, name: str) -> Any:
        if name in self._engines:
            return self._engines[name].member.handle
        return next(worker.handle for worker in self._workers if worker.name == name)

    def drain_worker(self, name: str, limit_s: float) -> Pending[None]:
        """Ends once the worker has no group in flight; `restart_worker` then."""
        drained: Pending[None] = _once(self._handle(name).drain).remote(limit_s)
        return drained

    def restart_worker(self, name: str) -> None:
        """Its process ends at once, and Ray starts another where it has room."""
        ray.kill(self._handle(name), no_restart=False)

    # Engines --------------------------------------------------------------------------------------

    @property
    def worker_names(self) -> list[str]:
        return [worker.name for worker in self._workers]

    @property
    def engine_names(self) -> list[str]:
        return list(self._engines)

    def add_engine(self) -> tuple[str, Pending[None]]:
        """One more engine's name, and its start; Ray looks for its place first."""
        place = placement_group([self._bundle], strategy="PACK", lifetime=_lifetime(self._spec))
        return self._add_engine(place)

    def _add_engine(self, group: PlacementGroup) -> tuple[str, Pending[None]]:
        spec = self._spec
        index = next(i for i in itertools.count() if engine_name(i) not in self._engines)
        member = _create(
            EngineActor,
            name := engine_name(index),
            (spec, index),
            **_inside(group, 0),
            num_gpus=spec.config.engine.tp_size * spec.gpu_share if spec.uses_gpu else 0,
            max_restarts=spec.config.engine.max_restarts,
            max_task_retries=-1,
            lifetime=_lifetime(spec),
        )
        # Keep the reference: Ray does not repeat a call whose result is not referenced.
        keeping = member.handle.keep.remote()
        self._engines[name] = _Engine(member=member, group=group, keeping=keeping)
        return name, member.handle.wait_ready.remote()

    def given_up(self, engine: str) -> Pending[str]:
        """Resolves, or raises RayActorError, when an engine is gone for good."""
        return self._engines[engine].keeping

    def leave(self, engine: str, drain_s: float) -> Pending[None]:
        """Ends once the engine serves no request any more; `remove_engine` then."""
        left: Pending[None] = self._handle(engine).leave.remote(drain_s)
        return left

    def remove_engine(self, name: str) -> None:
        """Its process ends at once, and its place is free."""
        engine = self._engines.pop(name)
        ray.kill(engine.member.handle)
        remove_placement_group(engine.group)

    def hold(self, engine: str, version: int, wait_s: float, limit_s: float) -> Pending[bool]:
        """Whether this engine now serves `version` until `release`: see EngineLife.hold."""
        held: Pending[bool] = _once(self._handle(engine).hold).remote(version, wait_s, limit_s)
        return held

    def release(self, engine: str) -> Pending[None]:
        released: Pending[None] = _once(self._handle(engine).release).remote()
        return released

    # Receivers ------------------------------------------------------------------------------------

    def receiver_for(self, engine: str, node: str) -> dict[str, Pending[None]]:
        """Starts a receiver, by name, on the engine's node if that has none. It shares the first of
        the engine's GPUs."""
        if node in self._receivers:
            return {}
        # It shares the GPU of the engine beside it, so it must see that one.
        sees_gpus = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        member = _create(
            ReceiverActor,
            name := f"receiver-{len(self._receivers)}",
            (self._spec, name),
            sees_gpus,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_restarts=-1,
            max_task_retries=-1,
            lifetime=_lifetime(self._spec),
        )
        keeping = member.handle.keep.remote(self._handle(engine).gpu_ids.remote())
        self._receivers[node] = _Receiver(member=member, keeping=keeping)
        return {name: member.handle.wait_ready.remote()}

    def receivers_given_up(self) -> dict[str, Pending[str]]:
        """Resolve when a receiver is given up, and raise RayActorError when its node is gone."""
        return {receiver.member.name: receiver.keeping for receiver in self._receivers.values()}

    # The end --------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Stop everything; actors that do not stop within `timeout_s` are killed."""
        ends = [worker.handle.close.remote() for worker in self._workers]
        engines = [engine.member for engine in self._engines.values()]
        others = [*engines, *(receiver.member for receiver in self._receivers.values())]
        ends += [member.handle.stop.remote(timeout_s / 2) for member in others]
        ends += [scorer.handle.close.remote() for scorer in self._scorers]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for member in [*self._workers, *others, *self._scorers]:
            ray.kill(member.handle)
        for engine in self._engines.values():
            remove_placement_group(engine.group)


def clear_other_hosts(run_dir: Path, timeout_s: float) -> None:
    """Remove what killed engines and receivers left on other hosts that Ray can reach.

    What cannot be removed within `timeout_s` stays listed in the run's folder.
    """
    names = {*hosts_with_leftovers(run_dir)} - {socket.gethostname()}
    nodes = [
        node["NodeID"]
        for node in (ray.nodes() if names else [])
        if node["Alive"] and node["NodeManagerHostname"] in names
    ]
    clearing = [
        ray.remote(remove_leftovers)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(run_dir)
        for node in nodes
    ]
    if clearing:
        ray.wait(clearing, num_returns=len(clearing), timeout=timeout_s)


def _log_to_stderr() -> None:
    """Standard error goes to the process's log. Silences httpx, which logs every request."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def engine_name(index: int) -> str:
    return f"engine-{index}"


def engine_spec(spec: RolloutSpec, index: int, host: str) -> EngineSpec:
    """The spec of engine `index`. Its server logs to the same place as its actor."""
    name = engine_name(index)
    return EngineSpec(
        name=name,
        config=spec.config.engine,
        pause_mode=spec.weight_sync.pause_mode,
        model_path=spec.model_path,
        trust_remote_code=spec.trust_remote_code,
        host=host,
        log_path=Path(spec.run_dir) / "logs" / f"{name}.log",
        leftovers_path=list_path(Path(spec.run_dir), name),
        num_threads=spec.num_threads,
        uses_gpu=spec.uses_gpu,
        key=spec.engine_key,
        seed=(spec.seed + SEED_STRIDE * index) % 2**31,
        context_length=spec.config.max_prompt_tokens + spec.config.max_response_tokens,
    )


def _inside(group: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Options of an actor in a bundle, which reserves the cores."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def _create(
    actor: type,
    process: str,
    arguments: tuple[object, ...],
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> _Member:
    """`options` are Ray's."""
    variables = {PROCESS_VARIABLE: process, **(environment or {})}
    placed = ray.remote(actor).options(name=process, runtime_env={"env_vars": variables}, **options)
    return _Member(name=process, handle=placed.remote(*arguments))


def _once(method: Any) -> Any:
    """The method of an actor, for calls that fail when the actor dies, even if it comes back."""
    return method.options(max_task_retries=0)


def _worker_names(spec: RolloutSpec) -> list[str]:
    return [f"worker-{index}" for index in range(spec.config.num_workers)]


def _scorer_names(spec: RolloutSpec) -> list[str]:
    return [f"scorer-{index}" for index in range(spec.config.reward_actors)]


def _lifetime(spec: RolloutSpec) -> str | None:
    return "detached" if spec.outlives_controller else None


def _listen_host(host: str) -> str:
    """`host` if it is loopback, else the address of this actor's node."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return host if is_loopback else str(ray.util.get_node_ip_address())
