"""Starts or joins Ray and reserves resources for each pool."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from configs.schema import Config
from controller.ray_environment import AUTH_MODE, LOOPBACK, TOKEN, TOKEN_PATH
from controller.run_dir import RunDir
from controller.signals import StopRequest
from controller.start.ray_keeper import KeeperError, RayKeeper
from controller.watch.supervise import POLL_S

CPUS_PER_PROCESS = 1
SPARE_CPUS = 32
"""For engines that join a run on this machine."""
NAMESPACE = "leash"
"""Of a Ray that was started for a run, in which the names of its actors are those of its processes.
"""
TOKEN_FILE = "token"
KEEPER_STOP_S = 20.0
SESSIONS = "ray"
"""Ray's temporary folder within the private one; short, because socket paths are limited."""


class PlacementError(RuntimeError):
    """The cluster cannot hold the run; the message names what is requested and what there is."""


def num_cpus_needed(config: Config) -> int:
    """One CPU for each process that Ray places."""
    num_processes = (
        config.trainer.ranks
        + config.rollout.num_engines
        + config.rollout.num_workers
        + config.rollout.reward_actors
    )
    return num_processes * CPUS_PER_PROCESS


@dataclass(kw_only=True, slots=True)
class RayCluster:
    """The Ray that a run uses; `stop` removes every trace of one that was started here."""

    host: str
    """Address on which the servers of this machine listen."""
    num_cpus: float
    num_gpus: float
    most_gpus: float
    """Of one machine."""
    private: Path | None
    """Folder of a Ray that was started here; None for an existing cluster."""
    keeper: RayKeeper | None = None
    """Of a Ray that was started here."""
    groups: list[PlacementGroup] = field(default_factory=list)

    def check_cpus(self, num_cpus: int) -> None:
        """Raises PlacementError if the cluster has fewer in total: waiting would not help."""
        if num_cpus > self.num_cpus:
            raise PlacementError(
                f"the run asks for {num_cpus} CPUs, {CPUS_PER_PROCESS} per process, but Ray has "
                f"{self.num_cpus:g}; add nodes, raise cluster.num_cpus, or lower "
                "trainer.num_ranks, rollout.num_engines, rollout.num_workers or "
                "rollout.reward_actors"
            )

    def check_engine(self, num_gpus: float) -> None:
        """Raises PlacementError if no machine has so many GPUs: waiting would not help."""
        if num_gpus > self.most_gpus:
            raise PlacementError(
                f"rollout.engine.tp_size={num_gpus:g}: an engine needs its GPUs on one machine, "
                f"and none in the Ray cluster has more than {self.most_gpus:g}; lower it, and "
                "raise rollout.num_engines to use all"
            )

    def reserve(
        self, groups: Sequence[list[dict[str, float]]], timeout_s: float, stop: StopRequest
    ) -> list[PlacementGroup]:
        """A packed placement group for each list of bundles. Raises Stopped, and PlacementError if
        there is no room."""
        lifetime = None if self.keeper is None else "detached"
        reserved = [
            placement_group(bundles, strategy="PACK", lifetime=lifetime) for bundles in groups
        ]
        self.groups += reserved
        deadline = time.monotonic() + timeout_s
        for group, bundles in zip(reserved, groups, strict=True):
            while not group.wait(POLL_S):
                stop.check()
                if time.monotonic() > deadline:
                    raise PlacementError(
                        f"Ray found no room for {bundles} within {timeout_s:g} s; "
                        f"it has {ray.available_resources()} free. Is another run on this cluster?"
                    )
        return reserved

    def processes(self) -> dict[str, int]:
        """Process ids, by name, of what a Ray that was started here cannot do without."""
        if self.keeper is None:
            return {}
        keeper = psutil.Process(self.keeper.process.pid)
        children = {child.name(): child.pid for child in keeper.children()}
        return {"keeper": keeper.pid, **{name: children[name] for name in ("gcs_server", "raylet")}}

    def stop(self, logs_dir: Path) -> None:
        for group in self.groups:
            remove_placement_group(group)
        self.groups.clear()
        ray.shutdown()
        if self.keeper is not None:
            self.keeper.process.stop(KEEPER_STOP_S)
        if self.private is not None:
            _keep_ray_logs(self.private / SESSIONS, logs_dir / "ray")
            shutil.rmtree(self.private, ignore_errors=True)


def start_ray(
    config: Config,
    process_env: Mapping[str, str],
    setup_hook: str,
    run_dir: RunDir,
    messages: Path,
) -> RayCluster:
    """Join the cluster at `cluster.ray_address`, or start Ray on this machine, in a private folder.

    Every worker process gets `process_env` and runs `setup_hook` (a dotted name) first. Ray's
    output in this process goes to the file `messages`.
    """
    _divert_messages(messages)
    runtime_env = {"env_vars": dict(process_env), "worker_process_setup_hook": setup_hook}
    keeper, private = None, None
    if config.cluster.ray_address is not None:
        _join(config, runtime_env)
        here = str(ray.util.get_node_ip_address())
    else:
        private = run_dir.make_temporary()
        keeper = _start_local(config, run_dir, private, messages)
        _join_kept(keeper, runtime_env)
        here = LOOPBACK
    return _cluster(config, here, private, keeper)


def rejoin_ray(
    config: Config,
    process_env: Mapping[str, str],
    setup_hook: str,
    run_dir: RunDir,
    keeper: RayKeeper,
    messages: Path,
) -> RayCluster:
    """Join the Ray of this run, started by a controller that died. Otherwise like `start_ray`."""
    _divert_messages(messages)
    runtime_env = {"env_vars": dict(process_env), "worker_process_setup_hook": setup_hook}
    private = run_dir.temporary
    assert private is not None, "the keeper's record is there"
    os.environ.pop(TOKEN, None)
    os.environ[TOKEN_PATH] = str(private / TOKEN_FILE)
    _join_kept(keeper, runtime_env)
    return _cluster(config, LOOPBACK, private, keeper)


def _cluster(
    config: Config, here: str, private: Path | None, keeper: RayKeeper | None
) -> RayCluster:
    resources = ray.cluster_resources()
    return RayCluster(
        host=config.cluster.host or here,
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        most_gpus=max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]),
        private=private,
        keeper=keeper,
    )


def _join_kept(keeper: RayKeeper, runtime_env: Mapping[str, object]) -> None:
    try:
        ray.init(
            address=keeper.address,
            namespace=NAMESPACE,
            runtime_env=dict(runtime_env),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except BaseException:
        ray.shutdown()
        keeper.process.stop(KEEPER_STOP_S)
        raise


def _divert_messages(log: Path) -> None:
    """On a lost node Ray prints the end of its own log with stack traces; no option prevents it."""

    def write(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        with log.open("a") as file:
            file.writelines(f"{line}\n" for line in data["lines"])

    ray_worker.print_to_stdstream = write


def _join(config: Config, runtime_env: Mapping[str, object]) -> None:
    address = config.cluster.ray_address
    try:
        ray.init(
            address=address,
            runtime_env=dict(runtime_env),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ray.exceptions.AuthenticationError as error:
        raise PlacementError(
            f"the Ray cluster at cluster.ray_address={address!r} does not let this process in: "
            f"export the token that it was started with ({TOKEN_PATH}), or {AUTH_MODE}=disabled "
            "if it was started without one (then anyone who can reach it can run code on it)"
        ) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PlacementError(
            f"no Ray cluster answers at cluster.ray_address={address!r} ({error}); start one "
            "with `ray start --head`, or leave the address out to run on this machine"
        ) from error


def _start_local(config: Config, run_dir: RunDir, private: Path, messages: Path) -> RayKeeper:
    # Ray makes its folders readable to all users; their parent `private` closes them.
    _use_own_token(private / TOKEN_FILE)
    # CPUs are only nominal here: a small machine runs all processes of a small run.
    num_cpus = config.cluster.num_cpus
    if num_cpus is None:
        num_cpus = max(os.cpu_count() or 1, num_cpus_needed(config)) + SPARE_CPUS
    # As torch counts them: its CPU build uses none, whatever the machine has.
    num_gpus = config.cluster.num_gpus
    if num_gpus is None:
        num_gpus = torch.cuda.device_count()
    try:
        options = {
            "address": "local",  # whatever RAY_ADDRESS says
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "include_dashboard": False,
            "object_store_memory": 256 * 2**20,
            "_temp_dir": str(private / SESSIONS),
            "_node_ip_address": config.cluster.host or LOOPBACK,
        }
        return asyncio.run(RayKeeper.start(run_dir.path, messages, options))
    except KeeperError as error:
        raise PlacementError(
            f"Ray did not start on this machine: {error} Is the machine very busy, or short of "
            f"memory or disk below {private.parent}? Launch again"
        ) from error


def _use_own_token(path: Path) -> None:
    """A new token for this Ray only: the user's tokens are neither used nor changed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    os.environ.pop(TOKEN, None)  # it would take precedence over the file
    os.environ[TOKEN_PATH] = str(path)


def _keep_ray_logs(sessions: Path, destination: Path) -> None:
    for session in sorted(sessions.glob("session_*")):
        if not session.is_symlink() and (session / "logs").is_dir():
            copy_files(session / "logs", destination)


def copy_files(source: Path, destination: Path) -> None:
    """Copy folders and regular files only: no link is followed, no device is read."""
    for folder, _, files in os.walk(source):
        target = destination / Path(folder).relative_to(source)
        target.mkdir(exist_ok=True)
        for name in files:
            _copy_plain(Path(folder) / name, target / name)


def _copy_plain(source: Path, target: Path) -> None:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # a link, a socket, or gone meanwhile
    with open(descriptor, "rb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            with target.open("wb") as copy:
                shutil.copyfileobj(file, copy)
