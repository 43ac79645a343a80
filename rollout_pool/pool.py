"""The rollout pool as the controller sees it: Ray actors, thin wrappers around plain classes.

    node 0:  engine-0  engine-1  ◄── receiver-0        worker-0  worker-1
    node 1:  engine-2  engine-3  ◄── receiver-1        (wherever there is room)

A receiver stages new weights for all engines of its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from buffer.run_state import RunState
from configs.environment import PROCESS_VARIABLE
from processes.leftovers import hosts_with_leftovers, list_path, remove_leftovers
from processes.pending import Pending
from rollout_pool.engines.engine import EngineInfo, EngineSpec, SGLangEngine
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.rewards.hosts import RayScorer, RemoteScoring, ScorerActor
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport
from rollout_pool.worker.build import WorkerParts

SEED_STRIDE = 1_000_003
"""Step between the sampling seeds of two engines; large, so that neighbouring runs share none."""
STOP_TIMEOUT_S = 60.0
"""Longest wait for a worker's `run` to end."""


class EngineActor:
    """One engine in a process of its own. Every method is a coroutine; none blocks the others."""

    def __init__(self, spec: RolloutSpec, index: int, receiver: str) -> None:
        _log_to_stderr()
        self._spec = spec
        self._receiver = receiver
        self._engine = SGLangEngine(engine_spec(spec, index, _listen_host(spec.host)))
        self._life: EngineLife | None = None
        self._state: RunState | None = None

    async def start(self) -> EngineInfo:
        """Raises EngineError if the server does not start, ValueError if it can't commit as set."""
        spec = self._spec
        self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer)
        self._life = EngineLife(
            self._engine,
            config=spec.weight_sync,
            receiver=self._receiver,
            key=spec.weights_key,
            state=self._state,
        )
        return await self._life.start()

    async def gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave this engine, as CUDA_VISIBLE_DEVICES names them."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    async def wait_dead(self) -> str:
        """Why the engine was given up. Does not return across restarts, nor after `stop`."""
        return await self._started.wait_given_up()

    async def hold(self, version: int, wait_s: float, limit_s: float) -> bool:
        return await self._started.hold(version, wait_s, limit_s)

    async def release(self) -> None:
        await self._started.release()

    async def stop(self, timeout_s: float) -> None:
        if self._life is not None:
            await self._life.stop(timeout_s)
        if self._state is not None:
            await self._state.close()

    async def pid(self) -> int:
        return os.getpid()

    @property
    def _started(self) -> EngineLife:
        assert self._life is not None, "start() comes first"
        return self._life


class ReceiverActor(ReceiverKeeper):
    """The receiver of one node. Its death never ends the run: `keep` runs again."""

    def __init__(self, spec: RolloutSpec, name: str, token: str) -> None:
        _log_to_stderr()
        super().__init__(spec, name, token, _listen_host(spec.host))

    async def keep(self, gpu_ids: list[str]) -> str:
        """`run`, which Ray calls again after it has restarted this actor. `gpu_ids`: of the node's
        first engine; the receiver shares the first."""
        if gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids[0]
        return await self.run()

    async def pid(self) -> int:
        return os.getpid()


class WorkerActor:
    """One rollout worker in a process of its own.

    When its process dies, Ray restarts the actor and repeats the calls that were not answered. The
    first of them prepares the new worker; `run` reclaims the groups of the one before and goes on.
    """

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        _log_to_stderr()
        # Looked up by name: with a handle among its arguments Ray could not restart this actor
        # once the driver's object store has forgotten it.
        names = [_scorer_name(spec, number) for number in range(spec.config.reward_actors)]
        scorers = [RayScorer(ray.get_actor(name)) for name in names]
        scoring = RemoteScoring(scorers) if scorers else None
        self._parts = WorkerParts(spec, index, scoring=scoring, host=_listen_host(spec.host))
        self._getting_ready: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._has_ended = asyncio.Event()
        self._is_closed = asyncio.Event()

    async def start(self, engines: list[Awaitable[EngineInfo]]) -> None:
        """Prepare while the engines start, then connect to them. The references come in a list, so
        that Ray does not wait for them first. Raises ValueError for a bad task or model at once."""
        if self._getting_ready is None:
            self._getting_ready = asyncio.create_task(self._get_ready(engines))
        await asyncio.shield(self._getting_ready)

    async def _get_ready(self, engines: list[Awaitable[EngineInfo]]) -> None:
        await self._parts.prepare()
        await self._parts.connect(await asyncio.gather(*engines))

    async def run(self, engines: list[Awaitable[EngineInfo]]) -> WorkerReport:
        await self.start(engines)
        if self._is_stopping:
            self._parts.worker.stop()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            await self._parts.note_restart()
        try:
            return await self._parts.worker.run()
        finally:
            self._has_ended.set()

    async def evaluate(
        self, engines: list[Awaitable[EngineInfo]], version: int, engine: str | None
    ) -> EvalReport:
        await self.start(engines)
        return await self._parts.worker.evaluate(version, engine)

    async def stop(self) -> None:
        """End `run`; evaluations are still answered.

        Returns only after `run` has ended: if the process dies before, Ray repeats the call.
        """
        self._is_stopping = True
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

    async def pid(self) -> int:
        return os.getpid()


@dataclass(kw_only=True, slots=True, frozen=True)
class _Member:
    """One actor. Ray gives handles no useful static type."""

    name: str
    handle: Any


@dataclass(eq=False)
class RolloutPool:
    """Engines and workers. Methods return pending results, by process name, at once."""

    _engines: list[_Member]
    _receivers: dict[int, _Member]
    """By the index of the first engine on their node."""
    _workers: list[_Member]
    _scorers: list[_Member]
    _keeping: dict[str, Pending[str]] = field(default_factory=dict, init=False)
    _infos: list[Pending[EngineInfo]] = field(default_factory=list, init=False)
    """References to each engine's EngineInfo; a restarted worker needs them again."""

    @classmethod
    def create(
        cls, spec: RolloutSpec, engine_group: PlacementGroup, worker_group: PlacementGroup
    ) -> RolloutPool:
        """An engine in each bundle of one group and a worker in each of the other, a receiver
        beside the first engine of each node, and scorers, if any, spread over all nodes."""
        num_gpus = spec.config.engine.tp_size * spec.gpu_share if spec.uses_gpu else 0
        nodes = ray.util.placement_group_table(engine_group)["bundles_to_node_id"]
        first = first_on_node([nodes[index] for index in range(spec.config.num_engines)])
        names = {engine: f"receiver-{place}" for place, engine in enumerate(sorted(set(first)))}
        token = secrets.token_hex(4)
        engines = [
            _create(
                EngineActor,
                engine_name(index),
                (spec, index, names[first[index]]),
                **_inside(engine_group, index),
                num_gpus=num_gpus,
            )
            for index in range(spec.config.num_engines)
        ]
        # It shares the GPU of the engine beside it, so it must see that one.
        sees_gpus = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        receivers = {
            engine: _create(
                ReceiverActor,
                name,
                (spec, name, token),
                sees_gpus,
                **_inside(engine_group, engine),
                max_restarts=-1,
                max_task_retries=-1,
            )
            for engine, name in names.items()
        }
        workers = [
            _create(
                WorkerActor,
                f"worker-{index}",
                (spec, index),
                **_inside(worker_group, index),
                max_restarts=spec.config.max_worker_restarts,
                max_task_retries=-1,
            )
            for index in range(spec.config.num_workers)
        ]
        scorers = [
            _create(
                ScorerActor,
                f"scorer-{index}",
                (
                    spec.task,
                    spec.config.reward_processes,
                    spec.config.reward_timeout_s,
                    str(Path(spec.run_dir) / "logs" / f"rewards-{index}.log"),
                ),
                name=_scorer_name(spec, index),
                num_cpus=1,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
            )
            for index in range(spec.config.reward_actors)
        ]
        return cls(engines, receivers, workers, scorers)

    def start(self) -> dict[str, Pending[Any]]:
        """Engines load while workers prepare; a worker has started once it reaches every engine."""
        engines = {engine.name: engine.handle.start.remote() for engine in self._engines}
        self._infos = [*engines.values()]
        workers = {w.name: w.handle.start.remote(self._infos) for w in self._workers}
        scorers = {s.name: s.handle.start.remote() for s in self._scorers}
        return {**engines, **self._start_receivers(), **scorers, **workers}

    def _start_receivers(self) -> dict[str, Pending[None]]:
        # Keep the references: Ray does not retry a task whose result is not referenced.
        self._keeping = {
            receiver.name: receiver.handle.keep.remote(
                self._engines[engine].handle.gpu_ids.remote()
            )
            for engine, receiver in self._receivers.items()
        }
        return {r.name: r.handle.wait_ready.remote() for r in self._receivers.values()}

    def run(self) -> dict[str, Pending[WorkerReport]]:
        """Reports come after `stop`."""
        return {worker.name: worker.handle.run.remote(self._infos) for worker in self._workers}

    def evaluate(self, version: int, engine: str | None = None) -> tuple[str, Pending[EvalReport]]:
        """The evaluating worker's name and its report on `version` or later; if an engine is held
        at `version`, pass it as `engine`."""
        worker = self._workers[0]
        return worker.name, worker.handle.evaluate.remote(self._infos, version, engine)

    @property
    def engine_names(self) -> list[str]:
        return [engine.name for engine in self._engines]

    def hold(self, engine: str, version: int, wait_s: float, limit_s: float) -> Pending[bool]:
        """Whether this engine now serves `version` until `release`: see EngineLife.hold."""
        held: Pending[bool] = self._engine(engine).hold.remote(version, wait_s, limit_s)
        return held

    def release(self, engine: str) -> Pending[None]:
        released: Pending[None] = self._engine(engine).release.remote()
        return released

    def _engine(self, name: str) -> Any:
        return next(engine.handle for engine in self._engines if engine.name == name)

    def stop(self) -> dict[str, Pending[None]]:
        """Let the workers end `run`."""
        return {worker.name: worker.handle.stop.remote() for worker in self._workers}

    def deaths(self) -> dict[str, Pending[str]]:
        """Resolve, or raise RayActorError, when a process is gone for good."""
        members = [*self._engines, *self._workers]
        return {**{m.name: m.handle.wait_dead.remote() for m in members}, **self._keeping}

    def close(self, timeout_s: float) -> None:
        """Stop everything; actors that do not stop within `timeout_s` are killed."""
        ends = [worker.handle.close.remote() for worker in self._workers]
        others = [*self._engines, *self._receivers.values()]
        ends += [member.handle.stop.remote(timeout_s / 2) for member in others]
        ends += [scorer.handle.close.remote() for scorer in self._scorers]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for member in [*self._workers, *others, *self._scorers]:
            ray.kill(member.handle)


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
    )


def first_on_node(nodes: Sequence[str]) -> list[int]:
    """For each engine the index of the first engine on its node; `nodes` by engine."""
    return [nodes.index(node) for node in nodes]


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
    placed = ray.remote(actor).options(runtime_env={"env_vars": variables}, **options)
    return _Member(name=process, handle=placed.remote(*arguments))


def _scorer_name(spec: RolloutSpec, index: int) -> str:
    return f"{spec.run}/scorer-{index}"


def _listen_host(host: str) -> str:
    """`host` if it is loopback, else the address of this actor's node."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return host if is_loopback else str(ray.util.get_node_ip_address())
