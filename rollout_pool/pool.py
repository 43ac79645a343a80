"""The rollout pool as the controller sees it: it creates the actors, and calls them by name.

    node 0:  engine-0  engine-1  ◄── receiver-0        worker-0  worker-1
    node 1:  engine-2  engine-3  ◄── receiver-1        (wherever there is room)
    node 2:  teacher                                   keeps its weights

A receiver stages new weights for all engines of its node.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray._private.state import state as ray_state
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from buffer.probes import Agreement
from configs.environment import PROCESS_VARIABLE
from processes.leftovers import hosts_with_leftovers, remove_leftovers
from processes.pending import Pending
from rollout_pool.actors.engine import EngineActor, TeacherActor
from rollout_pool.actors.names import TEACHER, TEACHER_KEY, engine_name, scorer_names, worker_names
from rollout_pool.actors.receiver import ReceiverActor
from rollout_pool.actors.worker import WorkerActor
from rollout_pool.rewards.scorer_actors import ScorerActor
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport


@dataclass(kw_only=True, slots=True, frozen=True)
class _Kept:
    """An actor that keeps a process running; on its own, a receiver."""

    name: str
    handle: Any
    """Ray gives handles no useful static type."""
    keeping: Pending[str]
    """Ray does not repeat a call whose result is not referenced."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Placed(_Kept):
    """An engine, or the teacher."""

    group: PlacementGroup
    """Its place, which holds no other process."""


class HasLeft(RuntimeError):
    """No process of this name is in the pool any more."""


class RolloutPool:
    """Engines and workers. Methods return pending results, by process name, at once.

        pool = RolloutPool.create(spec, engine_groups, worker_group)
        ray.get([*pool.start().values()])       engines serve, workers are prepared
        reports = pool.run()                    the workers fill the buffer
        ray.get([*pool.stop().values()])        each ends its run, and reports
        pool.close(timeout_s=30)

    Engines may join and leave while it runs, and Ray may start a lost one again on another node;
    `receiver_for` sees to it that each node with an engine has a receiver.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        engine_groups: Sequence[PlacementGroup],
        workers: Mapping[str, Any],
        scorers: Mapping[str, Any],
        teacher: _Placed | None = None,
    ) -> None:
        """Use `create` or `adopt`."""
        self._spec = spec
        self._bundle: dict[str, float] = engine_groups[0].bundle_specs[0]
        self._groups = list(engine_groups)
        self._engines: dict[str, _Placed] = {}
        self._receivers: dict[str, _Kept] = {}
        """By the node's id."""
        self._workers = workers
        self._scorers = scorers
        self._teachers = [] if teacher is None else [teacher]

    @classmethod
    def create(
        cls,
        spec: RolloutSpec,
        engine_groups: Sequence[PlacementGroup],
        worker_group: PlacementGroup,
        teacher: _Placed | None = None,
    ) -> RolloutPool:
        """An engine in each of `engine_groups`, a worker in each bundle of the other, and scorers,
        if any, spread over all nodes. They are created, but do nothing before `start`. `teacher`
        serves already."""
        lifetime = _lifetime(spec)
        environment = {} if teacher is None else {TEACHER_KEY: spec.engine_key}
        workers = {
            name: _create(
                WorkerActor,
                name,
                (spec, index),
                environment,
                **_inside(worker_group, index),
                max_restarts=spec.config.max_worker_restarts,
                max_task_retries=-1,
                lifetime=lifetime,
            )
            for index, name in enumerate(worker_names(spec))
        }
        scorers = {
            name: _create(
                ScorerActor,
                name,
                (
                    spec.task,
                    spec.config.reward_processes,
                    spec.config.reward_timeout_s,
                    str(Path(spec.run_dir) / "logs" / f"rewards-{index}.log"),
                    spec.data,
                ),
                environment,
                num_cpus=1,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
                lifetime=lifetime,
            )
            for index, name in enumerate(scorer_names(spec))
        }
        return cls(spec, engine_groups, workers, scorers, teacher)

    @classmethod
    def adopt(
        cls, actors: Mapping[str, Any], timeout_s: float, *, has_teacher: bool = False
    ) -> RolloutPool:
        """The pool that a controller which died has created, from the `actors` that go on.

        Raises LookupError if one is gone, and Ray's errors if one does not reply.
        """
        spec: RolloutSpec = ray.get(actors["worker-0"].spec.remote(), timeout=timeout_s)
        workers = {name: actors[name] for name in worker_names(spec)}
        scorers = {name: actors[name] for name in scorer_names(spec)}
        engines, receivers = (
            {name: actors[name] for name in sorted(actors) if name.startswith(kind)}
            for kind in ("engine-", "receiver-")
        )
        groups = ray.get([e.group.remote() for e in engines.values()], timeout=timeout_s)
        nodes = ray.get([r.node.remote() for r in receivers.values()], timeout=timeout_s)
        if not engines or not receivers:
            raise LookupError("no engine, or no receiver")
        ray.get([worker.pid.remote() for worker in workers.values()], timeout=timeout_s)
        teacher = None
        if has_teacher:
            handle = actors[TEACHER]
            place = ray.get(handle.group.remote(), timeout=timeout_s)
            teacher = _placed(TEACHER, handle, place)
        pool = cls(spec, groups, workers, scorers, teacher)
        for (name, handle), group in zip(engines.items(), groups, strict=True):
            pool._engines[name] = _placed(name, handle, group)
        first = next(iter(engines.values()))
        for (name, handle), node in zip(receivers.items(), nodes, strict=True):
            keeping = handle.keep.remote(first.gpu_ids.remote())
            pool._receivers[node] = _Kept(name=name, handle=handle, keeping=keeping)
        return pool

    def worker_group(self, timeout_s: float) -> PlacementGroup:
        first = next(iter(self._workers.values()))
        group: PlacementGroup = ray.get(first.group.remote(), timeout=timeout_s)
        return group

    def start(self) -> dict[str, Pending[Any]]:
        """Engines load while workers prepare and receivers start."""
        engines = dict(self._add_engine(group) for group in self._groups)
        others = {**self._scorers, **self._workers}
        started = {name: actor.start.remote() for name, actor in others.items()}
        receivers: dict[str, Pending[None]] = {}
        for name, engine in self._engines.items():
            (node,) = placement_group_table(engine.group)["bundles_to_node_id"].values()
            receivers |= self.receiver_for(name, node)
        return {**engines, **receivers, **started}

    def run(self) -> dict[str, Pending[WorkerReport]]:
        """Reports come after `stop`."""
        return {name: worker.run.remote() for name, worker in self._workers.items()}

    def evaluate(self, version: int, engine: str | None = None) -> tuple[str, Pending[EvalReport]]:
        """The evaluating worker's name and its report on `version` or later; if an engine is held
        at `version`, pass it as `engine`."""
        name, worker = next(iter(self._workers.items()))
        return name, worker.evaluate.remote(version, engine)

    def stop(self) -> dict[str, Pending[None]]:
        """Let the workers end `run`."""
        return {name: worker.stop.remote() for name, worker in self._workers.items()}

    def compare(self) -> dict[str, Pending[Agreement]]:
        """How the engines agree with the trainer at its first version, before any step."""
        return {name: self._handle(name).compare.remote() for name in self._engines}

    def deaths(self) -> dict[str, Pending[str]]:
        """Resolve, or raise RayActorError, when a process is gone for good without which the run
        cannot go on: a worker's, or the teacher's."""
        ends = {name: worker.wait_dead.remote() for name, worker in self._workers.items()}
        return ends | {teacher.name: teacher.keeping for teacher in self._teachers}

    def lost(self, name: str) -> Pending[None]:
        """Raises RayActorError when the process of an engine or a worker dies, restarted or not."""
        return cast("Pending[None]", _once(self._handle(name).wait_lost).remote())

    def noticed(self, name: str) -> Pending[None]:
        """Resolves when the process of an engine or a worker is told to end, by SIGTERM or by
        `notify`; raises RayActorError when it dies."""
        return cast("Pending[None]", _once(self._handle(name).wait_notice).remote())

    def notify(self, name: str) -> Pending[None]:
        return cast("Pending[None]", _once(self._handle(name).notify).remote())

    def draining_nodes(self) -> frozenset[str]:
        """Ids of the nodes that Ray is draining, for its autoscaler or after `ray drain-node`."""
        return frozenset(ray_state.get_draining_nodes())

    def node(self, name: str) -> Pending[str]:
        """Id of the node of an engine or a worker, once Ray has placed it."""
        return cast("Pending[str]", self._handle(name).node.remote())

    def _handle(self, name: str) -> Any:
        if name in self._engines:
            return self._engines[name].handle
        if name in self._workers:
            return self._workers[name]
        raise HasLeft(f"{name} has left the run")

    def drain_worker(self, name: str, limit_s: float) -> Pending[None]:
        """Ends once the worker has no group in flight; `restart` then."""
        return cast("Pending[None]", _once(self._handle(name).drain).remote(limit_s))

    def restart(self, name: str) -> None:
        """The process of an engine or worker ends at once; Ray starts another where it can."""
        ray.kill(self._handle(name), no_restart=False)

    # Engines --------------------------------------------------------------------------------------

    @property
    def worker_names(self) -> list[str]:
        return list(self._workers)

    @property
    def engine_names(self) -> list[str]:
        return list(self._engines)

    def count_places(self) -> int:
        """How many more engines Ray has room for now."""
        # A node without a resource has none of it.
        return sum(
            min(int(free.get(name, 0.0) // need) for name, need in self._bundle.items() if need)
            for free in ray_state.available_resources_per_node().values()
        )

    def add_engine(self) -> tuple[str, Pending[None]]:
        """One more engine's name, and its start; Ray looks for its place first."""
        place = placement_group([self._bundle], strategy="PACK", lifetime=_lifetime(self._spec))
        return self._add_engine(place)

    def _add_engine(self, group: PlacementGroup) -> tuple[str, Pending[None]]:
        spec = self._spec
        index = next(i for i in itertools.count() if engine_name(i) not in self._engines)
        handle = _create(
            EngineActor,
            name := engine_name(index),
            (spec, index),
            **_inside(group, 0),
            num_gpus=_engine_gpus(spec),
            max_restarts=spec.config.engine.max_restarts,
            max_task_retries=-1,
            lifetime=_lifetime(spec),
        )
        self._engines[name] = _placed(name, handle, group)
        return name, handle.wait_ready.remote()

    def given_up(self, engine: str) -> Pending[str]:
        """Resolves, or raises RayActorError, when an engine is gone for good."""
        return self._engines[engine].keeping

    def leave(self, engine: str, drain_s: float) -> Pending[None]:
        """Ends once the engine serves no request any more; `remove_engine` then."""
        return cast("Pending[None]", self._handle(engine).leave.remote(drain_s))

    def remove_engine(self, name: str) -> None:
        """Its process ends at once, and its place is free."""
        engine = self._engines.pop(name)
        ray.kill(engine.handle)
        remove_placement_group(engine.group)

    def hold(self, engine: str, version: int, wait_s: float, limit_s: float) -> Pending[bool]:
        """Holds this engine at `version` or a later one until `release`: see EngineLife.hold."""
        return cast(
            "Pending[bool]", _once(self._handle(engine).hold).remote(version, wait_s, limit_s)
        )

    def release(self, engine: str) -> Pending[None]:
        return cast("Pending[None]", _once(self._handle(engine).release).remote())

    # Receivers ------------------------------------------------------------------------------------

    def receiver_for(self, engine: str, node: str) -> dict[str, Pending[None]]:
        """Starts a receiver, by name, on the engine's node if that has none."""
        if node in self._receivers:
            return {}
        # It shares the first GPU of the engine beside it, so it must see that one.
        sees_gpus = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        handle = _create(
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
        keeping = handle.keep.remote(self._handle(engine).gpu_ids.remote())
        self._receivers[node] = _Kept(name=name, handle=handle, keeping=keeping)
        return {name: handle.wait_ready.remote()}

    def receivers_given_up(self) -> dict[str, Pending[str]]:
        """Resolve when a receiver is given up, and raise RayActorError when its node is gone."""
        return {receiver.name: receiver.keeping for receiver in self._receivers.values()}

    # The end --------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Stop everything; actors that do not stop within `timeout_s` are killed."""
        placed = [*self._engines.values(), *self._teachers]
        stopped = [kept.handle for kept in (*placed, *self._receivers.values())]
        closed = [*self._workers.values(), *self._scorers.values()]
        ends = [actor.close.remote() for actor in closed]
        ends += [actor.stop.remote(timeout_s / 2) for actor in stopped]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for actor in (*closed, *stopped):
            ray.kill(actor)
        for member in placed:
            remove_placement_group(member.group)


def place_teacher(
    spec: RolloutSpec, group: PlacementGroup, setting: str, model_path: str
) -> tuple[_Placed, Pending[str]]:
    """An engine that serves the model at `model_path` as long as the run lives, for the teacher of
    `setting`; and its URL, once it is ready."""
    handle = _create(
        TeacherActor,
        TEACHER,
        (spec, setting, model_path),
        **_inside(group, 0),
        num_gpus=_engine_gpus(spec),
        lifetime=_lifetime(spec),
    )
    return _placed(TEACHER, handle, group), handle.url.remote()


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


def _placed(name: str, handle: Any, group: PlacementGroup) -> _Placed:
    return _Placed(name=name, handle=handle, keeping=handle.keep.remote(), group=group)


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
) -> Any:
    """The handle of a new actor. `options` are Ray's."""
    variables = {PROCESS_VARIABLE: process, **(environment or {})}
    placed = ray.remote(actor).options(name=process, runtime_env={"env_vars": variables}, **options)
    return placed.remote(*arguments)


def _once(method: Any) -> Any:
    """The method of an actor, for calls that fail when the actor dies, even if it comes back."""
    return method.options(max_task_retries=0)


def _engine_gpus(spec: RolloutSpec) -> float:
    return spec.config.engine.tp_size * spec.gpu_share if spec.uses_gpu else 0


def _lifetime(spec: RolloutSpec) -> str | None:
    return "detached" if spec.outlives_controller else None
