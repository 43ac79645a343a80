"""Stacks of hung processes: as py-spy reads them, or as the processes write them themselves.

collect(run_id, ["trainer-"], limit_s=30)
  ├─ py-spy dump        reads the memory of another process, where the kernel lets it
  └─ else SIGUSR2       to a process that has called `dump_on_signal`: its log gets its stacks
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from multiprocessing.pool import ThreadPool
from pathlib import Path

import psutil

from configs.environment import PROCESS_VARIABLE
from processes.runs import run_processes

SIGNAL = signal.SIGUSR2
"""Ray itself uses it for stacks, SGLang and torch for nothing."""
DUMP_S = 10.0
"""Longest that the stacks of one process may take."""
MOST_BYTES = 256 * 1024
"""The most that is kept of the stacks of one process."""
_AT_ONCE = 4
_QUIET_S = 0.3
"""A log that has not grown for so long has all stacks."""
_LOOK_S = 0.05


def dump_on_signal() -> None:
    """Write the stacks of all threads to standard error at each SIGUSR2, also while the process
    hangs in a call that holds Python's lock."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)


def collect(run_id: str, names: Sequence[str], limit_s: float) -> str:
    """Stacks of the run's processes on this machine whose names begin with one of `names`. What
    cannot be had within about `limit_s` is said in its place."""
    found = {
        f"{name} {process.pid}": process
        for process in run_processes(run_id)
        if (name := _name(process)).startswith(tuple(names)) and name
    }
    deadline = time.monotonic() + limit_s

    def dump(title: str) -> str:
        return stacks_of(title, found[title], deadline - time.monotonic())

    with ThreadPool(_AT_ONCE) as threads:  # an executor's would delay the end of this process
        texts = threads.map(dump, sorted(found))
    host = f"{socket.gethostname()}, {datetime.now():%Y-%m-%d %H:%M:%S}"
    return "\n\n".join([f"==== {host}: {len(found)} processes", *texts]) + "\n"


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ().get(PROCESS_VARIABLE, "")
    return ""


def stacks_of(title: str, process: psutil.Process, left_s: float) -> str:
    """Title, state and stacks of one process, or why it has none."""
    left_s = min(DUMP_S, left_s)
    try:
        state = str(process.status())
        head = f"---- {title} ({state}): {' '.join(process.cmdline())[:200]}"
        if left_s <= 0:
            return f"{head}\nno time was left for it"
        text, why = _by_py_spy(process.pid, left_s)
        if not text:
            text = why if state == psutil.STATUS_STOPPED else _by_signal(process, left_s) or why
    except (psutil.Error, OSError) as error:  # it has ended, or is another user's
        return f"---- {title}\n{error}"
    return f"{head}\n{text[:MOST_BYTES].rstrip()}"


def _by_py_spy(pid: int, limit_s: float) -> tuple[str, str]:
    """The stacks, or "" and the reason why there are none."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (program := shutil.which("py-spy", path=places)) is None:
        return "", "py-spy is not installed"
    # It must not stop the process: one that is stopped already might go on afterwards.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not end within {limit_s:.0f} s"
    said = done.stderr.decode(errors="replace").strip()
    return (done.stdout.decode(errors="replace"), "") if not done.returncode else ("", said)


def _by_signal(process: psutil.Process, limit_s: float) -> str:
    """The stacks that the process writes itself; "" if it does not listen."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    if not int(caught, 16) >> (SIGNAL - 1) & 1:  # the signal would end it
        return ""
    errors = Path(f"/proc/{process.pid}/fd/2")
    if not errors.is_file():  # a terminal, or a pipe, of which others read
        return ""
    with errors.open("rb") as log:
        start = size = log.seek(0, os.SEEK_END)
        process.send_signal(SIGNAL)
        deadline, grown_at = time.monotonic() + limit_s, 0.0
        while (now := time.monotonic()) < deadline and not (grown_at and now > grown_at + _QUIET_S):
            time.sleep(_LOOK_S)  # in a thread of its own: nothing tells when a log has grown
            if (now_size := log.seek(0, os.SEEK_END)) > size:
                size, grown_at = now_size, time.monotonic()
        log.seek(start)
        return log.read(MOST_BYTES).decode(errors="replace")


def write_stacks(run_folder: Path, what: str, text: str) -> Path:
    """Write RUN/stacks/<time>-<what>.txt."""
    folder = run_folder / "stacks"
    folder.mkdir(exist_ok=True)
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{what}.txt"
    path.write_text(text)
    return path
