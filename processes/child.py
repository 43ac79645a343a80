"""Starts, watches and stops a child process that is bound to this one, or is to outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import psutil

from processes import die_with_parent, fork_server

_Process = subprocess.Popen[bytes] | fork_server.Forked
_KILLED_S = 30.0
"""A killed process that still exists after this long is stuck in the kernel."""
_START = 22 - 3
"""Its place in /proc/PID/stat (proc(5)), counted from the third field, after the name."""


class Child:
    """A process that ends with this one, however this one ends.

    A program of ours lives as long as its standard input is open:

        child = Child([sys.executable, "-m", "some.program"], log, secret=key, speaks=True)
        greeting = await child.first_line()
        exit_code = await child.exit()      # or child.wait(timeout_s) where there is no event loop
        child.stop(timeout_s=10.0)          # ends its input; SIGKILL if that does not help

    `secret` is the first line of its input: other users of the machine can read arguments and
    environments. `secret=None` is for a program that does not read its input: the kernel sends it
    SIGTERM when this process ends, and so does `stop`; when it has ended, what is left of its
    process group is killed. With `outlives` only `stop` ends it: a later process of ours makes it
    an Adopted. With `stdin`, a descriptor that becomes its input, it may outlive this process and
    must see to its own end (`die_with_writer`).

    A Python program with `secret`, `stdin` or `outlives` is forked where a fork server has imported
    what it needs.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        secret: str | None = None,
        speaks: bool = False,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        outlives: bool = False,
        stdin: int | None = None,
    ) -> None:
        """Its output goes to `log`; with `speaks`, its standard output is a pipe for one line.

        `environment` is added to that of this process. Raises OSError if it cannot be run.
        """
        self._first_line, self._exited = Future[bytes](), Future[int]()
        for future in (self._first_line, self._exited):
            future.set_running_or_notify_cancel()  # else a waiter that is cancelled would cancel it
        assert secret is None or stdin is None
        self._kills_group = secret is None and not outlives
        is_bound = self._kills_group and stdin is None
        if is_bound:
            command = die_with_parent.bound(command, pass_fds)

        started = Future[_Process]()

        def live() -> None:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                variables = {**os.environ, **(environment or {})}
                process: _Process | None = None
                with log.open("ab") as log_file, open(os.devnull) as nothing:
                    given = nothing.fileno() if stdin is None else stdin
                    if secret is not None:
                        given = subprocess.PIPE
                    if not is_bound and not pass_fds:
                        process = _forked(command, variables, given, log_file.fileno(), speaks)
                    process = process or subprocess.Popen(
                        command,
                        stdin=given,
                        stdout=subprocess.PIPE if speaks else log_file,
                        stderr=log_file,
                        bufsize=0,
                        env=variables,
                        pass_fds=pass_fds,
                        start_new_session=True,  # Ctrl-C in the shell is for the controller
                    )
            except Exception as error:
                started.set_exception(error)
                return
            started.set_result(process)
            self._watch(process)

        # The kernel sends its signal when the thread that forked ends, so this thread stays.
        threading.Thread(target=live, name=f"child {command[0]}", daemon=True).start()
        self._process = started.result()
        if secret is not None:
            self._write(secret.encode() + b"\n")

    def _watch(self, process: _Process) -> None:
        if process.stdout is not None:
            with process.stdout:
                self._first_line.set_result(process.stdout.readline())
        exit_code = process.wait()
        if self._kills_group:
            kill_group(process.pid)  # at once: later another group may have this number
        self._exited.set_result(exit_code)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def first_line(self) -> bytes:
        """The first line of its standard output; empty if it ended before."""
        return await asyncio.wrap_future(self._first_line)

    async def exit(self) -> int:
        """Waits until it has ended; returns its exit code."""
        return await asyncio.wrap_future(self._exited)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, or None if it has not ended within `timeout_s`."""
        try:
            return self._exited.result(timeout_s)
        except TimeoutError:
            return None

    def stop(
        self, timeout_s: float, last_words: bytes = b"", *, whole_group: bool = True
    ) -> int | None:
        """Ask it to end, and kill it after `timeout_s`. Returns its exit code; None if it survives.

        `last_words` are written to its input before that is closed. Its process group is killed
        too, unless `whole_group` is false: then the caller ends the processes that it started.
        """
        self._ask_to_end(last_words)
        if (exit_code := self.wait(timeout_s)) is not None:
            return exit_code
        if whole_group:
            kill_group(self.pid)
        else:
            self._process.kill()
        return self.wait(_KILLED_S)

    def _ask_to_end(self, last_words: bytes) -> None:
        if (stdin := self._process.stdin) is None:
            self._process.terminate()  # nothing if it has ended
        elif not stdin.closed:
            self._write(last_words)
            stdin.close()

    def _write(self, words: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already
            self._process.stdin.write(words)


def _forked(
    command: Sequence[str], environment: Mapping[str, str], stdin: int, log: int, speaks: bool
) -> fork_server.Forked | None:
    """The program with pipes as subprocess makes them; None if there is no fork server for it."""
    its_input, our_end = os.pipe() if stdin == subprocess.PIPE else (None, None)
    our_output, its_output = os.pipe() if speaks else (None, None)
    output = log if its_output is None else its_output
    streams = [stdin if its_input is None else its_input, output, log]
    process = fork_server.fork(command, environment, streams)
    for descriptor in (its_input, its_output, *(() if process else (our_end, our_output))):
        if descriptor is not None:
            os.close(descriptor)
    if process is not None:
        process.stdin = None if our_end is None else io.FileIO(our_end, "w")
        process.stdout = None if our_output is None else io.FileIO(our_output)
    return process


class Adopted:
    """A process that outlived the one that started it: a Child's methods on that of another.

    Its exit code is unknown: 0 means that it has ended.
    """

    def __init__(self, pid: int, started: float | None = None) -> None:
        """Raises psutil.NoSuchProcess if it has ended. `started`: what `started_at` gave, if a
        record has kept it: another process may have got the same number."""
        self._process = psutil.Process(pid)
        if started not in (None, started_at(pid)):
            raise psutil.NoSuchProcess(pid)
        self.pid = pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        is_it = self._process.is_running()  # not another one with its number
        return None if is_it and not has_ended(self.pid, timeout_s) else 0

    def stop(self, timeout_s: float) -> int | None:
        """Ask it to end; kill its process group after `timeout_s`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
        if (exit_code := self.wait(timeout_s)) is not None:
            return exit_code
        kill_group(self.pid)
        return self.wait(_KILLED_S)


def started_at(pid: int) -> float:
    """When the process started, in seconds since the machine did. Raises psutil.NoSuchProcess.

    With its number this names one process, also after the clock was set: psutil's `create_time`
    moves then, and a run that goes on would be taken for a dead one.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return int(fields[_START]) / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int, timeout_s: float | None) -> bool:
    """Wait for the process to end; the kernel also reports one that has not been reaped yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = select.select([descriptor], [], [], timeout_s)
        return bool(ended)
    finally:
        os.close(descriptor)


def kill_group(group: int) -> None:
    """Send SIGKILL to all processes of a group that are left and ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def exit_of(pid: int) -> None:
    """Returns when the process has ended, without polling."""
    ended = asyncio.Event()
    fd = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
