"""Reads what a preflight wants to know of the machine that it runs on. Imports no torch and no Ray:
each machine of a cluster runs it."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from host.machine import driver_version, existing, host_memory
from host.network import interface_of, own_address_towards
from processes.tree import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("buffer", "configs", "controller", "host", "processes"),
    *("rollout_pool", "tensors", "trainer_pool", "weight_sync"),
)
RUN_ELSEWHERE = {".py", ".lua"}
"""Endings of Leash's sources; settings are read by the controller alone."""
VERSIONS = ("Leash", "Python", "torch", "sglang", "NCCL", "driver", "Ray")
TMP = Path("/tmp")


@dataclass(kw_only=True, slots=True, frozen=True)
class Asked:
    """Where each machine looks."""

    run_dir: str
    stage_dir: str | None
    marker: str | None = None
    """A file that the controller has just written below run_dir."""
    controller: str | None = None
    """Address of its machine; None if there is no other."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NodeFacts:
    """One machine. Sizes in bytes, speeds in bytes per second."""

    name: str
    address: str
    """Where the other machines reach it."""
    interface: str
    towards: str
    """Its own address on the way to the controller's machine."""
    versions: dict[str, str | None]
    """By VERSIONS; None: not installed."""
    num_cpus: float
    num_gpus: float
    memory: int
    most_files: int
    """Files that a process there may open."""
    locked_memory: int | None
    """None: unlimited."""
    stage_free: int
    stage_dir: str
    tmp_free: int
    run_dir_free: int
    sees_run_dir: bool = True
    """Whether the controller's marker is there."""
    gpu_problem: str | None = None
    """Why its GPUs cannot be used."""
    gpu_warning: str | None = None
    """Why they may not."""
    clock_s: float = 0.0
    """By how much its clock is ahead of the controller's."""
    clock_error_s: float = 0.0
    unreached: tuple[str, ...] = ()
    """Machines to whose open ports it cannot connect."""
    next_node: str | None = None
    bytes_per_s: float | None = None
    """To the next machine, while each sends to its next one."""


def node_facts(asked: Asked, address: str, num_cpus: float, num_gpus: float) -> NodeFacts:
    """Facts on this machine, which the others reach at `address`. Raises OSError if it has no such
    address, or a folder cannot be read."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    gpu_problem = gpu_warning = None
    if num_gpus:
        from controller.start.gpu_host import driver_warning, software_problem  # import torch

        gpu_problem, gpu_warning = software_problem(), driver_warning()
    stage_dir = asked.stage_dir or str(SHARED_MEMORY)
    return NodeFacts(
        name=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        towards=own_address_towards(asked.controller or address),
        versions=dict(zip(VERSIONS, _versions(), strict=True)),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        memory=host_memory(),
        most_files=most_files,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        stage_free=_free(stage_dir),
        stage_dir=stage_dir,
        tmp_free=_free(TMP),
        run_dir_free=_free(asked.run_dir),
        sees_run_dir=asked.marker is None or os.path.exists(asked.marker),
        gpu_problem=gpu_problem,
        gpu_warning=gpu_warning,
    )


def sources_digest(root: Path = ROOT) -> str:
    """The first digits of a digest of Leash's sources, other in a checkout that differs."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            name = path.relative_to(root)
            is_hidden = any(part.startswith(".") for part in name.parts)  # an editor's, for one
            if path.suffix in RUN_ELSEWHERE and not is_hidden and path.is_file():
                digest.update(f"{name}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:10]


def _versions() -> Sequence[str | None]:
    leash = f"{_installed('leash-rl') or '?'} ({sources_digest()})"
    nccl = _installed("nvidia-nccl-cu13") or _installed("nvidia-nccl-cu12")
    torch, sglang, ray = map(_installed, ("torch", "sglang", "ray"))
    return leash, platform.python_version(), torch, sglang, nccl, driver_version(), ray


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _free(path: str | Path) -> int:
    return shutil.disk_usage(existing(path)).free
