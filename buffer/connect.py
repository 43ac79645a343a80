"""Connects to a run's buffer, which has one shard or several."""

from __future__ import annotations

from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect_as
from buffer.replay_buffer import ReplayBuffer
from buffer.sharded import ShardedReplayBuffer
from configs.schema import BufferConfig

Buffer = ReplayBuffer
"""With one shard or several: ShardedReplayBuffer is a ReplayBuffer."""


def buffer_on(redis: BufferRedis, run: str, settings: BufferConfig) -> Buffer:
    """The buffer of a run. Its `close` also closes the connections of `redis`."""
    if settings.shards == 1:
        return ReplayBuffer(redis, run, settings)
    return ShardedReplayBuffer(redis, run, settings)


async def connect_buffer(
    url: str, run: str, settings: BufferConfig, *, waits: bool = False
) -> Buffer:
    """A buffer with its own connections to `url`. Raises BufferConnectionError.

    `waits`: for a server that is down now, at most for `outage_timeout_s`.
    """
    return buffer_on(await connect_as(url, settings, waits=waits), run, settings)
