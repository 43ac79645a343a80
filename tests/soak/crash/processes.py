"""Starts processes that can be killed at any moment and restarted quickly."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Forked from a server that has the slow imports done: a start takes some ms, not half a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "tests.support.blocking"])


def start(log: Path, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Runs the function in a process of its own; its output and errors go to `log`."""
    process = _CONTEXT.Process(target=_run, args=(log, function, arguments), daemon=True)
    process.start()
    return process


def kill(process: BaseProcess, number: int = signal.SIGKILL) -> None:
    """Kills the process, if it has not ended by itself."""
    if process.is_alive():
        assert process.pid is not None
        # The fork server is its parent and takes its exit status, so it may be gone at any moment.
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def join(process: BaseProcess, timeout_s: float) -> int | None:
    """The exit code; None if it is still running."""
    process.join(timeout_s)
    return process.exitcode


def pipe() -> tuple[Any, Any]:
    """Both ends of a channel to a process."""
    return _CONTEXT.Pipe()


def event() -> Any:
    """A flag that all processes see."""
    return _CONTEXT.Event()


def barrier(num_parties: int) -> Any:
    return _CONTEXT.Barrier(num_parties)


def _run(log: Path, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # The parent of all is the fork server, which ends with the tests, however they end.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        function(*arguments)
    except BaseException:
        os.write(output, traceback.format_exc().encode())
        os._exit(1)
