"""Watches the processes of a run through Ray: redirects their output, explains their deaths."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TextIO, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.environment import LOG_DIR_VARIABLE, PROCESS_VARIABLE
from controller.ray_environment import OUTLAST_S
from controller.run_dir import umask_like
from host.printable import PrintableStream
from processes.logs import last_lines
from processes.stacks import dump_on_signal

SETUP_HOOK = "controller.watch.supervise.enter_process"
POLL_S = 0.2
"""How often a wait for Ray looks at the rest of the run: `ray.wait` cannot be woken."""


class RunFailed(RuntimeError):
    """A part of the run died; the message names it and ends with the last lines of its log."""


def enter_process() -> None:
    """Runs first in every Ray worker: redirect its output to the process's log in the run's folder.

    Files that it writes are as private as that folder. What is open stays its own.
    """
    # Actors run uvloop, which closes nothing in the programs that an agent or an environment
    # starts, and Ray leaves its logs open for them.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # that of the listing
                os.set_inheritable(descriptor, False)
    if (titles := sys.modules.get("setproctitle")) is not None:
        # Of a fork server. Ray's own copy of this library finds no place for titles in what that
        # has forked, and `ps` would not show which actor it is.
        ray._raylet.setproctitle = titles.setproctitle
    name, folder = os.environ.get(PROCESS_VARIABLE), os.environ.get(LOG_DIR_VARIABLE)
    if not name or not folder:
        return
    dump_on_signal()
    os.umask(umask_like(Path(folder).parent))
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    # Messages may quote the output of a model or its programs, and people read logs in terminals.
    sys.stdout = cast("TextIO", PrintableStream(sys.stdout))
    sys.stderr = cast("TextIO", PrintableStream(sys.stderr))


def failure(process: str, what: str, log: Path) -> RunFailed:
    return RunFailed(f"{process} {what}; the last lines of {log}:\n{last_lines(log)}")


def death(process: str, error: RayActorError, log: Path) -> RunFailed:
    """The error for an actor that Ray reports dead; a lost node says more than its log."""
    node = lost_node(str(error))
    if node is None:
        return failure(process, "died", log)
    return RunFailed(
        f"{process} is lost with its node {node}: that machine ended, its Ray was stopped, or it "
        f"could not be reached for about {OUTLAST_S} s (docs/cluster.md); its log is {log}"
    )


def lost_node(message: str) -> str | None:
    """Address of the node and the reason, if a RayActorError reports a lost node."""
    if "its node has died" not in message:
        return None
    address = re.search(r"^\s*ip: (\S+)", message, re.MULTILINE)
    node = re.search(r"Node Id: (\w+)", message)
    reason = re.search(r"terminated (?:un)?expectedly: *(.+)", message)
    name = address or node
    where = name.group(1) if name else "(unknown)"
    return f"{where} ({reason.group(1).strip()})" if reason else where


def cause_of(error: RayTaskError | RayActorError) -> str:
    """The message of an error from another process, without Ray's traceback."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    return f"failed: {type(inner).__name__}: {inner}"


def error_of(name: str, error: RayTaskError | RayActorError, log: Path) -> Exception:
    """The error to raise for an error from another process.

    Bad input stays a ValueError; every other error names the process.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
        return ValueError(str(error.cause))
    if isinstance(error, RayActorError):
        return death(name, error, log)
    return failure(name, cause_of(error), log)
