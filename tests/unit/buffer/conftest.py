"""Groups to push, and buffers that check all invariants after each of their verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from buffer.connect import Buffer, buffer_on
from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect
from configs.schema import BufferConfig
from tests.support.invariants import find_violations


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[BufferRedis]:
    """A connection to the server beside those of the buffers."""
    client = await connect(redis_url)
    yield client
    await client.aclose()


CHECKED_VERBS = (
    *("admit_groups", "abandon", "begin", "fail", "reclaim", "push", "renew_credits"),
    "keep_tokens",
    *("lease", "validate", "consume", "ack", "nack", "renew", "reconcile", "announce_version"),
    *("release", "discard", "sweep", "change_settings"),
)


def check_verbs(buffer: Any) -> None:
    """From now on each verb of the buffer asserts that no group was lost or doubled."""

    def checked(verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await verb(*args, **kwargs)
            stats = await buffer.stats()
            assert stats.is_conserved, stats
            assert await find_violations(buffer) == []
            return result

        return call

    for name in CHECKED_VERBS:
        setattr(buffer, name, checked(getattr(buffer, name)))


@pytest.fixture
async def checked_buffer(
    redis_url: str, run_name: str
) -> AsyncIterator[Callable[..., Awaitable[Buffer]]]:
    """Like `buffer_factory`, with the law checked after every verb."""
    opened: list[Buffer] = []

    async def make(groups_per_step: int = 4, **settings: Any) -> Buffer:
        config = BufferConfig(**settings)
        buffer = buffer_on(await connect(redis_url), run_name, config)
        check_verbs(buffer)
        opened.append(buffer)
        await buffer.open(config, groups_per_step)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()
