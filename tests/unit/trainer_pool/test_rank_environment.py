"""Environment variables of a rank's process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.trainer.loop_scene import loop_spec
from trainer_pool.pool import rank_environment


def test_rank_on_a_gpu_outlives_a_failed_group_of_weights() -> None:
    spec = replace(loop_spec(Path(), ""), uses_gpu=True)
    environment = rank_environment(spec, 1, "127.0.0.1", 29500)
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment["DS_ACCELERATOR"] == "cuda" and "CUDA_VISIBLE_DEVICES" not in environment
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("1", "0")


def test_rank_without_a_gpu_sees_none() -> None:
    environment = rank_environment(loop_spec(Path(), ""), 0, "127.0.0.1", 29500)
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["DS_ACCELERATOR"] == "cpu"
    assert not any("NCCL" in name for name in environment if name != "NCCL_SOCKET_IFNAME")


def test_rank_takes_the_interface_that_its_shell_names_but_on_one_machine_only_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    elsewhere = rank_environment(loop_spec(Path(), ""), 0, "192.0.2.7", 29500)
    assert elsewhere["GLOO_SOCKET_IFNAME"] == "ib0" and "NCCL_SOCKET_IFNAME" not in elsewhere
    here = rank_environment(loop_spec(Path(), ""), 0, "127.0.0.1", 29500)
    assert here["GLOO_SOCKET_IFNAME"] == here["NCCL_SOCKET_IFNAME"] == "lo"
