"""The rollout pool as the controller sees it: Ray actors, thin shells round plain classes.

    node 0:  engine-0  engine-1  ◄── receiver-0        worker-0  worker-1
    node 1:  engine-2  engine-3  ◄── receiver-1        (wherever there is room)

A receiver stages new weights for all engines of its node.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from buffer.run_state import RunState
from configs.environment import PROCESS_VARIABLE
from rollout_pool.assemble import WorkerParts
from rollout_pool.engines.engine import EngineInfo, EngineSpec, SGLangEngine
from rollout_pool.engines.engine_life import EngineLife
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport

SEED_STRIDE = 1_000_003
"""Between the sampling seeds of two engines, so that neighbouring runs share none either."""


class EngineActor:
    """One engine in a process of its own. Every method is a coroutine; none blocks the others."""

    def __init__(self, spec: RolloutSpec, index: int, receiver: str) -> None:
        """`receiver` is the one of this engine's node."""
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
        """Why the engine is given up. Does not return while it is started again, nor if stopped."""
        assert self._life is not None, "start() comes first"
        return await self._life.wait_given_up()

    async def stop(self, timeout_s: float) -> None:
        if self._life is not None:
            await self._life.stop(timeout_s)
        if self._state is not None:
            await self._state.close()

    async def pid(self) -> int:
        return os.getpid()


class ReceiverActor:
    """The receiver of one node. Its death never ends the run: `keep` begins again."""

    def __init__(self, spec: RolloutSpec, name: str, token: str) -> None:
        """`token` keeps what it stages apart from what any other run stages."""
        _log_to_stderr()
        self._spec = spec
        self._name = name
        self._token = token
        self._keeper: asyncio.Future[ReceiverKeeper] | None = None
        self._state: RunState | None = None

    async def keep(self, gpu_ids: list[str]) -> str:
        """Runs the receiver until `stop`; returns why it is kept no more.

        Where Ray starts this actor anew, it calls this again. `gpu_ids`: of the node's first
        engine, of which the receiver shares the first.
        """
        if gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids[0]
        spec = self._spec
        try:
            self._state = await RunState.connect(spec.redis_url, spec.run, spec.buffer)
            host = _listen_host(spec.host)
            keeper = ReceiverKeeper(spec, self._name, self._token, host, self._state)
        except Exception as error:
            self._kept.set_exception(error)  # `start` waits for it
            return f"was given up: {error}"
        self._kept.set_result(keeper)
        return await keeper.run()

    async def start(self) -> None:
        """Until the run knows where the receiver is. Raises WeightSyncError if it can't start."""
        await (await asyncio.shield(self._kept)).wait_ready()

    async def stop(self, timeout_s: float) -> None:
        if self._kept.done():
            await self._kept.result().stop(timeout_s)
        if self._state is not None:
            await self._state.close()

    async def pid(self) -> int:
        return os.getpid()

    @property
    def _kept(self) -> asyncio.Future[ReceiverKeeper]:
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_future()
        return self._keeper


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

    def __init__(
        self, engines: list[_Member], receivers: dict[int, _Member], workers: list[_Member]
    ) -> None:
        """`receivers` by the index of the first engine on their node."""
        self._engines = engines
        self._receivers = receivers
        self._workers = workers
        self._keeping: dict[str, Any] = {}

    @classmethod
    def create(
        cls, spec: RolloutSpec, engine_group: PlacementGroup, worker_group: PlacementGroup
    ) -> RolloutPool:
        """An engine in each bundle of one group and a worker in each of the other, and a receiver
        beside the first engine of each node."""
        num_gpus = spec.config.engine.tp_size if spec.uses_gpu else 0
        nodes = ray.util.placement_group_table(engine_group)["bundles_to_node_id"]
        first = first_on_node([nodes[index] for index in range(spec.config.num_engines)])
        names = {engine: f"receiver-{place}" for place, engine in enumerate(sorted(set(first)))}
        token = secrets.token_hex(4)
        return cls(
            [
                _place(
                    EngineActor,
                    engine_name(index),
                    (spec, index, names[first[index]]),
                    engine_group,
                    index,
                    num_gpus=num_gpus,
                )
                for index in range(spec.config.num_engines)
            ],
            {
                engine: _place(
                    ReceiverActor,
                    name,
                    (spec, name, token),
                    engine_group,
                    engine,
                    environment={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
                    max_restarts=-1,
                    max_task_retries=-1,
                )
                for engine, name in names.items()
            },
            [
                _place(WorkerActor, f"worker-{index}", (spec, index), worker_group, index)
                for index in range(spec.config.num_workers)
            ],
        )

    def start(self) -> dict[str, Any]:
        """Engines load while workers prepare; a worker is started when it has met every engine."""
        engines = {engine.name: engine.handle.start.remote() for engine in self._engines}
        workers = {w.name: w.handle.start.remote([*engines.values()]) for w in self._workers}
        return {**engines, **self._start_receivers(), **workers}

    def _start_receivers(self) -> dict[str, Any]:
        # The references are kept: a task whose result nobody wants is not started again.
        self._keeping = {
            receiver.name: receiver.handle.keep.remote(
                self._engines[engine].handle.gpu_ids.remote()
            )
            for engine, receiver in self._receivers.items()
        }
        return {r.name: r.handle.start.remote() for r in self._receivers.values()}

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
        """References that resolve, or raise RayActorError, when a process is gone for good."""
        members = [*self._engines, *self._workers]
        return {**{m.name: m.handle.wait_dead.remote() for m in members}, **self._keeping}

    def close(self, timeout_s: float) -> None:
        """End everything; what does not end within `timeout_s` is killed with its actor."""
        ends = [worker.handle.close.remote() for worker in self._workers]
        others = [*self._engines, *self._receivers.values()]
        ends += [member.handle.stop.remote(timeout_s / 2) for member in others]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for member in [*self._workers, *others]:
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


def first_on_node(nodes: Sequence[str]) -> list[int]:
    """For each engine the first engine on its node, both by index; `nodes` by engine."""
    return [nodes.index(node) for node in nodes]


def _place(
    actor: type,
    name: str,
    arguments: tuple[object, ...],
    group: PlacementGroup,
    bundle: int,
    *,
    num_gpus: int = 0,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    max_task_retries: int = 0,
) -> _Member:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    handle = (
        ray.remote(actor)
        .options(
            num_cpus=0,  # the bundle holds the cores
            num_gpus=num_gpus,
            max_restarts=max_restarts,
            max_task_retries=max_task_retries,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {PROCESS_VARIABLE: name, **(environment or {})}},
        )
        .remote(*arguments)
    )
    return _Member(name=name, handle=handle)


def _listen_host(host: str) -> str:
    """`host` if that is loopback, else the address of the node that this actor is on."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return host if is_loopback else str(ray.util.get_node_ip_address())
