"""Ends tasks of an event loop for sure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

CANCEL_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], again_s: float = CANCEL_AGAIN_S) -> None:
    """Cancel until they have ended; what they raise stays with them.

    Once may not be enough: asyncio.wait_for, through which redis-py sends, swallows a cancellation
    that comes at the moment it is done (github.com/python/cpython/issues/86296, fixed in 3.12).
    `again_s`: as long they may clear up undisturbed.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)
