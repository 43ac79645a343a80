"""Binds a process to its parent through the kernel, for programs that do not read their input.

Run as a script it becomes another program: `die_with_parent.py <pid of the parent> <command>`.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """The kernel sends this process `number` when the thread that forked it ends."""
    import ctypes  # slow, so imported only here: signals may arrive right after the start

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the parent died before the prctl call
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])
