"""Several shards as one buffer: global limits, global order, one batch for all ranks."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.run_state import RunState
from buffer.shard import Locked, Shard
from configs.choices import OnFull, Selector

STEP: dict[str, Any] = {"share": 0, "num_shares": 1, "timeout_s": 0}


async def test_groups_go_through_all_states_in_three_shards(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(shards=3, groups_per_step=6, max_staleness=0)
    ids = [(await buffer.admit(f"g{i}", 1)).group_id for i in range(6)]
    assert sorted(name.split("@")[1] for name in ids) == ["0", "0", "1", "1", "2", "2"]
    for name in ids:
        await buffer.push(make_group(name))
    lease = await buffer.lease(step=0, version=0, num_groups=6, **STEP)
    assert set(lease.group_ids) == set(ids) == {group.group_id for group in lease.groups}
    assert await buffer.validate(lease, 0) == set(ids)
    assert await buffer.renew(lease) == 6
    await buffer.publish_version(1)
    assert await buffer.consume(lease, ids) == await buffer.consume(lease, ids) == 6
    with pytest.raises(ValueError, match="consumed before"):
        await buffer.lease(step=0, version=0, num_groups=6, **STEP)
    assert await buffer.ack(0) == 6
    stats = await buffer.stats()
    assert (stats.pushed, stats.acked, stats.bytes, stats.num_shards) == (6, 6, 0, 3)
    assert stats.trainer_version == 1 and stats.trained_by_staleness == {0: 6}


async def test_admission_is_bounded_over_all_shards_together(
    checked_buffer: Any, redis_url: str, run_name: str
) -> None:
    buffer = await checked_buffer(shards=3, groups_per_step=4, max_staleness=1)
    admitted = [(await buffer.admit(f"g{i}", 0)).group_id for i in range(8)]
    with pytest.raises(TimeoutError, match="8 groups are running, ready or leased and 8 may be"):
        await buffer.admit("one-more", 0)
    waiting = asyncio.create_task(buffer.admit("one-more", 5))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await buffer.abandon(admitted[5], "test")
    assert (await asyncio.wait_for(waiting, 1)).group_id[-1] == admitted[5][-1]
    state = RunState(await connect(redis_url), run_name, shards=3)
    await state.record_commits({"engine": 0})
    await buffer.publish_version(1)  # the engine lags: room for one step less
    with pytest.raises(TimeoutError, match=r"8 groups are .* and 4 may be"):
        await buffer.admit("late", 0)
    await state.close()


async def test_an_id_that_would_leave_its_shard_in_doubt_is_refused(checked_buffer: Any) -> None:
    buffer = await checked_buffer(shards=2)
    with pytest.raises(ValueError, match="must not contain '@'"):
        await buffer.admit("g@1", 0)


async def test_another_number_of_shards_than_the_run_has_is_refused(
    checked_buffer: Any, buffer_factory: Any
) -> None:
    await checked_buffer(shards=2)
    with pytest.raises(ValueError, match=r"buffer\.shards=3: .* the run in Redis 2"):
        await buffer_factory(shards=3)


@pytest.mark.parametrize("selector", [Selector.stalest, Selector.freshest])
async def test_the_selector_holds_over_all_shards(
    checked_buffer: Any, make_group: Any, selector: Selector
) -> None:
    buffer = await checked_buffer(shards=3, selector=selector, max_staleness=9)
    versions = [5, 1, 4, 2, 6, 0, 3, 7]
    for number, version in enumerate(versions):
        await buffer.push(make_group(f"v{version}@{number % 3}", version))
    await buffer.publish_version(7)
    taken = []
    for step in range(4):
        lease = await buffer.lease(step=step, version=7, num_groups=2, **STEP)
        taken += [group_id[:2] for group_id in lease.group_ids]
    expected = [f"v{version}" for version in range(8)]
    assert taken == (expected if selector is Selector.stalest else expected[::-1])


async def test_a_dry_shards_part_comes_from_the_others(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(shards=3, groups_per_step=4)
    for name in "abcd":
        await buffer.push(make_group(f"{name}@1"))
    lease = await buffer.lease(step=0, version=0, num_groups=4, **STEP)
    assert lease.group_ids == ("a@1", "b@1", "c@1", "d@1")
    assert await buffer.consume(lease, lease.group_ids) == 4
    with pytest.raises(ValueError, match="step=0"):  # home knows, though it had none of them
        await buffer.lease(step=0, version=0, num_groups=4, **STEP)


async def test_ranks_share_one_batch_and_a_restarted_one_gets_its_share_again(
    checked_buffer: Any, make_group: Any
) -> None:
    clients = [await checked_buffer(shards=3) for _ in range(4)]
    arguments: dict[str, Any] = {"step": 3, "version": 0, "num_groups": 8, "num_shares": 4}
    waiting = [
        asyncio.create_task(client.lease(share=share, timeout_s=10, **arguments))
        for share, client in enumerate(clients)
    ]
    for i in range(9):
        await clients[0].push(make_group(f"g{i}"))
    leases = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert len({(lease.owner, lease.group_ids) for lease in leases}) == 1
    shares = [[group.group_id for group in lease.groups] for lease in leases]
    assert sorted(itertools.chain(*shares)) == sorted(leases[0].group_ids)
    restarted = await checked_buffer(shards=3)
    again = await restarted.lease(share=2, timeout_s=0, **arguments)
    assert [group.group_id for group in again.groups] == shares[2]
    with pytest.raises(ValueError, match=r"step=3 was leased with .*= 0, 8, 4"):
        await restarted.lease(step=3, version=0, num_groups=8, **STEP)


@pytest.mark.parametrize("has_taken", [False, True])
async def test_a_former_that_died_half_way_leaves_groups_that_come_back(
    checked_buffer: Any, redis_url: str, run_name: str, make_group: Any, has_taken: bool
) -> None:
    buffer = await checked_buffer(shards=3)
    for i in range(6):
        await buffer.push(make_group(f"g{i}@{i % 3}"))
    redis = await connect(redis_url)
    shards = [Shard(redis, Keys(run_name, k)) for k in range(3)]
    assert isinstance(await shards[0].lock_step(0, "dead", 200), Locked)
    if has_taken:
        for k in (1, 2):
            taken = await shards[k].take(0, [f"g{k}@{k}"], "dead", 250, 0)
            assert taken.ids == (f"g{k}@{k}",)
    async with asyncio.timeout(2):
        lease = await buffer.lease(
            step=0, version=0, num_groups=6, share=0, num_shares=1, timeout_s=5
        )
    assert len(lease.group_ids) == 6 and lease.owner != "dead"
    assert not await shards[0].unlock("dead")
    await redis.aclose()


async def test_a_batch_that_was_lost_as_a_whole_makes_way_for_a_new_one(
    checked_buffer: Any, make_group: Any
) -> None:
    hasty = await checked_buffer(shards=3, lease_timeout_s=0.02)
    for i in range(3):
        await hasty.push(make_group(f"g{i}@{i}"))
    old = await hasty.lease(step=0, version=0, num_groups=3, **STEP)
    await asyncio.sleep(0.05)
    calm = await checked_buffer(shards=3)
    assert await calm.sweep() == 3
    new = await calm.lease(step=0, version=0, num_groups=3, **STEP)
    assert new.owner != old.owner
    assert await hasty.consume(old, old.group_ids) == await hasty.nack(old, "late") == 0
    assert await calm.consume(new, new.group_ids) == 3


async def test_ranks_that_wait_for_groups_neither_poll_nor_wake_each_other(
    buffer_factory: Any, redis_url: str, make_group: Any
) -> None:
    clients = [await buffer_factory(shards=3) for _ in range(3)]
    waiting = [
        asyncio.create_task(
            client.lease(step=0, version=0, num_groups=9, share=i, num_shares=3, timeout_s=60)
        )
        for i, client in enumerate(clients)
    ]
    await asyncio.sleep(0.3)
    for i in range(5):
        await clients[0].push(make_group(f"g{i}@1"))
    await clients[0].flush(10)
    await asyncio.sleep(0.3)
    redis = await connect(redis_url)
    before = (await redis.info("stats"))["total_commands_processed"]
    await asyncio.sleep(0.5)
    after = (await redis.info("stats"))["total_commands_processed"]
    assert after - before <= 1  # INFO itself
    for i in range(4):
        await clients[0].push(make_group(f"h{i}@2"))
    leases = await asyncio.wait_for(asyncio.gather(*waiting), 2)
    assert len(leases[0].group_ids) == 9
    await redis.aclose()


async def test_capacity_is_shared_out_among_the_shards(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(
        shards=3, groups_per_step=1, capacity_groups=4, on_full=OnFull.drop_stalest
    )
    for k in range(3):
        for i in range(3):
            await buffer.push(make_group(f"g{i}@{k}"))
    stats = await buffer.stats()
    assert (stats.ready, stats.dropped, stats.capacity_groups) == (4, {"full": 5}, 4)


async def test_retries_of_every_shard_are_taken(checked_buffer: Any, make_group: Any) -> None:
    buffer = await checked_buffer(shards=3, max_staleness=0)
    await buffer.publish_version(1)
    for k in range(3):
        await buffer.push(make_group(f"old@{k}", 0, index=k))
    prompts = [await buffer.take_retry() for _ in range(4)]
    assert [p and p.index for p in prompts] == [0, 1, 2, None]


async def test_an_ack_of_many_steps_leaves_no_record_of_them(
    checked_buffer: Any, redis_url: str, run_name: str, make_group: Any
) -> None:
    buffer = await checked_buffer(shards=2, groups_per_step=1, max_staleness=9)
    for step in range(70):
        await buffer.push(make_group(f"g{step}@1"))  # none at home, where the records are
        lease = await buffer.lease(step=step, version=0, num_groups=1, **STEP)
        await buffer.consume(lease, lease.group_ids)
    assert await buffer.ack(69) == 70
    redis = await connect(redis_url)
    home = Keys(run_name)
    assert await redis.zcard(home("batches")) == 0
    assert await redis.hget(home("settings"), "acked_step") == b"69"
    await redis.aclose()


async def test_an_admission_that_is_cancelled_keeps_no_credit(buffer_factory: Any) -> None:
    buffer = await buffer_factory(shards=3, groups_per_step=1, max_staleness=30)
    for turns in range(40):
        admitting = asyncio.create_task(buffer.admit(f"g{turns}", 5))
        for _ in range(turns):
            await asyncio.sleep(0)
        admitting.cancel()
        try:
            await buffer.abandon((await admitting).group_id, "test")
        except asyncio.CancelledError:
            continue
    assert (await buffer.stats()).running == 0
