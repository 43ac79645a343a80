"""Where the processes of a run live: starts or joins Ray and reserves room for each pool."""

from __future__ import annotations

import logging
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


def num_cpus_needed(config: Config) -> int:
    """One for each process that Ray places."""
    num_processes = (
        config.trainer.num_ranks
        + config.rollout.num_engines
        + config.rollout.num_workers
        + config.rollout.reward_actors
    )
    return num_processes * CPUS_PER_PROCESS


@dataclass(kw_only=True, slots=True)
class RayCluster:
    """The Ray that a run uses; `stop` leaves nothing of one that was started here."""

    num_cpus: float
    num_gpus: float
    temp_dir: Path | None
    groups: list[PlacementGroup] = field(default_factory=list)

    def check_cpus(self, num_cpus: int) -> None:
        """Raises PlacementError if the cluster has fewer in all, so that waiting would be vain."""
        if num_cpus > self.num_cpus:
            raise PlacementError(
                f"the run asks for {num_cpus} CPUs, {CPUS_PER_PROCESS} a process, but Ray has "
                f"{self.num_cpus:g}; add nodes, raise cluster.num_cpus, or lower "
                "trainer.num_ranks, rollout.num_engines, rollout.num_workers or "
                "rollout.reward_actors"
            )

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
            ray.init(
                address=address,
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise PlacementError(
                f"no Ray cluster answers at cluster.ray_address={address!r} ({error}); start one "
                "with `ray start --head`, or leave the address out to run on this machine"
            ) from error
        temp_dir = None
    else:
        temp_dir = _start_local(config, runtime_env)
    resources = ray.cluster_resources()
    return RayCluster(
        num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), temp_dir=temp_dir
    )


def _start_local(config: Config, runtime_env: Mapping[str, object]) -> Path:
    # Ray puts unix sockets below this folder, whose paths may not be longer than 107 bytes: a run's
    # own folder could be too deep.
    temp_dir = Path(tempfile.mkdtemp(prefix="leash-ray-", dir="/tmp"))
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    # CPUs are only promises here: a small machine runs all processes of a small run.
    num_cpus = config.cluster.num_cpus or max(os.cpu_count() or 1, num_cpus_needed(config))
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
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
