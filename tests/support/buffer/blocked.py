"""Waits until clients wait at the server."""

from __future__ import annotations

import asyncio

from buffer.redis.client import BufferRedis


async def until_blocked(redis: BufferRedis, number: int, timeout_s: float = 60.0) -> None:
    """Returns when exactly `number` connections are in a blocking read at the server."""
    async with asyncio.timeout(timeout_s):
        while (await redis.info("clients"))["blocked_clients"] != number:
            await asyncio.sleep(0.01)
