"""Stopping a run by a signal: it sets a flag, and the run ends in order.

    shell, timeout, make, scheduler
        │ SIGINT, SIGTERM, SIGHUP
      guard ── SIGINT ──► controller: a flag that start-up and training check
        │                   └── Redis, Ray, engines, ...
        └── the controller died: another one goes on from the last checkpoint, or clean up

The guard only waits. The controller and its children run in a separate session: signals to the
shell's job reach none of them, and the controller ends them in order.

Imports nothing heavy: the guard starts before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from processes.die_with_parent import die_with_parent

if TYPE_CHECKING:
    import asyncio

EXIT_FAILED = 1
EXIT_STOPPED = 130
EXIT_RAY_LOST = 4
"""A controller exits with it when its own Ray has died: the guard resumes the run."""
_SIGNAL_BYTES = 128
"""Size of a struct signalfd_siginfo, which begins with the number."""


class Stopped(Exception):
    """The run was asked to stop."""


class StopRequest:
    """The request to stop a run; `listen` installs signal handlers that set it.

    stop = StopRequest()
    stop.listen()
    stop.check()                # raises Stopped after the first signal
    await stop.wait()           # or waits for it

    A signal raises only inside `interrupting`: an exception in the middle of Ray's start, or in a
    callback that swallows it, would leave processes behind.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._may_raise = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        self._terminals: list[int] = []

    def listen(self) -> None:
        """Install the handlers; call it again after a library has replaced them."""
        # Once Ray has started, descriptor 2 is not that of sys.stderr.
        self._terminals = [fd for fd in (1, 2, sys.stderr.fileno()) if os.isatty(fd)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # The terminal is gone, and stopping must not fail on a line that cannot be printed.
            nothing = os.open(os.devnull, os.O_WRONLY)
            for fd in self._terminals:
                os.dup2(nothing, fd)
            os.close(nothing)
        is_first = not self.is_set
        self.set()
        if is_first and self._may_raise:
            raise KeyboardInterrupt

    def set(self) -> None:
        self.is_set = True
        if self._loop is not None and self._event is not None:
            # The loop may be asleep in the kernel; a handler alone would not wake it.
            self._loop.call_soon_threadsafe(self._event.set)

    def check(self) -> None:
        """Raises Stopped if the run was asked to stop."""
        if self.is_set:
            raise Stopped

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal interrupts the block, at any line, with Stopped."""
        self.check()
        before, sys.unraisablehook = sys.unraisablehook, _ignore_interrupts
        self._may_raise = True
        try:
            yield
        except BaseException:
            self._may_raise = False
            self.check()
            raise
        finally:
            self._may_raise = False
            sys.unraisablehook = before
        self.check()  # in case a callback swallowed the exception

    async def wait(self) -> None:
        import asyncio

        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        try:
            if not self.is_set:
                await self._event.wait()
        finally:
            self._loop = self._event = None


def _ignore_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


Run = Callable[[StopRequest, Callable[[str], None]], int]
Finish = Callable[[str | None, bool, int], int | Run]


def run_guarded(run: Run, finish: Finish, launcher: int | None = None) -> int:
    """Call `run` in a separate process and session, and forward signals to it.

    `launcher`: a descriptor that can be read when the process has ended that stands for this one in
    the shell's job, which is as good as a signal (forked.py).

    `run` calls its second argument with the run's folder once it exists. `finish` cleans up after a
    process that could not, and returns the exit code, or what to call next in the same way; no
    signal interrupts it. Its arguments: the folder, whether a signal was forwarded, and the exit
    code of the process, or minus the number of the signal that killed it.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
        signals.add(signal.SIGHUP)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Blocked from here on: no signal is lost, whichever process gets it, and none raises.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        while True:
            ended = finish(*_run_once(run, signals, mask, launcher))
            if isinstance(ended, int):
                return ended
            run = ended
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_once(
    run: Run,
    signals: set[signal.Signals],
    mask: set[int | signal.Signals],
    launcher: int | None,
) -> tuple[str | None, bool, int]:
    """Returns the arguments of `finish`."""
    folder, writing_end = os.pipe()
    guard = os.getpid()
    controller = os.fork()
    if controller == 0:
        _become_controller(run, guard, writing_end, mask)
    os.close(writing_end)
    try:
        was_asked, exit_code = _watch(controller, signals, launcher)
        return os.read(folder, 4096).decode() or None, was_asked, exit_code
    finally:
        os.close(folder)


def _watch(controller: int, signals: set[signal.Signals], launcher: int | None) -> tuple[bool, int]:
    """Forward signals until the process ends; returns whether there were any, and its exit code."""
    was_asked = False
    # Not signal.sigtimedwait: if this process is stopped and continued after the time-out, Python
    # 3.11 returns a signal that nobody sent, from memory that nothing has filled in.
    arrived, ended = _signal_descriptor(signals), os.pidfd_open(controller)
    watched = [arrived, ended] if launcher is None else [arrived, ended, launcher]
    try:
        while True:
            ready, _, _ = select.select(watched, [], [])
            if arrived in ready:  # first: a job manager may have killed the controller, too
                number = int.from_bytes(os.read(arrived, _SIGNAL_BYTES)[:4], sys.byteorder)
                was_asked = True
                # Not SIGTERM: Ray has its own handler for it while it starts.
                os.kill(controller, signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)
            elif launcher in ready:
                was_asked = True
                watched.remove(launcher)
                os.kill(controller, signal.SIGINT)
            elif ended in ready:
                _, status = os.waitpid(controller, 0)
                return was_asked, os.waitstatus_to_exitcode(status)
    finally:
        os.close(arrived)
        os.close(ended)


def _signal_descriptor(signals: set[signal.Signals]) -> int:
    """Can be read when one of these signals, which are blocked, has arrived: signalfd(2)."""
    import ctypes

    words = (ctypes.c_uint64 * 16)(sum(1 << (number - 1) for number in signals))  # a sigset_t
    return int(ctypes.CDLL(None).signalfd(-1, words, os.O_CLOEXEC))


def _become_controller(
    run: Run, guard: int, folder: int, mask: set[int | signal.Signals]
) -> NoReturn:
    code = EXIT_FAILED
    try:
        os.setsid()
        stop = StopRequest()
        stop.listen()
        die_with_parent(signal.SIGINT)
        if os.getppid() != guard:  # it died before die_with_parent took effect
            stop.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = run(stop, lambda path: _write_once(folder, path))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader of a pipe, or the terminal, is gone
                stream.flush()
        os._exit(code)  # only the guard returns to the caller


def _write_once(fd: int, path: str) -> None:
    os.write(fd, path.encode())
    os.close(fd)
