"""How a run hears that it should end: a signal sets a flag, and the run ends in its own order.

    shell, timeout, make, scheduler
        │ SIGINT, SIGTERM, SIGHUP
      guard ── SIGINT ──► controller: a flag that start-up and training look at
        │                   └── Redis, Ray, engines, ...
        └── the controller died: clears up behind it

The guard is a few lines of Python that wait. The controller and all that it starts are a session
apart: what is sent to the shell's job reaches none of them, and the controller ends them in order.

Imports nothing heavy: the guard stands before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import os
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
_LOOK_S = 1.0


class Stopped(Exception):
    """The run was asked to end."""


class StopRequest:
    """Whether the run was asked to end; `listen` makes signals ask.

    A signal never raises where it happens to arrive, but inside `interrupting`: an exception in the
    middle of Ray's start, or in a callback that swallows it, would leave things behind.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._may_raise = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        self._terminals: list[int] = []

    def listen(self) -> None:
        """Takes the signals; again after a library has put a handler of its own there."""
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        is_first = not self.is_set
        self.set()
        if is_first and self._may_raise:
            raise KeyboardInterrupt

    def _leave_terminal(self) -> None:
        # It is gone, and the end must not fail at a line that it cannot print.
        nothing = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nothing, fd)
        os.close(nothing)

    def set(self) -> None:
        self.is_set = True
        if self._loop is not None and self._event is not None:
            # The loop may be asleep in the kernel; a handler alone would not wake it.
            self._loop.call_soon_threadsafe(self._event.set)

    def check(self) -> None:
        """Raises Stopped if the run was asked to end."""
        if self.is_set:
            raise Stopped

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal breaks off the block, which may be broken off anywhere; raises Stopped."""
        self.check()
        before, sys.unraisablehook = sys.unraisablehook, _say_nothing_of_interrupts
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
        self.check()  # where a callback had swallowed the exception

    async def wait(self) -> None:
        """Returns when the run was asked to end."""
        import asyncio

        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        try:
            if not self.is_set:
                await self._event.wait()
        finally:
            self._loop = self._event = None


def _say_nothing_of_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


Run = Callable[[StopRequest, Callable[[str], None]], int]
Finish = Callable[[str | None, bool, int], int]


def run_guarded(run: Run, finish: Finish) -> int:
    """Runs `run` in a process and a session of its own, and hands signals on to it.

    `run` names its folder to its second argument once there is one. `finish` clears up behind a
    process that could not do so itself, and gives the exit code; no signal breaks it off. It gets
    the folder, whether a signal was handed on, and the exit code of the process, or minus the
    number of the signal that killed it.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` wants it
        signals.add(signal.SIGHUP)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Blocked from here on: none is lost, whichever process it meets, and none raises anywhere.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    folder, writing_end = os.pipe()
    guard = os.getpid()
    controller = os.fork()
    if controller == 0:
        _become_controller(run, guard, writing_end, mask)
    os.close(writing_end)
    try:
        was_asked, exit_code = _watch(controller, signals)
        path = os.read(folder, 4096).decode() or None
        return finish(path, was_asked, exit_code)
    finally:
        os.close(folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _watch(controller: int, signals: set[signal.Signals]) -> tuple[bool, int]:
    """Hands signals on until the process has ended; whether there were any, and its exit code."""
    was_asked = False
    while True:
        pid, status = os.waitpid(controller, os.WNOHANG)
        if pid == controller:
            return was_asked, os.waitstatus_to_exitcode(status)
        # SIGCHLD ends the wait at once; the limit is for another thread that took it.
        received = signal.sigtimedwait(signals, _LOOK_S)
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        was_asked = True
        # Not SIGTERM, for which Ray has a handler of its own while it starts.
        os.kill(controller, signal.SIGHUP if received.si_signo == signal.SIGHUP else signal.SIGINT)


def _become_controller(
    run: Run, guard: int, folder: int, mask: set[int | signal.Signals]
) -> NoReturn:
    code = EXIT_FAILED
    try:
        os.setsid()
        stop = StopRequest()
        stop.listen()
        die_with_parent(signal.SIGINT)
        if os.getppid() != guard:  # it died before the kernel knew of this process
            stop.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = run(stop, lambda path: _write_once(folder, path))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader of a pipe, or the terminal, is gone
                stream.flush()
        os._exit(code)  # what called the guard goes on in the guard alone


def _write_once(fd: int, path: str) -> None:
    os.write(fd, path.encode())
    os.close(fd)
