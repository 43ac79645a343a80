"""Knows every process of a run: their logs, how one that died is told, and that none is left.

Each process of a run carries the run's id in its environment (`LEASH_RUN`), inherited by whatever
it starts, so that a run can be ended from any shell by process id, even when its controller
is gone.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.environment import LOG_DIR_VARIABLE, PROCESS_VARIABLE, RUN_VARIABLE
from configs.printable import PrintableStream, printable
from controller.ray_environment import OUTLAST_S
from controller.run_dir import umask_like
from controller.signals import StopRequest
from rollout_pool.engines.process_tree import shared_memory_files

SETUP_HOOK = "controller.watch.supervise.enter_process"
LOOK_S = 0.2
"""How often a wait for Ray looks whether the run was asked to end; Ray cannot be woken."""


class RunFailed(RuntimeError):
    """A part of the run died; the message names it and ends with the last lines of its log."""


def enter_process() -> None:
    """First thing in every Ray worker: send its output to the run's own log of that process.

    What it writes is as private as the run's folder.
    """
    name, folder = os.environ.get(PROCESS_VARIABLE), os.environ.get(LOG_DIR_VARIABLE)
    if not name or not folder:
        return
    os.umask(umask_like(Path(folder).parent))
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    # Messages quote what a model or its program wrote, and people read logs in terminals.
    sys.stdout = cast("TextIO", PrintableStream(sys.stdout))
    sys.stderr = cast("TextIO", PrintableStream(sys.stderr))


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, or what is wrong with it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({log}: {error.strerror})"
    return "\n".join(printable(line[:400]) for line in lines[-count:]) or f"({log} is empty)"


def failure(process: str, what: str, log: Path) -> RunFailed:
    return RunFailed(f"{process} {what}; the last lines of {log}:\n{last_lines(log)}")


def death(process: str, error: RayActorError, log: Path) -> RunFailed:
    """What to raise for an actor that Ray calls dead; a lost node says more than its log."""
    node = lost_node(str(error))
    if node is None:
        return failure(process, "died", log)
    return RunFailed(
        f"{process} is lost with its node {node}: that machine ended, its Ray was stopped, or it "
        f"could not be reached for some {OUTLAST_S} s (docs/cluster.md); its log is {log}"
    )


def lost_node(message: str) -> str | None:
    """Address of the node, and why it is lost, if a RayActorError says so."""
    if "its node has died" not in message:
        return None
    address = re.search(r"^\s*ip: (\S+)", message, re.MULTILINE)
    node = re.search(r"Node Id: (\w+)", message)
    reason = re.search(r"terminated (?:un)?expectedly: *(.+)", message)
    name = address or node
    where = name.group(1) if name else "(unknown)"
    return f"{where} ({reason.group(1).strip()})" if reason else where


def cause_of(error: BaseException) -> str:
    """What an error that Ray brought from another process says, without Ray's own traceback."""
    if isinstance(error, RayTaskError):
        inner = error.cause
        return f"failed: {type(inner).__name__}: {inner}"
    return f"failed: {type(error).__name__}: {error}"


def told(name: str, error: RayTaskError | RayActorError, log: Path) -> Exception:
    """What to raise for an error that Ray brought from another process.

    Bad input that only that process could see stays a ValueError; all else names the process.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
        return ValueError(str(error.cause))
    if isinstance(error, RayActorError):
        return death(name, error, log)
    return failure(name, cause_of(error), log)


def wait_for_one(
    refs: list[Any], timeout_s: float, stop: StopRequest
) -> tuple[list[Any], list[Any]]:
    """`ray.wait` that a request to end breaks off, with Stopped."""
    deadline = time.monotonic() + timeout_s
    while True:
        stop.check()
        left_s = max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(refs, num_returns=1, timeout=min(left_s, LOOK_S))
        if ready or left_s <= LOOK_S:
            return ready, pending


def wait_for_all(
    refs: Mapping[str, Any],
    log_of: Callable[[str], Path],
    timeout_s: float,
    doing: str,
    tell: Callable[[str], None],
    stop: StopRequest,
) -> dict[str, Any]:
    """Results by process name; `tell` hears each name as it is done.

    Raises for the first that fails, or is missing at `timeout_s`, and Stopped.
    """
    names = {ref: name for name, ref in refs.items()}
    pending, results = list(names), dict[str, Any]()
    deadline = time.monotonic() + timeout_s
    while pending:
        ready, pending = wait_for_one(pending, deadline - time.monotonic(), stop)
        if not ready:
            name = names[pending[0]]
            raise failure(name, f"was not done {doing} after {timeout_s:g} s", log_of(name))
        name = names[ready[0]]
        try:
            results[name] = ray.get(ready[0])
        except (RayTaskError, RayActorError) as error:
            raise told(name, error, log_of(name)) from error
        tell(name)
    return results


async def exit_of(pid: int) -> None:
    """Returns when the process has ended. The kernel tells; nothing is polled."""
    ended = asyncio.Event()
    fd = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def run_processes(run_id: str, temporary: Path | None = None) -> list[psutil.Process]:
    """Every process on this machine, this one excepted, that belongs to the run.

    `temporary`: the run's folder of Ray. Some of Ray's agents write their title over their
    environment, but they keep a log open in there.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and _belongs(process, run_id, temporary):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's
    return found


def _belongs(process: psutil.Process, run_id: str, temporary: Path | None) -> bool:
    if process.environ().get(RUN_VARIABLE) == run_id:
        return True
    return temporary is not None and any(
        file.path.startswith(f"{temporary}/") for file in process.open_files()
    )


def end_processes(
    run_id: str,
    timeout_s: float,
    shared_memory: Iterable[Path] = (),
    temporary: Path | None = None,
) -> list[str]:
    """End what is left of the run: asked first, killed after half of `timeout_s`.

    Returns the names of those that had to be killed. Shared-memory files left by them are removed,
    and those of `shared_memory`, which processes that ended before had mapped.
    """
    deadline = time.monotonic() + timeout_s
    left = run_processes(run_id, temporary)
    files = {*shared_memory, *shared_memory_files(left)}
    _signal(left, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=timeout_s / 2)
    killed = [_name(process) for process in left]
    while left := run_processes(run_id, temporary):  # what they had just started counts as well
        files |= shared_memory_files(left)
        _signal(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=max(0.1, deadline - time.monotonic()))
        if time.monotonic() > deadline:
            break
    for file in files:
        file.unlink(missing_ok=True)
    return killed


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.NoSuchProcess:
        return str(process.pid)
