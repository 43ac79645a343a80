"""Starts or joins Ray and reserves resources for each pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from configs.environment import worker_environment
from configs.schema import Config
from controller.ray_environment import AUTH_MODE, LOOPBACK, TOKEN, TOKEN_PATH
from controller.run_dir import RunDir
from controller.signals import StopRequest
from controller.start.ray_keeper import KeeperError, RayKeeper
from controller.watch.supervise import POLL_S, SETUP_HOOK

CPUS_PER_PROCESS = 1
SPARE_CPUS = 32
"""Room for engines that join a run on this machine."""
NAMESPACE = "leash"
"""Namespace of a Ray that was started for a run: its actors have the names of the processes."""
TOKEN_FILE = "token"
KEEPER_STOP_S = 20.0
CONNECT_S = 5.0
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
    """Most GPUs of one machine."""
    private: Path | None
    """Folder of a Ray that was started here; None for an existing cluster."""
    keeper: RayKeeper | None = None
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
            for session in sorted((self.private / SESSIONS).glob("session_*")):
                if not session.is_symlink() and (session / "logs").is_dir():
                    copy_files(session / "logs", logs_dir / "ray")
            shutil.rmtree(self.private, ignore_errors=True)


def start_ray(config: Config, run_dir: RunDir) -> RayCluster:
    """Join the cluster at `cluster.ray_address`, or start Ray on this machine, in a private folder.

    Every worker process of it gets the run's environment and runs `supervise.enter_process` first.
    Ray's output in this process goes to a log of the run.
    """
    _divert_messages(run_dir.log_of("ray"))
    if (address := config.cluster.ray_address) is not None:
        _join(address, run_dir)
        return _cluster(config, str(ray.util.get_node_ip_address()), None, None)
    private = run_dir.make_temporary()
    return _join_kept(config, run_dir, private, _start_local(config, run_dir, private))


def rejoin_ray(config: Config, run_dir: RunDir, keeper: RayKeeper) -> RayCluster:
    """Join the Ray of this run, started by a controller that died. Otherwise like `start_ray`."""
    _divert_messages(run_dir.log_of("ray"))
    private = run_dir.temporary
    assert private is not None, "the keeper's record is there"
    _use_token(private / TOKEN_FILE)
    return _join_kept(config, run_dir, private, keeper)


@contextlib.contextmanager
def joined(config: Config) -> Iterator[RayCluster]:
    """The cluster at `cluster.ray_address`, for a look at it. Raises PlacementError."""
    address = config.cluster.ray_address
    assert address is not None
    host, _, port = address.rpartition(":")
    if port.isdecimal():  # Ray itself takes long to fail where nothing listens
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise _no_cluster(address, error) from error
    _join(address, None)
    try:
        yield _cluster(config, str(ray.util.get_node_ip_address()), None, None)
    finally:
        ray.shutdown()


def _init(address: str, run_dir: RunDir | None, namespace: str | None = None) -> None:
    runtime_env: dict[str, Any] = {}
    if run_dir is not None:
        environment = worker_environment(run_dir.run_id, str(run_dir.logs))
        runtime_env = {"env_vars": environment, "worker_process_setup_hook": SETUP_HOOK}
    ray.init(
        address=address,
        namespace=namespace,
        runtime_env=runtime_env,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


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


def _join_kept(config: Config, run_dir: RunDir, private: Path, keeper: RayKeeper) -> RayCluster:
    try:
        _init(keeper.address, run_dir, namespace=NAMESPACE)
    except BaseException:
        ray.shutdown()
        keeper.process.stop(KEEPER_STOP_S)
        raise
    return _cluster(config, LOOPBACK, private, keeper)


def _divert_messages(log: Path) -> None:
    """Ray writes to `log`, whatever part of it; what Python prints goes where it went.

    No option does it: its C++ part writes errors, and the trace of a crash, to descriptor 2, and on
    a lost node Ray prints the end of its own log with stack traces.
    """
    before = sys.stderr
    sys.stderr = os.fdopen(
        os.dup(2), "w", buffering=1, encoding=before.encoding, errors=before.errors
    )
    messages = log.open("a", buffering=1)
    os.dup2(messages.fileno(), 2)
    handler = logging.StreamHandler(messages)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("ray").handlers = [handler]

    def write(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        messages.writelines(f"{line}\n" for line in data["lines"])

    ray_worker.print_to_stdstream = write


def _join(address: str, run_dir: RunDir | None) -> None:
    try:
        _init(address, run_dir)
    except ray.exceptions.AuthenticationError as error:
        raise PlacementError(
            f"the Ray cluster at cluster.ray_address={address!r} does not let this process in: "
            f"export the token that it was started with ({TOKEN_PATH}), or {AUTH_MODE}=disabled "
            "if it was started without one (then anyone who can reach it can run code on it)"
        ) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> PlacementError:
    return PlacementError(
        f"no Ray cluster answers at cluster.ray_address={address!r} ({error}); start one "
        "with deploy/cluster/node.sh, or leave the address out to run on this machine"
    )


def _start_local(config: Config, run_dir: RunDir, private: Path) -> RayKeeper:
    # Ray makes its folders readable to all users; their parent `private` closes them.
    # A new token for this Ray only: the user's tokens are neither used nor changed.
    descriptor = os.open(private / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    _use_token(private / TOKEN_FILE)
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
        return asyncio.run(RayKeeper.start(run_dir.path, run_dir.log_of("ray"), options))
    except KeeperError as error:
        raise PlacementError(
            f"Ray did not start on this machine: {error} Is the machine very busy, or short of "
            f"memory or disk below {private.parent}? Launch again"
        ) from error


def _use_token(path: Path) -> None:
    os.environ.pop(TOKEN, None)  # it would take precedence over the file
    os.environ[TOKEN_PATH] = str(path)


def copy_files(source: Path, destination: Path) -> None:
    """Copy folders and regular files only: no link is followed, no device is read."""
    destination.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):  # which looks into no link
        target = destination / path.relative_to(source)
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                target.mkdir(exist_ok=True)
            elif stat.S_ISREG(mode):
                shutil.copyfile(path, target, follow_symlinks=False)
