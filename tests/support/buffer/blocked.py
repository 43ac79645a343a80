"""Waits for what the server says of itself: clients that wait, a log that is written."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from redis import Redis

from buffer.redis.client import BufferRedis


async def until_blocked(redis: BufferRedis, number: int, timeout_s: float = 60.0) -> None:
    """Returns when exactly `number` connections are in a blocking read at the server."""
    async with asyncio.timeout(timeout_s):
        while (await redis.info("clients"))["blocked_clients"] != number:
            await asyncio.sleep(0.01)


def until_written(url: str, timeout_s: float = 60.0) -> None:
    """Returns when the server at `url` has handed its whole log to the kernel, so that it outlives
    the process: a write waits up to two seconds while the disk is busy with the last sync."""
    deadline = time.monotonic() + timeout_s
    with Redis.from_url(url, decode_responses=True) as redis:
        while redis.info("persistence")["aof_buffer_length"]:
            assert time.monotonic() < deadline, f"the log was not written within {timeout_s:g} s"
            time.sleep(0.01)


async def still_waits(task: asyncio.Task[Any]) -> None:
    """Returns when the task has had time to block at the server, and does."""
    await asyncio.sleep(0.05)
    assert not task.done()
