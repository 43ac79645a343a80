"""What the buffer knows of one group at this moment, for people who look."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis

from buffer.keys import Keys
from buffer.sharding import shard_of


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
    return {name.decode(): value.decode() for name, value in fields.items()}
