"""Runs a launch in a process that the fork servers have done its imports for.

    shell ── SIGINT ──► this process ──► guard ──► controller        (signals.py)
                          │                ▲
                          └── starts ──► fork servers

The controller imports for eight seconds of a core what ranks and workers import as well. On a
machine without a GPU all of them are forked (start/fork_servers.py). This process stands for the
guard in the shell's job: it passes signals on, and ends with its exit code. If it is killed, the
guard stops the run, as the controller does if the guard is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from buffer.redis.address import PASSWORD_VARIABLE
from configs.environment import FORK_SERVERS_VARIABLE, LAUNCHER_VARIABLE
from configs.schema import Config
from controller.signals import EXIT_FAILED
from controller.start.fork_servers import fork_servers
from processes import fork_server


def run_forked(words: Sequence[str], config: Config) -> int | None:
    """`leash` with these words; returns its exit code. None if it cannot be forked: it runs in this
    process then. Raises KeyboardInterrupt if a signal comes before it has begun."""
    is_plain = not (sys.flags.optimize or sys.warnoptions or sys._xoptions)
    is_forked = LAUNCHER_VARIABLE in os.environ
    # A server would show the password to whoever may look at its environment.
    is_secret = PASSWORD_VARIABLE in os.environ
    if is_forked or is_secret or not is_plain or config.cluster.ray_address is not None:
        return None
    launch = _Launch(words)
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, launch.pass_on) for number in signals}
    try:
        with fork_servers():
            # Without servers there is a GPU.
            return launch.run() if FORK_SERVERS_VARIABLE in os.environ else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Launch:
    def __init__(self, words: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "controller.main", *words]
        self._process: fork_server.Forked | None = None

    def run(self) -> int | None:
        environment = {**os.environ, LAUNCHER_VARIABLE: str(os.getpid())}
        self._process = fork_server.fork(self._command, environment, (0, 1, 2))
        if self._process is None:
            return None
        code = self._process.wait()
        if 0 <= code != fork_server.UNKNOWN_EXIT_CODE:
            return code
        print(
            "leash: the guard or its fork server was killed; `leash status` says more",
            file=sys.stderr,
        )
        sys.stderr.flush()
        # Without ending the servers: the run may go on, and `leash attach` needs them.
        os._exit(EXIT_FAILED)

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._process is None:
            raise KeyboardInterrupt
        self._process.send_signal(number)


def launcher_descriptor() -> int | None:
    """Can be read when the process that had this one forked has ended. None if none had. Raises
    KeyboardInterrupt if it has ended already."""
    if (launcher := os.environ.pop(LAUNCHER_VARIABLE, None)) is None:
        return None
    try:
        return os.pidfd_open(int(launcher))
    except ProcessLookupError:
        raise KeyboardInterrupt from None
