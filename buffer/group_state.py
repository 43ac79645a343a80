"""What the buffer knows of one group at this moment, for people who look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from redis.asyncio import Redis

from buffer.chunks import join_payload, num_chunks
from buffer.codec import decode_group
from buffer.keys import Keys
from buffer.replies import readable
from buffer.sharding import shard_of
from buffer.types import TrajectoryGroup


async def read_group(redis: Redis, run: str, group_id: str, num_shards: int) -> Mapping[str, str]:
    """The fields of the group's hash, `state` among them; empty if nothing is known of it.

    A running group has nothing but its state, and so has one that is acked or dropped.
    """
    keys = Keys(run, shard_of(group_id, num_shards))
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys(f"group:{group_id}"))
        pipe.zscore(keys("running"), group_id)
        fields, running = await pipe.execute()
    if not fields and running is not None:
        return {"state": "running"}
    return {readable(name): readable(value) for name, value in fields.items()}


async def read_payload(
    redis: Redis, run: str, group_id: str, num_shards: int
) -> TrajectoryGroup | None:
    """The group itself, with the versions that it was pushed with; None if it is not held (any
    more). Raises ValueError for bytes that are none."""
    key = Keys(run, shard_of(group_id, num_shards)).payload(group_id)
    first = cast("bytes | None", await redis.get(key))
    if first is None:
        return None
    rest = [f"{key}:{number}" for number in range(1, num_chunks(first) + 1)]
    chunks = cast("list[bytes | None]", await redis.mget(rest) if rest else [])
    if None in chunks:
        return None  # it was dropped between the two
    return decode_group(join_payload(first, chunks))
