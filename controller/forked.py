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
from collections.abc import Callable, Sequence
from types import FrameType

from buffer.redis.address import PASSWORD_VARIABLE
from configs.environment import FORK_SERVERS_VARIABLE, LAUNCHER_VARIABLE
from configs.schema import Config
from controller.signals import EXIT_FAILED
from controller.start.fork_servers import fork_servers
from processes import fork_server


def run_forked(words: Sequence[str], read_config: Callable[[], Config]) -> int | None:
    """`leash` with these words; returns its exit code. None if it cannot be forked: it runs in this
    process then. Raises what `read_config` does, and KeyboardInterrupt if a signal comes before it
    has begun."""
    is_plain = not (sys.flags.optimize or sys.warnoptions or sys._xoptions)
    is_forked = LAUNCHER_VARIABLE in os.environ
    # A server would show the password to whoever may look at its environment.
    is_secret = PASSWORD_VARIABLE in os.environ
    if is_forked or is_secret or not is_plain:
        return None
    process: fork_server.Forked | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            raise KeyboardInterrupt
        process.send_signal(number)

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        with fork_servers():
            if FORK_SERVERS_VARIABLE not in os.environ:
                return None  # there is a GPU
            # Read while the servers import: they end at once if it is refused.
            if read_config().cluster.ray_address is not None:
                return None
            command = [sys.executable, "-m", "controller.main", *words]
            environment = {**os.environ, LAUNCHER_VARIABLE: str(os.getpid())}
            process = fork_server.fork(command, environment, (0, 1, 2))
            if process is None:
                return None
            code = process.wait()
            if 0 <= code != fork_server.UNKNOWN_EXIT_CODE:
                return code
            print(
                "leash: the guard or its fork server was killed; `leash status` says more",
                file=sys.stderr,
                flush=True,
            )
            # Without ending the servers: the run may go on, and `leash attach` needs them.
            os._exit(EXIT_FAILED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launcher_descriptor() -> int | None:
    """Can be read when the process that had this one forked has ended. None if none had. Raises
    KeyboardInterrupt if it has ended already."""
    if (launcher := os.environ.pop(LAUNCHER_VARIABLE, None)) is None:
        return None
    try:
        return os.pidfd_open(int(launcher))
    except ProcessLookupError:
        raise KeyboardInterrupt from None
