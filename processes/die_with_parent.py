"""Binds a process to its parent through the kernel, for programs that do not read their input.

Run as a script it becomes another program:
`die_with_parent.py <pid of the parent> <descriptors to keep, as 7,9> <command>`.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """The kernel sends this process `number` when the thread that forked it ends."""
    import ctypes  # slow, so imported only here: signals may arrive right after the start

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def die_with_writer(pipe: int) -> None:
    """The kernel kills this process once every write end of this pipe is closed. Nothing may be
    written into it.

    For a process that serves another than its parent, as a forked one does. A thread that watches
    the pipe could not run while a regular expression holds Python's lock, perhaps for hours.
    """
    import fcntl
    import select

    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it has been closed already
        os.kill(os.getpid(), signal.SIGKILL)


def bound(command: Sequence[str], kept: Sequence[int] = ()) -> list[str]:
    """`command` with this script before it. Started by this process in any way, it ends with this
    process, and of its descriptors from 3 up it inherits only `kept`."""
    numbers = ",".join(map(str, kept))
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), numbers, *command]


def _close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            os.closerange(descriptor, descriptor + 1)  # no error for that of the listing


if __name__ == "__main__":
    # uvloop, unlike subprocess, closes nothing in the processes that it starts.
    _close_all_but({int(number) for number in sys.argv[2].split(",") if number})
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the parent died before the prctl call
        sys.exit(1)
    os.execv(sys.argv[3], sys.argv[3:])
