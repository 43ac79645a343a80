"""Environment variables of the processes of a run: their marks, and what they pass on."""

from __future__ import annotations

import os
from collections.abc import Sequence

RUN_VARIABLE = "LEASH_RUN"
"""Id of the run; inherited by all child processes."""
LOG_DIR_VARIABLE = "LEASH_LOG_DIR"
PROCESS_VARIABLE = "LEASH_PROCESS"
"""Name of a process and of its log file, for example trainer-0."""
FORK_SERVERS_VARIABLE = "LEASH_FORK_SERVERS"
"""Folder of the sockets of processes/fork_server.py."""
LAUNCHER_VARIABLE = "LEASH_LAUNCHER"
"""Id of the process that had a launch forked."""


def worker_environment(run_id: str, log_dir: str) -> dict[str, str]:
    """Variables of every process that Ray starts for a run, on whatever machine: its marks, and the
    settings of NCCL in this shell."""
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return nccl | {
        RUN_VARIABLE: run_id,
        LOG_DIR_VARIABLE: log_dir,
        # A cluster that was started for other programs may leave all GPUs to each process.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    }


def asked_directly(hosts: Sequence[str]) -> dict[str, str]:
    """Variables by which HTTP libraries use no proxy of the environment for these hosts either."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(dict.fromkeys([*filter(None, known.split(",")), *hosts]))
    return {"no_proxy": value, "NO_PROXY": value}
