"""Makes a wait for Redis end when the task that waits is cancelled.

redis-py sends through `asyncio.wait_for`, which in Python 3.11 drops a cancellation that arrives in
the same turn of the loop in which the bytes are written. The command then goes on as if nothing had
been asked, and a worker that is told to stop blocks for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from redis.asyncio import Redis

T = TypeVar("T")

_ASK_AGAIN_S = 0.01


async def cancellable(reply: Awaitable[T]) -> T:
    """Awaits `reply` so that no cancellation is lost; the command may still have been applied."""
    task = asyncio.ensure_future(reply)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        while not task.done():  # one that was dropped is asked for again
            task.cancel()
            await asyncio.wait({task}, timeout=_ASK_AGAIN_S)
        if not task.cancelled():
            task.exception()  # seen: nobody else will ask
        raise
    return task.result()


class CancellableRedis(Redis):
    """A client whose single commands can be cancelled; wrap a pipeline's `execute` yourself."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await cancellable(super().execute_command(*args, **options))  # type: ignore[no-untyped-call]
