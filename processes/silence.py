"""Notices that a process does not answer any more although it has not died: it hangs or stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

INTERVAL_S = 2.0
"""Between two questions."""
NUM_REFUSED = 2
"""Fewest unanswered questions in a row: one can fail because the asking process stood still."""

Answers = Callable[[float], Awaitable[bool]]
"""Asks the process; whether it answers within these seconds."""


async def wait_silent(answers: Answers, limit_s: float) -> float:
    """Returns when the process has not answered for `limit_s`, with the seconds since it did."""
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
