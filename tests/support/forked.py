"""Runs a program in a process that has its imports: `forked.py controller.main stop ...`.

Commands on runs import for some seconds of a core, ranks for ten. This process stands for the
forked one: it passes signals on, and ends with its exit code.
"""

from __future__ import annotations

import os
import signal
import sys

from processes import fork_server


def main(words: list[str]) -> int:
    command = [sys.executable, "-m", *words]
    process = fork_server.fork(command, os.environ, (0, 1, 2))
    if process is None:
        os.execv(sys.executable, command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: os.kill(process.pid, number))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
