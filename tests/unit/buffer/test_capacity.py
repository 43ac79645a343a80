"""A full buffer: pushes wait, make room or fail, as `on_full` says."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from buffer.errors import BufferFullError
from buffer.redis.wakeups import MAX_BLOCK_S
from buffer.results import PushResult
from buffer.wire.codec import encode_group
from configs.choices import OnFull
from tests.support.buffer.blocked import still_waits
from tests.support.buffer.groups import lease_batch, make_group


async def test_blocked_producer_is_woken_when_a_group_is_consumed(checked_buffer: Any) -> None:
    buffer = await checked_buffer(groups_per_step=1, capacity_groups=1)
    await buffer.push(make_group("a"))
    waiting = asyncio.create_task(buffer.push(make_group("b"), 300))
    await still_waits(waiting)
    lease = await lease_batch(buffer)
    await still_waits(waiting)  # leased groups take room, too
    await buffer.consume(lease, ["a"])
    async with asyncio.timeout(MAX_BLOCK_S / 2):
        assert await waiting is PushResult.stored
    stats = await buffer.stats()
    assert (stats.ready, stats.consumed, stats.push_blocked) == (1, 1, 1)
    assert stats.push_blocked_s > 0.05
    assert stats.capacity_groups == 1 and stats.capacity_bytes is None


async def test_push_timeout_says_what_is_full(checked_buffer: Any) -> None:
    buffer = await checked_buffer(groups_per_step=1, capacity_groups=1)
    await buffer.push(make_group("a"))
    with pytest.raises(TimeoutError, match=r"no room for group b .* within 0\.05 s: .* 1 groups"):
        await buffer.push(make_group("b"), 0.05)
    assert await buffer.push(make_group("a"), 0) is PushResult.duplicate


async def test_blocked_pushes_queue_and_send_each_payload_once(
    checked_buffer: Any, redis: Any
) -> None:
    buffer = await checked_buffer(groups_per_step=1, capacity_groups=2)
    none_sent = await _num_sets(redis)
    waiting = [asyncio.create_task(buffer.push(make_group(f"g{i}"), 300)) for i in range(20)]
    async with asyncio.timeout(60):
        while (before := await _num_sets(redis)) < none_sent + 20:  # 18 of them were refused
            await asyncio.sleep(0.01)
    for step in range(18):
        lease = await lease_batch(buffer, step, timeout_s=60)
        await buffer.consume(lease, lease.group_ids)
    assert await asyncio.gather(*waiting) == [PushResult.stored] * 20
    sets = await _num_sets(redis) - before
    assert sets <= 18 + 5  # and the marker of the first push
    stats = await buffer.stats()
    assert (stats.ready, stats.consumed, stats.push_blocked) == (2, 18, 18)


async def _num_sets(redis: Any) -> int:
    return int((await redis.info("commandstats")).get("cmdstat_set", {"calls": 0})["calls"])


async def test_leased_groups_are_never_evicted(checked_buffer: Any) -> None:
    buffer = await checked_buffer(groups_per_step=1, capacity_groups=1, on_full=OnFull.drop_stalest)
    await buffer.push(make_group("a"))
    lease = await lease_batch(buffer)
    waiting = asyncio.create_task(buffer.push(make_group("b"), 300))
    await still_waits(waiting)
    await buffer.nack(lease, "test")
    assert await asyncio.wait_for(waiting, 60) is PushResult.stored
    assert (await buffer.stats()).dropped == {"full": 1}


async def test_on_full_error_raises(checked_buffer: Any) -> None:
    buffer = await checked_buffer(groups_per_step=1, capacity_groups=1, on_full=OnFull.error)
    await buffer.push(make_group("a"))
    with pytest.raises(
        BufferFullError, match=r"no room for group b .*1 of 1 groups.*on_full=block"
    ):
        await buffer.push(make_group("b"))
    assert (await buffer.stats()).pushed == 1


@pytest.mark.parametrize("shards", [1, 3])
async def test_capacity_of_a_running_job_is_shared_by_its_shards(
    buffer_factory: Any, shards: int
) -> None:
    buffer = await buffer_factory(groups_per_step=1, capacity_groups=shards, shards=shards)
    names = [f"g{number}" for number in range(8)]
    for name in names[:7]:
        with contextlib.suppress(TimeoutError):
            await buffer.push(make_group(name), 0)
    assert (await buffer.stats()).ready == shards
    waiting = asyncio.create_task(buffer.push(make_group("late"), 60))
    await buffer.change_settings({"capacity_groups": 7, "capacity_bytes": "null"})
    assert await waiting is PushResult.stored
    stats = await buffer.stats()
    assert (stats.capacity_groups, stats.capacity_bytes) == (7, None)
    await buffer.change_settings({"capacity_groups": "null"})
    for name in names:
        await buffer.push(make_group(name), 0)
    assert (await buffer.stats()).capacity_groups is None


async def test_drop_stalest_evicts_nothing_for_a_group_that_cannot_fit(checked_buffer: Any) -> None:
    size, big = (len(encode_group(make_group("a", num_tokens=n))) for n in (8, 100))
    buffer = await checked_buffer(
        groups_per_step=1, capacity_bytes=2 * size + big - 1, on_full=OnFull.drop_stalest
    )
    await buffer.push(make_group("a"))
    await buffer.push(make_group("b"))
    lease = await lease_batch(buffer, 0, 2)
    await buffer.push(make_group("c"))
    waiting = asyncio.create_task(buffer.push(make_group("d", num_tokens=100), 300))
    await still_waits(waiting)
    assert (await buffer.stats()).dropped == {}
    await buffer.consume(lease, lease.group_ids)
    assert await asyncio.wait_for(waiting, 60) is PushResult.stored
    assert (await buffer.stats()).dropped == {}
