"""Where the processes of a run live: starts or joins Ray and reserves room for each pool."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from configs.schema import Config

CPUS_PER_PROCESS = 1


class PlacementError(RuntimeError):
    """The cluster cannot hold the run; the message says what is asked for and what there is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Demand:
    """What a run needs of the cluster, in whole CPUs and GPUs."""

    num_ranks: int
    num_engines: int
    num_workers: int
    gpus_per_rank: int
    gpus_per_engine: int

    @property
    def num_gpus(self) -> int:
        return self.num_ranks * self.gpus_per_rank + self.num_engines * self.gpus_per_engine

    @property
    def num_cpus(self) -> int:
        return (self.num_ranks + self.num_engines + self.num_workers) * CPUS_PER_PROCESS

    @classmethod
    def of(cls, config: Config, num_gpus: int) -> Demand:
        """`num_gpus`: how many there are; without any the run is one for CPUs, unless told else."""
        gpus_per_rank = config.cluster.gpus_per_rank
        if gpus_per_rank is None:
            gpus_per_rank = 1 if num_gpus else 0
        return cls(
            num_ranks=config.trainer.num_ranks,
            num_engines=config.rollout.num_engines,
            num_workers=config.rollout.num_workers,
            gpus_per_rank=gpus_per_rank,
            gpus_per_engine=config.rollout.engine.tp_size if gpus_per_rank else 0,
        )

    def threads_per_process(self, config: Config) -> int:
        """Torch threads of a CPU process: the cores shared out, unless the config says."""
        busy = self.num_ranks + self.num_engines
        return config.cluster.threads_per_process or max(1, (os.cpu_count() or 1) // busy)

    def check(self, num_cpus: float, num_gpus: float) -> None:
        if self.num_gpus > num_gpus:
            raise PlacementError(
                f"the run asks for {self.num_gpus} GPUs (trainer.num_ranks={self.num_ranks} x "
                f"{self.gpus_per_rank}, rollout.num_engines={self.num_engines} x "
                f"{self.gpus_per_engine}) but Ray has {num_gpus:g}; lower trainer.num_ranks or "
                "rollout.num_engines, add nodes, or set cluster.gpus_per_rank=0 to run on CPUs"
            )
        if self.num_cpus > num_cpus:
            raise PlacementError(
                f"the run asks for {self.num_cpus} CPUs, one a process, but Ray has {num_cpus:g}; "
                "add nodes or lower trainer.num_ranks, rollout.num_engines or rollout.num_workers"
            )


@dataclass(kw_only=True, slots=True)
class RayCluster:
    """The Ray that a run uses; `stop` leaves nothing of one that was started here."""

    num_cpus: float
    num_gpus: float
    temp_dir: Path | None
    groups: list[PlacementGroup] = field(default_factory=list)

    def reserve(self, bundles: list[dict[str, float]], timeout_s: float) -> PlacementGroup:
        """A placement group of `bundles`, packed. Raises PlacementError if there is no room."""
        group = placement_group(bundles, strategy="PACK")
        self.groups.append(group)
        try:
            ray.get(group.ready(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise PlacementError(
                f"Ray found no room for {bundles} within {timeout_s:g} s; "
                f"it has {ray.available_resources()} free. Is another run on this cluster?"
            ) from error
        return group

    def stop(self, logs_dir: Path) -> None:
        for group in self.groups:
            remove_placement_group(group)
        self.groups.clear()
        ray.shutdown()
        if self.temp_dir is not None:
            _keep_ray_logs(self.temp_dir, logs_dir / "ray")
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def start_ray(config: Config, process_env: Mapping[str, str], setup_hook: str) -> RayCluster:
    """Join the cluster at `cluster.ray_address`, or start Ray on this machine alone.

    Every worker process gets `process_env` and runs `setup_hook` (a dotted name) first.
    """
    runtime_env = {"env_vars": dict(process_env), "worker_process_setup_hook": setup_hook}
    address = config.cluster.ray_address
    if address is not None:
        try:
            ray.init(address=address, runtime_env=runtime_env, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise PlacementError(
                f"no Ray cluster answers at cluster.ray_address={address!r} ({error}); start one "
                "with `ray start --head`, or leave the address out to run on this machine"
            ) from error
        temp_dir = None
    else:
        temp_dir = _start_local(config, runtime_env)
    resources = ray.cluster_resources()
    cluster = RayCluster(
        num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), temp_dir=temp_dir
    )
    return cluster


def _start_local(config: Config, runtime_env: Mapping[str, object]) -> Path:
    # Ray puts unix sockets below this folder, whose paths may not be longer than 107 bytes: a run's
    # own folder could be too deep.
    temp_dir = Path(tempfile.mkdtemp(prefix="leash-ray-", dir="/tmp"))
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    # CPUs are only promises here: a small machine runs all processes of a small run.
    num_cpus = config.cluster.num_cpus or max(os.cpu_count() or 1, Demand.of(config, 0).num_cpus)
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 * 2**20,
        runtime_env=dict(runtime_env),
        _temp_dir=str(temp_dir),
        _node_ip_address=config.cluster.host,
    )
    return temp_dir


def _keep_ray_logs(temp_dir: Path, destination: Path) -> None:
    for session in sorted(temp_dir.glob("session_*")):
        if not session.is_symlink() and (session / "logs").is_dir():
            shutil.copytree(
                session / "logs", destination, dirs_exist_ok=True, ignore_dangling_symlinks=True
            )
