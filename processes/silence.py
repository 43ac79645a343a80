"""Detects a live process that no longer responds: it hangs or is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

INTERVAL_S = 2.0
"""Time between two probes."""
NUM_REFUSED = 2
"""Fewest failed probes in a row: one can fail because the probing process was paused."""

Probe = Callable[[float], Awaitable[bool]]
"""Probes the process; whether it responds within so many seconds."""


async def wait_silent(probe: Probe, limit_s: float | Callable[[], float]) -> float:
    """Returns the seconds of silence once the process has not responded for `limit_s`, which may
    change meanwhile."""
    heard_at, num_refused = time.monotonic(), 0
    while True:
        limit = limit_s() if callable(limit_s) else limit_s
        await asyncio.sleep(min(INTERVAL_S, limit / NUM_REFUSED))
        if await probe(limit / NUM_REFUSED):
            heard_at, num_refused = time.monotonic(), 0
            continue
        num_refused += 1
        silent_s = time.monotonic() - heard_at
        if num_refused >= NUM_REFUSED and silent_s >= limit:
            return silent_s
