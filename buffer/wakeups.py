"""Waits for an event in Redis without polling, and lets `close` end every wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from redis.asyncio import Redis

from buffer.connection import MAX_BLOCK_S


class BufferClosedError(RuntimeError):
    """The buffer was closed while someone waited in it."""


class Deadline:
    """A point in time on this process's monotonic clock."""

    __slots__ = ("_at",)

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


class WakeStreams:
    """Blocks on the run's wake streams, each wait on a connection of its own from the pool."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._closed = asyncio.Event()

    async def newest(self, key: str) -> str:
        """Id of the stream's last entry; take it before looking at what it tells about."""
        entries: Any = await self._redis.xrevrange(key, count=1)
        return entries[0][0].decode() if entries else "0-0"

    async def wait(self, key: str, after_id: str, timeout_s: float) -> bool:
        """Whether an entry after `after_id` came before the timeout or MAX_BLOCK_S was over."""
        block_ms = max(1, int(1000 * min(timeout_s, MAX_BLOCK_S)))
        return bool(await self.unless_closed(self._redis.xread({key: after_id}, 1, block_ms)))

    async def unless_closed(self, reply: Any) -> Any:
        """Awaits `reply`; raises BufferClosedError as soon as `close` is called."""
        waiting = asyncio.ensure_future(reply)
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({waiting, closing}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise BufferClosedError("the buffer was closed while this call waited in it")
        finally:
            for task in (waiting, closing):
                task.cancel()
            await asyncio.gather(waiting, closing, return_exceptions=True)

    def close(self) -> None:
        self._closed.set()
