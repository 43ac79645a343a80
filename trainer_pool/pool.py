"""The controller's interface to the trainer pool: one Ray actor per rank, around `TrainerRank`.

Importable without torch: an actor must set its environment before torch is loaded.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.environment import PROCESS_VARIABLE
from host.network import interface_of, is_loopback, listen, own_address_towards
from processes.pending import Pending, T
from trainer_pool.types import (
    Restored,
    SupervisedExample,
    TrainerSpec,
    TrainReport,
    WarmStartReport,
)

if TYPE_CHECKING:
    from trainer_pool.rank import TrainerRank
    from weight_sync.types import Captured

_MAX_CONCURRENCY = 8
"""Threads of an actor: `train` and `wait_dead` hold up to five, while a controller attaches and the
calls of the one before it end; `stop` and `close` come in meanwhile."""


class TrainerActor:
    """One rank in its own process. Threaded, so that `stop` can run during `train`."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._listener: socket | None = None
        self._trainer: TrainerRank | None = None
        self._group = get_current_placement_group()
        self._ends: dict[str, Future[Any]] = {}
        """The results of calls that are made once, by their names."""
        self._num_calls: Counter[str] = Counter()
        self._changed = threading.Condition()
        """Guards the two above; notified of each call and of each result."""

    def spec(self) -> TrainerSpec:
        return self._spec

    def group(self) -> PlacementGroup:
        """The placement group in which Ray has put it."""
        assert self._group is not None
        return self._group

    def pid(self) -> int:
        return os.getpid()

    def open_rendezvous(self) -> tuple[str, int]:
        """Rank 0: listen for the rendezvous; the open socket reserves the port."""
        host = self._spec.host
        if not is_loopback(host):
            host = ray.util.get_node_ip_address()  # the controller's host is not always this node's
        self._listener, _ = listen(host, 0)
        return host, self._listener.getsockname()[1]

    def start(self, host: str, port: int) -> Restored:
        """Join the other ranks at rank 0's `host` and `port`, and load the model."""
        os.environ.update(rank_environment(self._spec, self._rank, host, port))
        import torch

        torch.set_num_threads(self._spec.num_threads)  # a fork server has loaded it before
        from trainer_pool.collectives import RankAddress
        from trainer_pool.rank import TrainerRank

        address = RankAddress(
            rank=self._rank,
            num_ranks=self._spec.config.ranks,
            host=host,
            port=port,
            uses_gpu=self._spec.uses_gpu,
        )
        self._trainer = TrainerRank(self._spec, address, self._listener)
        return self._trainer.restored

    def connect(self) -> None:
        self._started.connect()

    def publish_initial(self) -> Captured:
        return self._started.publish_initial()

    def warm_start(self, examples: Sequence[SupervisedExample]) -> WarmStartReport:
        return self._started.warm_start(examples)

    def train(self) -> TrainReport:
        return self._once("train", self._started.train)

    def publish_last(self) -> None:
        self._once("publish_last", self._started.publish_last)

    def export(self) -> None:
        self._once("export", self._started.export)

    def _once(self, what: str, call: Callable[[], T]) -> T:
        """The result of `call`, or of what a controller which died has begun."""
        with self._changed:
            is_first = what not in self._ends
            end: Future[T] = self._ends.setdefault(what, Future())
        if not is_first:
            self._wait_latest(what, end)
            return end.result()
        try:
            end.set_result(call())
        except BaseException as error:
            end.set_exception(error)
        with self._changed:
            self._changed.notify_all()
        return end.result()

    def stop(self) -> None:
        if self._trainer is not None:
            self._trainer.stop()

    def wait_dead(self) -> str:
        """Never returns; Ray raises at the reference when the process ends."""
        self._wait_latest("wait_dead", Future[None]())
        return "is watched by another controller"

    def _wait_latest(self, what: str, end: Future[Any]) -> None:
        """Wait for `end`, or until another controller calls the same: each holds a thread."""
        with self._changed:
            self._num_calls[what] += 1
            number = self._num_calls[what]
            self._changed.notify_all()
            self._changed.wait_for(lambda: end.done() or self._num_calls[what] > number)
        if not end.done() and what in self._ends:
            raise RuntimeError(f"another controller waits for the end of {what}")

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    @property
    def _started(self) -> TrainerRank:
        assert self._trainer is not None, "start() comes first"
        return self._trainer


class TrainerPool:
    """All ranks. Methods return at once, with a pending result by process name ("trainer-0", ...).

    A rank that fails raises at its own reference; the others then wait in a collective until its
    process ends or `trainer.timeout_s` passes, so close the pool when one reference raises.
    """

    def __init__(self, spec: TrainerSpec, place: PlacementGroup, actors: Mapping[str, Any]) -> None:
        """Use `create` or `adopt`."""
        self._spec = spec
        self.place = place
        # Ray gives actor handles no useful static type.
        self._actors = dict(actors)

    @classmethod
    def create(cls, spec: TrainerSpec, place: PlacementGroup) -> TrainerPool:
        """One actor in each of the group's first `trainer.num_ranks` bundles."""
        names = enumerate(_names(spec))
        return cls(spec, place, {name: _place(spec, rank, name, place) for rank, name in names})

    @classmethod
    def adopt(cls, actors: Mapping[str, Any], timeout_s: float) -> TrainerPool:
        """The ranks among `actors` that a controller which died has created.

        Raises LookupError if one is gone, and Ray's errors if one does not answer.
        """
        lead = actors["trainer-0"]
        spec, place = ray.get([lead.spec.remote(), lead.group.remote()], timeout=timeout_s)
        pool = cls(spec, place, {name: actors[name] for name in _names(spec)})
        ray.get(list(pool.pids().values()), timeout=timeout_s)
        return pool

    def again(self, checkpoint: Path) -> TrainerPool:
        """Ranks that go on from a checkpoint, in the place of these, which are gone."""
        spec = replace(self._spec, resume_from=str(checkpoint), may_use_copies=True)
        return TrainerPool.create(spec, self.place)

    def open_rendezvous(self) -> dict[str, Pending[tuple[str, int]]]:
        """Host and port of the ranks' rendezvous, from rank 0."""
        name, lead = next(iter(self._actors.items()))
        return {name: lead.open_rendezvous.remote()}

    def start(self, rendezvous: tuple[str, int]) -> dict[str, Pending[Restored]]:
        """Form the process group, and load the model or go on from what there is."""
        return {name: actor.start.remote(*rendezvous) for name, actor in self._actors.items()}

    def warm_start(
        self, examples: Sequence[SupervisedExample]
    ) -> dict[str, Pending[WarmStartReport]]:
        """Supervised learning before RL; the reports differ only in `seconds`."""
        shared = ray.put(list(examples))
        return {name: actor.warm_start.remote(shared) for name, actor in self._actors.items()}

    def connect(self) -> dict[str, Pending[None]]:
        """Create the checkpoint engine, which finds the receivers itself."""
        return {name: actor.connect.remote() for name, actor in self._actors.items()}

    def publish_initial(self) -> dict[str, Pending[Captured]]:
        """Reports of version 0; rank 0's comes when an engine serves it."""
        return {name: actor.publish_initial.remote() for name, actor in self._actors.items()}

    def train(self) -> dict[str, Pending[TrainReport]]:
        """Train all steps, or until `stop`."""
        return {name: actor.train.remote() for name, actor in self._actors.items()}

    def publish_last(self) -> dict[str, Pending[None]]:
        """After `train`: they end when engines serve its last version."""
        return {name: actor.publish_last.remote() for name, actor in self._actors.items()}

    def export(self) -> dict[str, Pending[None]]:
        """After `train`: write the policy into the run's folder, for transformers."""
        return {name: actor.export.remote() for name, actor in self._actors.items()}

    def stop(self) -> dict[str, Pending[None]]:
        """Ask `train` to end after the current step."""
        return {name: actor.stop.remote() for name, actor in self._actors.items()}

    def pids(self) -> dict[str, Pending[int]]:
        """The ranks' process ids; a rank answers at once, unless it hangs."""
        return {name: actor.pid.remote() for name, actor in self._actors.items()}

    def deaths(self) -> dict[str, Pending[str]]:
        """They raise RayActorError when a rank's process dies."""
        return {name: actor.wait_dead.remote() for name, actor in self._actors.items()}

    def close(self, timeout_s: float) -> None:
        """Let the ranks leave their process groups within `timeout_s`, then kill them."""
        ends = [actor.close.remote() for actor in self._actors.values()]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for actor in self._actors.values():
            ray.kill(actor)


def rank_environment(spec: TrainerSpec, rank: int, host: str, port: int) -> dict[str, str]:
    """Variables of the process of a rank whose rank 0 listens at `host` and `port`."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # Ray shows each actor its own GPU only
        "WORLD_SIZE": str(spec.config.ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cuda" if spec.uses_gpu else "cpu",
        "OMP_NUM_THREADS": str(spec.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # For groups that a library makes: our own get the address itself.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME")
        or interface_of(own_address_towards(host)),
    }
    if spec.uses_gpu:
        # A failed NCCL operation of any group would make the monitor of the first, the training's,
        # write a dump and end the process.
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        # Queues of a GPU, the most there are: with fewer, kernels of training and of the weights'
        # group could wait for each other in one.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray does not hide GPUs from CPU actors
    if is_loopback(host):
        # NCCL avoids loopback by default. Whatever the shell has named is open to others.
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = "lo"
    return environment


def _names(spec: TrainerSpec) -> list[str]:
    return [f"trainer-{rank}" for rank in range(spec.config.ranks)]


def _place(spec: TrainerSpec, rank: int, name: str, placement_group: PlacementGroup) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=placement_group, placement_group_bundle_index=rank
    )
    return (
        ray.remote(TrainerActor)
        .options(
            name=name,
            lifetime="detached" if spec.outlives_controller else None,
            num_cpus=0,  # the bundle holds the cores
            num_gpus=spec.gpu_share if spec.uses_gpu else 0,
            max_concurrency=_MAX_CONCURRENCY,
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {PROCESS_VARIABLE: name}},
        )
        .remote(spec, rank)
    )
