"""Notices that a process answers no more although it has not died: it was stopped, or hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import psutil

from rollout_pool.engines import process_tree
from rollout_pool.engines.sglang_client import SGLangClient

INTERVAL_S = 2.0
"""Between two questions."""
NUM_REFUSED = 2
"""So many in a row at least. The first may fail since the one who asks has stood still itself."""

Answers = Callable[[float], Awaitable[bool]]
"""Whether somebody answers within these seconds."""


async def wait_silent(answers: Answers, limit_s: float) -> float:
    """Returns when nobody has answered for `limit_s`: after how many seconds."""
    heard_at, num_refused = time.monotonic(), 0
    while True:
        await asyncio.sleep(min(INTERVAL_S, limit_s / NUM_REFUSED))
        if await answers(limit_s / NUM_REFUSED):
            heard_at, num_refused = time.monotonic(), 0
            continue
        num_refused += 1
        silent_s = time.monotonic() - heard_at
        if num_refused >= NUM_REFUSED and silent_s >= limit_s:
            return silent_s


class EnginePulse:
    """Whether one start of an engine's server is alive, however busy, or paused, it may be.

    Its HTTP process answers while the scheduler loads weights or is paused. So it can't tell of a
    scheduler that was stopped; the state of the process does.
    """

    def __init__(self, client: SGLangClient, pid: int) -> None:
        """`pid` is the server's, which is ready: all its processes are there."""
        self._client = client
        self._family = process_tree.family(pid)

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
