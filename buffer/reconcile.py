"""A trainer that starts or restores takes the buffer over, and fences the one before.

every shard   begin: the new lineage holds, so the old owner's verbs change nothing any more
every shard   name the groups that the checkpoint contains
every shard   acked, or ready again, or dropped, or renumbered; in bounded parts
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from redis.asyncio import Redis

from buffer.errors import NotOwnerError
from buffer.redis.replies import readable, setting_number
from buffer.results import Reconciled
from buffer.shard import Shard
from buffer.shards import ShardSet


async def take_over(
    redis: Redis,
    shards: ShardSet,
    lineage: str,
    *,
    step: int,
    version: int,
    resume_version: int,
    consumed_group_ids: Collection[str],
) -> Reconciled:
    """See ReplayBuffer.reconcile."""
    for shard in await _newest_first(redis, shards):
        begun = await shard.reconcile_begin(
            lineage, step=step, version=version, resume_version=resume_version
        )
        if begun.word == "behind":
            raise ValueError(
                f"resume_version={resume_version}: version {begun.trainer_version} was published "
                "before; resume above it, for a number never names other weights"
            )
        _check(begun.word != "not_owner", lineage)
    for is_owner in await shards.holding(
        sorted(consumed_group_ids), lambda shard, ids: shard.reconcile_acked(lineage, ids)
    ):
        _check(is_owner, lineage)
    acked = requeued = dropped = quarantined = 0
    for shard in shards.home_last:
        while (reply := await shard.reconcile(lineage)).is_more:
            pass
        _check(reply.is_owner, lineage)
        acked, requeued = acked + reply.acked, requeued + reply.requeued
        dropped, quarantined = dropped + reply.dropped, quarantined + reply.quarantined
    return Reconciled(acked=acked, requeued=requeued, dropped=dropped, quarantined=quarantined)


async def _newest_first(redis: Redis, shards: ShardSet) -> list[Shard]:
    """The shards by their trainer's version, so that one that refuses the new one is asked first.

    They differ if a trainer died while it published.
    """

    async def version(shard: Shard) -> int:
        found = await redis.hget(shard.keys("settings"), "trainer_version")
        return int(setting_number("trainer_version", readable(cast("bytes", found or b"0"))))

    versions = await shards.each(version)
    return [shards[k] for k in sorted(range(len(shards)), key=lambda k: -versions[k])]


def _check(is_owner: bool, lineage: str) -> None:
    if not is_owner:
        raise NotOwnerError(
            f"lineage={lineage!r}: a later trainer took this buffer over; end this one"
        )
