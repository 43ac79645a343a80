"""Cancels tasks reliably."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

CANCEL_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], again_s: float = CANCEL_AGAIN_S) -> None:
    """Cancel `tasks` every `again_s` until all have ended. Ignores what they raise."""
    # Once may not be enough: asyncio.wait_for, which redis-py uses, swallows a cancellation that
    # arrives as it finishes (github.com/python/cpython/issues/86296, fixed in 3.12).
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)
