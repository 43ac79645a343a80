"""Environment variables: names of those that mark the processes of a run, and proxies."""

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


def asked_directly(hosts: Sequence[str]) -> dict[str, str]:
    """Variables by which HTTP libraries use no proxy of the environment for these hosts either."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(dict.fromkeys([*filter(None, known.split(",")), *hosts]))
    return {"no_proxy": value, "NO_PROXY": value}
