"""Groups that get too old are masked in part, or waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer.results import PushResult
from configs.choices import OnStale

STEP: dict[str, Any] = {"share": 0, "num_shares": 1, "timeout_s": 0}


# mask_tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
async def test_over_age_tokens_are_masked_and_the_others_trained(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    buffer = await checked_buffer(max_staleness=1, on_stale=OnStale.mask_tokens, shards=shards)
    await buffer.publish_version(2)
    assert await buffer.push(make_group("half-old", 0, newest=2)) is PushResult.stored
    assert await buffer.push(make_group("fresh", 2)) is PushResult.stored
    assert await buffer.push(make_group("old", 0)) is PushResult.stale
    lease = await buffer.lease(step=0, version=2, num_groups=2, **STEP)
    assert lease.mask_below_version == 1
    groups = {group.group_id: group for group in lease.groups}
    assert dict(groups["half-old"].tokens_by_version) == {2: 4}  # 2 of 5 in each of 2 trajectories
    assert dict(groups["fresh"].tokens_by_version) == {2: 10}
    assert await buffer.validate(lease, 2) == {"half-old", "fresh"}
    await buffer.consume(lease, lease.group_ids)
    stats = await buffer.stats()
    assert (stats.tokens_masked, stats.tokens_trained) == (6, 14)
    assert stats.max_staleness_trained == 0 and stats.dropped == {"stale": 1}


# wait -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
async def test_trainer_waits_for_the_oldest_running_group(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    buffer = await checked_buffer(max_staleness=1, on_stale=OnStale.wait, shards=shards)
    slow = (await buffer.admit("slow", 0)).group_id
    await buffer.publish_version(1)
    for name in "ab":
        await buffer.push(make_group(name, 1))
    with pytest.raises(TimeoutError, match=f"waited 0 s .*held? back|for group {slow}, which"):
        await buffer.lease(step=0, version=1, num_groups=2, **STEP)
    waiting = asyncio.create_task(
        buffer.lease(step=0, version=1, num_groups=2, share=0, num_shares=1, timeout_s=10)
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await buffer.push(make_group(slow, 0))
    lease = await asyncio.wait_for(waiting, 2)
    assert lease.group_ids[0] == slow  # the last step that can train it
    assert (await buffer.stats()).dropped == {}


async def test_lease_stops_waiting_for_an_abandoned_group(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=0, on_stale=OnStale.wait)
    await buffer.admit("slow", 0)
    await buffer.push(make_group("a"))
    waiting = asyncio.create_task(
        buffer.lease(step=0, version=0, num_groups=1, share=0, num_shares=1, timeout_s=10)
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await buffer.abandon("slow", "test")
    assert (await asyncio.wait_for(waiting, 2)).group_ids == ("a",)


async def test_restore_makes_no_running_group_look_older(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=1, on_stale=OnStale.wait, groups_per_step=9)
    await buffer.publish_version(5)
    await buffer.admit("survives", 0)
    await buffer.publish_version(6)
    await buffer.admit("will-be-dropped", 0)
    await buffer.reconcile("next", step=0, version=5, resume_version=9)
    await buffer.push(make_group("a", 9))
    lease = await buffer.lease(step=1, version=9, num_groups=1, **STEP)
    await buffer.consume(lease, lease.group_ids)
    await buffer.publish_version(10)
    await buffer.push(make_group("b", 10))
    with pytest.raises(TimeoutError, match="for group survives, which started at version 9"):
        await buffer.lease(step=2, version=10, num_groups=1, **STEP)
    assert await buffer.push(make_group("survives", 5)) is PushResult.stored
    assert await buffer.push(make_group("will-be-dropped", 6)) is PushResult.abandoned_lineage


# Credits --------------------------------------------------------------------------------------


async def test_credit_that_is_not_renewed_expires(checked_buffer: Any) -> None:
    buffer = await checked_buffer(groups_per_step=2, max_staleness=0, lease_timeout_s=0.2)
    await buffer.admit("lives", 0)
    await buffer.admit("dead", 0)
    for _ in range(3):
        await asyncio.sleep(0.1)
        assert await buffer.renew_credits(["lives"]) == 1
    assert await buffer.sweep() == 1
    assert await buffer.renew_credits(["lives", "dead"]) == 1
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"expired": 1} and stats.running == 1


async def test_longer_leash_wakes_a_lease_that_waits_for_a_running_group(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=1, on_stale=OnStale.wait)
    await buffer.admit("slow", 0)
    await buffer.publish_version(1)
    await buffer.push(make_group("a", 1))
    request = {**STEP, "timeout_s": 10}
    waiting = asyncio.create_task(buffer.lease(step=0, version=1, num_groups=1, **request))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await buffer.set_max_staleness(5)
    assert (await asyncio.wait_for(waiting, 2)).group_ids == ("a",)
