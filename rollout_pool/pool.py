"""The rollout pool as the controller sees it: Ray actors, thin shells round engines and workers."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.environment import PROCESS_VARIABLE
from rollout_pool.assemble import WorkerParts
from rollout_pool.commit import Committer
from rollout_pool.engine import EngineInfo, EngineSpec, SGLangEngine
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport
from weight_sync.ports import ActorPort
from weight_sync.types import Bucket, CommitReport, GroupSpec

SEED_STRIDE = 1_000_003
"""Between the sampling seeds of two engines, so that neighbouring runs share none either."""


class EngineActor:
    """One engine in a process of its own. Every method is a coroutine; none blocks the others."""

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        _log_to_stderr()
        self._engine = SGLangEngine(engine_spec(spec, index, _listen_host(spec.host)))
        self._committer: Committer | None = None
        self._is_stopping = False

    async def start(self) -> EngineInfo:
        info = await self._engine.start()
        self._committer = Committer(self._engine.client, self._engine.spec.pause_mode)
        return info

    async def join_group(self, spec: GroupSpec, rank_offset: int) -> None:
        await self._started.join_group(spec, rank_offset)

    async def pause(self) -> None:
        await self._started.pause()

    async def receive(self, bucket: Bucket, spec: GroupSpec, version: int) -> None:
        await self._started.receive(bucket, spec, version)

    async def resume(self, version: int) -> CommitReport:
        return await self._started.resume(version)

    async def wait_dead(self) -> str:
        """How the server ended. Does not return for one that was stopped."""
        died = await self._engine.wait_dead()
        if self._is_stopping:
            await asyncio.Event().wait()
        return f"died (exit code {died.exit_code})"

    async def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        await self._engine.stop(timeout_s)

    async def pid(self) -> int:
        return os.getpid()

    @property
    def _started(self) -> Committer:
        assert self._committer is not None, "start() comes first"
        return self._committer


class WorkerActor:
    """One rollout worker in a process of its own."""

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        _log_to_stderr()
        self._parts = WorkerParts(spec, index)

    async def start(self, engines: list[Awaitable[EngineInfo]]) -> None:
        """Get ready while the engines start (their references come in a list, so that Ray does not
        wait for them first), then connect to them.

        Raises ValueError for a bad task or model at once.
        """
        await self._parts.prepare()
        self._parts.connect(await asyncio.gather(*engines))

    async def run(self) -> WorkerReport:
        return await self._parts.worker.run()

    async def evaluate(self, version: int) -> EvalReport:
        return await self._parts.worker.evaluate(version)

    async def stop(self) -> None:
        """End `run`; evaluations are still answered."""
        self._parts.worker.stop()

    async def wait_dead(self) -> str:
        """Never returns: Ray raises at the reference when the process ends."""
        await asyncio.Event().wait()
        return "died"

    async def close(self) -> None:
        await self._parts.close()

    async def pid(self) -> int:
        return os.getpid()


@dataclass(kw_only=True, slots=True, frozen=True)
class _Member:
    """One actor. Ray gives handles no useful static type."""

    name: str
    handle: Any


class RolloutPool:
    """Engines and workers. Methods return Ray references by process name, at once."""

    def __init__(self, spec: RolloutSpec, engines: list[_Member], workers: list[_Member]) -> None:
        self._spec = spec
        self._engines = engines
        self._workers = workers

    @classmethod
    def create(
        cls, spec: RolloutSpec, engine_group: PlacementGroup, worker_group: PlacementGroup
    ) -> RolloutPool:
        """One actor in each bundle: `num_engines` and `num_workers` of them."""
        num_gpus = spec.config.engine.tp_size if spec.uses_gpu else 0
        return cls(
            spec,
            [
                _place(EngineActor, spec, engine_name(index), engine_group, index, num_gpus)
                for index in range(spec.config.num_engines)
            ],
            [
                _place(WorkerActor, spec, f"worker-{index}", worker_group, index, 0)
                for index in range(spec.config.num_workers)
            ],
        )

    def start(self) -> dict[str, Any]:
        """Engines load while workers prepare; a worker is started when it has met every engine."""
        engines = {engine.name: engine.handle.start.remote() for engine in self._engines}
        workers = {w.name: w.handle.start.remote([*engines.values()]) for w in self._workers}
        return {**engines, **workers}

    def ports(self) -> list[ActorPort]:
        """How the trainer reaches the engines, in the order in which they join a weight group."""
        tp_size = self._spec.config.engine.tp_size
        return [ActorPort(handle=e.handle, name=e.name, num_ranks=tp_size) for e in self._engines]

    def run(self) -> Mapping[str, Any]:
        """WorkerReport of each worker, after `stop`."""
        return {worker.name: worker.handle.run.remote() for worker in self._workers}

    def evaluate(self, version: int) -> tuple[str, Any]:
        """Who evaluates, and its EvalReport of `version` or later."""
        worker = self._workers[0]
        return worker.name, worker.handle.evaluate.remote(version)

    def stop(self) -> Mapping[str, Any]:
        """Tell the workers to end `run`."""
        return {worker.name: worker.handle.stop.remote() for worker in self._workers}

    def deaths(self) -> Mapping[str, Any]:
        """References that resolve, or raise RayActorError, when a process or its server dies."""
        return {m.name: m.handle.wait_dead.remote() for m in [*self._engines, *self._workers]}

    def close(self, timeout_s: float) -> None:
        """End everything; what does not end within `timeout_s` is killed with its actor."""
        ends = [worker.handle.close.remote() for worker in self._workers]
        ends += [engine.handle.stop.remote(timeout_s / 2) for engine in self._engines]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for member in [*self._workers, *self._engines]:
            ray.kill(member.handle)


def _log_to_stderr() -> None:
    """Which is the process's own log. httpx would tell of every request."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def engine_name(index: int) -> str:
    return f"engine-{index}"


def engine_spec(spec: RolloutSpec, index: int, host: str) -> EngineSpec:
    """What engine `index` of the pool is built from. Its server logs where its actor logs."""
    name = engine_name(index)
    return EngineSpec(
        name=name,
        config=spec.config.engine,
        pause_mode=spec.weight_sync.pause_mode,
        model_path=spec.model_path,
        trust_remote_code=spec.trust_remote_code,
        host=host,
        log_path=Path(spec.run_dir) / "logs" / f"{name}.log",
        leftovers_path=Path(spec.run_dir) / "leftovers" / name,
        num_threads=spec.num_threads,
        uses_gpu=spec.uses_gpu,
        key=spec.engine_key,
        seed=(spec.seed + SEED_STRIDE * index) % 2**31,
    )


def _place(
    actor: type, spec: RolloutSpec, name: str, group: PlacementGroup, index: int, num_gpus: int
) -> _Member:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    handle = (
        ray.remote(actor)
        .options(
            num_cpus=0,  # the bundle holds the cores
            num_gpus=num_gpus,
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {PROCESS_VARIABLE: name}},
        )
        .remote(spec, index)
    )
    return _Member(name=name, handle=handle)


def _listen_host(host: str) -> str:
    """`host` if that is loopback, else the address of the node that this actor is on."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return host if is_loopback else str(ray.util.get_node_ip_address())
