"""Environment variables that Ray gives the processes of a run."""

from __future__ import annotations

import pytest

from configs.environment import worker_environment


def test_workers_on_all_machines_get_what_nccl_is_told_in_the_shell_of_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    environment = worker_environment("a-run", "/runs/a-run/logs")
    assert environment["NCCL_IB_HCA"] == "mlx5_0"
    assert environment["LEASH_RUN"] == "a-run" and environment["LEASH_LOG_DIR"].endswith("logs")
    # Else every rank would take the first GPU of its machine.
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0"
    assert not any(name in environment for name in ("PATH", "HOME"))
