"""Whether an engine's server is alive, however busy it is."""

from __future__ import annotations

import psutil

from processes import tree
from rollout_pool.engines.client import SGLangClient


class EnginePulse:
    """Whether one start of an engine's server is alive, however busy, or paused, it may be.

    Its HTTP process answers while the scheduler loads weights or is paused. So it can't tell of a
    scheduler that was stopped; the state of the process does.
    """

    def __init__(self, client: SGLangClient, pid: int) -> None:
        """`pid` is the server's, which is ready: all its processes are there."""
        self._client = client
        self._family = tree.family(pid)

    async def answers(self, timeout_s: float) -> bool:
        return not self._is_stopped() and await self._client.answers(timeout_s)

    def _is_stopped(self) -> bool:
        """By a signal; who looks at a process with a debugger stops it in another way."""
        return any(_status(process) == psutil.STATUS_STOPPED for process in self._family)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:  # the server ends when one of its processes has ended
        return str(psutil.STATUS_DEAD)
