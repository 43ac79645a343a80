"""A machine with GPUs that lacks something is refused before a launch. No test needs a GPU."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
import torch

from configs.load import load_config
from controller.start import gpu_host
from controller.start.gpu_host import (
    check_gpus,
    check_host_memory,
    check_toolchain,
    driver_warning,
    software_problem,
)
from controller.start.plan import make_plan
from host import machine as host_machine
from host.machine import host_memory

GIB = 2**30
SEVEN_B = ("model=pretrained", "model.path=Qwen/Qwen2.5-7B-Instruct")


def install(folder: Path, name: str, prints: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{prints}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for a machine with all that SGLang needs, with nothing else on PATH."""
    for name in ("c++", "gcc"):
        install(tmp_path / "bin", name)
    install(tmp_path / "venv", "ninja")
    install(tmp_path / "cuda/bin", "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    install(tmp_path / "cuda/lib64", "libcudart.so")
    install(tmp_path / "include", "Python.h")
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"include": str(tmp_path / "include")})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/python"))
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.35")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("CUDA_HOME", f"{tmp_path}/cuda")
    for name in ("CUDA_PATH", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_toolchain_that_is_whole_is_accepted(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_toolchain("13")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDA_PATH", f"{machine}/cuda")
    check_toolchain("13")
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", f"{machine}/bin:{machine}/cuda/bin")
    check_toolchain("13")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("bin/c++", r"no c\+\+ on PATH; install g\+\+, set CXX"),
        ("bin/gcc", r"no gcc or clang on PATH; install gcc, set CC"),
        ("venv/ninja", r"no ninja.* run `deploy/install\.sh gpu`"),
        ("cuda/bin/nvcc", r"no .*cuda/bin/nvcc .*install the CUDA toolkit 13"),
        ("cuda/lib64/libcudart.so", r"no .*libcudart\.so .*those of pip packages will not do"),
        ("include/Python.h", r"no .*Python\.h; install the headers"),
    ],
)
def test_missing_part_of_the_toolchain_is_named_with_its_fix(
    machine: Path, missing: str, message: str
) -> None:
    (machine / missing).unlink()
    with pytest.raises(ValueError, match=message + r".*cluster\.gpus_per_rank=0"):
        check_toolchain("13")


def test_toolchain_of_another_version_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="of CUDA 13, and torch is built for CUDA 12; install"):
        check_toolchain("12")
    install(machine / "cuda/bin", "nvcc", "?")
    with pytest.raises(ValueError, match="of an unknown version"):
        check_toolchain("13")
    (machine / "cuda/bin/nvcc").write_text("")
    (machine / "cuda/bin/nvcc").chmod(0o644)
    with pytest.raises(ValueError, match="does not run"):
        check_toolchain("13")
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.31")
    with pytest.raises(ValueError, match=r"glibc 2\.34 or newer, and this machine has 2\.31"):
        check_toolchain("13")


def test_compiler_that_is_set_must_exist(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(ValueError, match=r"no g\+\+-99 at CXX='g\+\+-99'"):
        check_toolchain("13")


def test_gpus_that_cuda_cannot_use_are_named_with_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(host_machine, "DRIVER_FILE", tmp_path / "version")
    words = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}.86.15  Release Build\n"
    (tmp_path / "version").write_text(words.format(570))
    with pytest.raises(
        ValueError, match=r"8 GPUs, .* its NVIDIA driver is 570\.86\.15, .* needs 580"
    ):
        check_gpus()
    (tmp_path / "version").write_text(words.format(590))
    with pytest.raises(ValueError, match=r"8 GPUs, .*says why"):
        check_gpus()
    (tmp_path / "version").unlink()
    with pytest.raises(ValueError, match=r"8 GPUs, .*says why"):
        check_gpus()


def test_older_driver_is_a_problem_only_where_cuda_was_tried(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_host, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # as in an actor without GPUs
    assert software_problem() is None
    assert "its NVIDIA driver is 570.86.15" in str(driver_warning())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # by cuda-compat
    assert software_problem() is None and driver_warning() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "its NVIDIA driver is 570.86.15" in str(software_problem())
    assert driver_warning() is None


def test_machine_without_gpus_is_not_looked_at(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "bin/c++").unlink()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_gpus()


def give_memory(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(total=num_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control groups; the process is in none of them."""
    monkeypatch.setattr(host_machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_machine, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def test_host_memory_that_a_run_on_gpus_needs_is_there(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SEVEN_B, "trainer.num_ranks=8", "rollout.num_engines=8"]
    plan = make_plan(load_config(settings), 16, 64, 80 * GIB)
    # 2 x 14 GB to send, 84 GB of states for a checkpoint, 2 x 14 GB staged, 14 GB at the export,
    # and the processes.
    assert plan.host_bytes is not None
    assert plan.host_bytes == pytest.approx(154e9, abs=60 * GIB) and plan.host_bytes > 154e9
    give_memory(plan.host_bytes, monkeypatch)
    check_host_memory(plan)
    give_memory(100 * GIB, monkeypatch)
    with pytest.raises(ValueError, match=r"num_ranks=8: .* this machine has 100 GiB; add memory"):
        check_host_memory(plan)


def test_host_memory_is_planned_for_copies_in_memory_and_what_is_offloaded() -> None:
    def per_param(*settings: str) -> float:
        config = load_config([*SEVEN_B, "trainer.num_ranks=8", "rollout.num_engines=8", *settings])
        plan = make_plan(config, 16, 64, 80 * GIB)
        assert plan.host_bytes is not None and plan.model.num_params is not None
        return plan.host_bytes / plan.model.num_params

    without = per_param()
    for settings, num_bytes in (
        (["trainer.memory_copy_every=1"], 2 * 12),
        (["trainer.offload_optimizer=true"], 12),
        (["trainer.offload_parameters=true"], 2),
        (["algorithm.kl.weight=0.1", "algorithm.kl.offload=true"], 2),
        (["algorithm.kl.weight=0.1"], 0),
        (["weight_sync.num_staged=3"], 2),
    ):
        assert per_param(*settings) - without == pytest.approx(num_bytes, abs=1e-6), settings


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/", "memory.max"),  # a container, version 2
        ("0::/user.slice/job-7", "user.slice/memory.max"),  # the group above
        ("0::/user.slice/job-7", "user.slice/job-7/memory.max"),
        ("9:cpu:/a\n4:memory:/b\n0::/", "memory/b/memory.limit_in_bytes"),  # version 1
        ("4:hugetlb,memory:/slurm/job-7", "memory/slurm/memory.limit_in_bytes"),
        ("4:memory:/docker/0123", "memory/memory.limit_in_bytes"),  # in it, by its host's path
    ],
)
def test_memory_is_that_of_the_control_group(
    groups: Path, monkeypatch: pytest.MonkeyPatch, own: str, file: str
) -> None:
    give_memory(64 * GIB, monkeypatch)
    (groups.parent / "own").write_text(f"{own}\n")
    limit = groups / file
    limit.parent.mkdir(parents=True, exist_ok=True)
    for text, has in ((f"{8 * GIB}\n", 8), ("max\n", 64), ("9223372036854771712\n", 64)):
        limit.write_text(text)
        assert host_memory() == has * GIB
    limit.rename(groups / "elsewhere")
    assert host_memory() == 64 * GIB
