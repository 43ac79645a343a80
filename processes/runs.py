"""Finds and ends the processes of a run, from any shell, even when its controller is gone.

Each process of a run, and its children, have the run's id in their environment (`LEASH_RUN`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from configs.environment import RUN_VARIABLE
from processes.tree import shared_memory_files

_EXECUTED_WITHIN_S = 1.0
_LOOK_AGAIN_S = 0.001
_ENV_END = 51 - 3
"""Place of env_end in /proc/PID/stat (proc(5)), counted from the third field, after the name."""


def living_runs() -> set[str]:
    """Folders of the runs that have a process on this host."""
    runs = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if folder := _environment(process).get(RUN_VARIABLE):
                runs.add(os.path.realpath(folder))
    return runs


def run_processes(run_id: str, temporary: Path | None = None) -> list[psutil.Process]:
    """All processes of the run on this machine except this one.

    `temporary`: the run's Ray folder. Some of Ray's agents overwrite their environment with their
    title, but they keep a log open in that folder.
    """
    found = []
    for process in psutil.process_iter():
        # It may have ended, or belong to another user.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid() and _belongs(process, run_id, temporary):
                found.append(process)
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    """Raises what psutil raises."""
    # While a program is being executed, the kernel shows no environment for a moment, and on a busy
    # machine the moment can be long.
    deadline = time.monotonic() + _EXECUTED_WITHIN_S
    end = 0
    while time.monotonic() < deadline:
        if found := process.environ():
            return found
        before, end = end, _end_of_environment(process.pid)
        if end and end == before:  # the same program at two looks: it has none
            break
        if not process.exe():  # a thread of the kernel
            break
        time.sleep(_LOOK_AGAIN_S)
    return {}


def _end_of_environment(pid: int) -> int:
    """Address in its memory, another one for each program; 0 while a program is being executed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_ENV_END])
    return 0


def _belongs(process: psutil.Process, run_id: str, temporary: Path | None) -> bool:
    if _environment(process).get(RUN_VARIABLE) == run_id:
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
    """End the run's remaining processes: SIGTERM first, SIGKILL after half of `timeout_s`.

    Returns the names of the killed ones. Removes the shared-memory files that they had mapped, and
    `shared_memory`, those of processes that had ended before.
    """
    deadline = time.monotonic() + timeout_s
    left = run_processes(run_id, temporary)
    files = {*shared_memory, *shared_memory_files(left)}
    _signal(left, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=timeout_s / 2)
    killed = [_name(process) for process in left]
    while left := run_processes(run_id, temporary):  # including what they had just started
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
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.NoSuchProcess:
        return str(process.pid)
