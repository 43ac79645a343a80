"""Checks of a machine with GPUs: its driver, its memory, and what SGLang compiles its kernels with.

SGLang compiles some kernels of every model when a server starts, and Triton its own: with a ninja
from the environment, the nvcc and libcudart of a CUDA toolkit, a compiler and Python's headers.
What is missing would end each engine minutes after the launch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from controller.start.plan import Plan
from controller.units import format_bytes
from host.machine import driver_version, host_memory
from rollout_pool.engines.engine import program_path

OLDEST_DRIVER = {"12": 525, "13": 580}
"""By major version of CUDA."""
OLDEST_GLIBC = (2, 34)
"""The packages of deploy/requirements-gpu.lock are built for it."""
NVCC_TIMEOUT_S = 60.0
SURE_FRACTION = 0.9
"""Share of an estimated size that is certain: models are hardly ever smaller."""
OR_CPU = "or set cluster.gpus_per_rank=0 to run on the CPU"


def check_gpus() -> None:
    """Raises ValueError if this machine has GPUs and a run on them would fail."""
    if torch.cuda.device_count() and (problem := software_problem()) is not None:
        raise ValueError(problem)


def check_host_memory(plan: Plan) -> None:
    """Raises ValueError if a run on GPUs of this machine needs more host memory than it has."""
    needed, has = plan.host_bytes, host_memory()
    # Sizes in a model's name are rounded.
    if needed is not None and SURE_FRACTION * needed > has:
        raise ValueError(
            f"trainer.num_ranks={plan.devices.num_ranks}: ranks and engines on GPUs need about "
            f"{format_bytes(needed)} of host memory for {plan.model.label} (copies of weights to "
            f"send, of training states for checkpoints, staged weights, and what is offloaded), "
            f"and this machine has {format_bytes(has)}; add memory (in a container: raise its "
            "limit), choose a smaller model, or more machines (cluster.ray_address)"
        )


def check_toolchain(cuda_major: str) -> None:
    """Raises ValueError if kernels cannot be compiled here for torch's major version of CUDA."""
    found, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    oldest = ".".join(map(str, OLDEST_GLIBC))
    if found == "glibc" and tuple(map(int, version.split(".")[:2])) < OLDEST_GLIBC:
        raise ValueError(
            f"SGLang on a GPU needs glibc {oldest} or newer, and this machine has {version}; "
            f"use a newer distribution (Ubuntu 22.04, Debian 12, RHEL 9), {OR_CPU}"
        )
    _check_nvcc(cuda_major)
    for variable, defaults, package in (
        ("CXX", ("c++",), "g++"),  # SGLang's
        ("CC", ("gcc", "clang"), "gcc"),  # Triton's
    ):
        named = os.environ.get(variable)
        names = defaults if named is None else (named,)
        if not any(shutil.which(name) for name in names):
            where = "on PATH" if named is None else f"at {variable}={named!r}"
            raise ValueError(
                f"SGLang compiles kernels at its start, and there is no {' or '.join(names)} "
                f"{where}; install {package}, set {variable} to a compiler, {OR_CPU}"
            )
    if not shutil.which("ninja", path=program_path()):
        raise ValueError(
            "SGLang compiles kernels at its start, and there is no ninja, which comes with its "
            f"packages; run `deploy/install.sh gpu`, {OR_CPU}"
        )
    header = Path(sysconfig.get_paths(sysconfig.get_default_scheme())["include"]) / "Python.h"
    if not header.is_file():
        raise ValueError(
            f"Triton compiles a module at SGLang's start, and there is no {header}; install the "
            f"headers of this Python (python3-dev), {OR_CPU}"
        )


def _check_nvcc(cuda_major: str) -> None:
    """Looks for the toolkit where SGLang does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=program_path())
    if home is None:
        home = "/usr/local/cuda" if on_path is None else str(Path(on_path).parent.parent)
    fix = (
        f"install the CUDA toolkit {cuda_major} (nvcc, lib64/libcudart.so; those of pip packages "
        f"will not do) and set CUDA_HOME to its folder, {OR_CPU}"
    )
    nvcc, runtime = Path(home) / "bin" / "nvcc", Path(home) / "lib64" / "libcudart.so"
    for file in (nvcc, runtime):
        if not file.exists():
            raise ValueError(
                f"SGLang compiles kernels at its start, and there is no {file} (by CUDA_HOME, "
                f"CUDA_PATH, the nvcc on PATH, or /usr/local/cuda); {fix}"
            )
    try:
        command = [str(nvcc), "--version"]
        words = subprocess.run(command, capture_output=True, text=True, timeout=NVCC_TIMEOUT_S)
        release = re.search(r"release (\d+)\.\d+", words.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{nvcc} does not run ({error}); {fix}") from error
    if release is None or release[1] != cuda_major:
        has = "of an unknown version" if release is None else f"of CUDA {release[1]}"
        raise ValueError(f"{nvcc} is {has}, and torch is built for CUDA {cuda_major}; {fix}")


def software_problem() -> str | None:
    """Why this machine's torch, driver and compilers cannot serve its GPUs. Needs none itself."""
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"it has GPUs, and its torch {torch.__version__} is for the CPU; run "
            f"`deploy/install.sh gpu` there, {OR_CPU}"
        )
    if torch.cuda.device_count() and not torch.cuda.is_available():
        return _no_cuda(cuda)
    try:
        check_toolchain(cuda.partition(".")[0])
    except ValueError as error:
        return str(error)
    return None


def driver_warning() -> str | None:
    """A doubt where CUDA cannot be tried, as in an actor without GPUs: an older driver does with
    the libraries of cuda-compat."""
    cuda = torch.version.cuda
    return None if cuda is None or torch.cuda.device_count() else _old_driver(cuda)


def _old_driver(cuda: str) -> str | None:
    driver, needed = driver_version(), OLDEST_DRIVER.get(cuda.partition(".")[0])
    if driver is None or needed is None or int(driver.partition(".")[0]) >= needed:
        return None
    return (
        f"its NVIDIA driver is {driver}, and torch {torch.__version__} (CUDA {cuda}) needs "
        f"{needed} or newer; update the driver, {OR_CPU}"
    )


def _no_cuda(cuda: str) -> str:
    """Why CUDA cannot start though there are GPUs."""
    counted = f"this machine has {torch.cuda.device_count()} GPUs, but CUDA cannot start on them"
    if (old := _old_driver(cuda)) is not None:
        return f"{counted}: {old}"
    return (
        f"{counted} (torch {torch.__version__} for CUDA {cuda}): `python -c 'import torch; "
        f"torch.cuda.init()'` says why; repair the driver, {OR_CPU}"
    )
