"""Several shards as one buffer: global limits, global order, one batch for all ranks."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from buffer.errors import RunPausedError
from buffer.lease import BatchNotReady, Formed, LeaseRequest
from buffer.redis.keys import Keys
from buffer.run_state import RunState
from buffer.sharded import Locked, Record, Shard, ShardedReplayBuffer
from tests.support.buffer.blocked import still_waits, until_blocked
from tests.support.buffer.groups import lease_batch, make_group


async def test_admission_is_bounded_over_all_shards_together(
    checked_buffer: Any, redis: Any, run_name: str
) -> None:
    buffer = await checked_buffer(shards=3, groups_per_step=4, max_staleness=1)
    admitted = [(await buffer.admit(f"g{i}", 0)).group_id for i in range(8)]
    with pytest.raises(TimeoutError, match="8 groups are running, ready or leased and 8 may be"):
        await buffer.admit("one-more", 0)
    waiting = asyncio.create_task(buffer.admit("one-more", 300))
    await still_waits(waiting)
    await buffer.abandon(admitted[5], "test")
    assert (await asyncio.wait_for(waiting, 60)).group_id[-1] == admitted[5][-1]
    state = RunState(redis, run_name, shards=3)
    await state.record_commits({"engine": 0})
    await buffer.announce_version(1)  # the engine lags: room for one step less
    with pytest.raises(TimeoutError, match=r"8 groups are .* and 4 may be"):
        await buffer.admit("late", 0)


async def test_admission_among_shards_of_which_some_are_paused_waits_for_the_others(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer(shards=3, groups_per_step=1, max_staleness=2)
    for shard in buffer.shards[1:]:
        await shard.change_settings({"paused": "True"})
    assert (await buffer.admit("first", 0)).group_id == "first@0"
    waiting = asyncio.create_task(buffer.admit("second", 300))
    await still_waits(waiting)
    await buffer.shards[0].change_settings({"paused": "True"})
    with pytest.raises(RunPausedError):
        await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("shards", [1, 3])
async def test_settings_change_in_all_shards_or_none_if_one_is_not_as_expected(
    checked_buffer: Any, shards: int
) -> None:
    buffer = await checked_buffer(shards=shards, max_staleness=2)
    parts = buffer.shards if shards > 1 else [buffer]
    assert not await buffer.change_settings({"max_staleness": "5"}, {"max_staleness": "3"})
    assert {await part.setting("max_staleness") for part in parts} == {2}
    for _ in range(2):  # the reply to the first may be lost
        assert await buffer.change_settings({"max_staleness": "5"}, {"max_staleness": "2"})
    assert {await part.setting("max_staleness") for part in parts} == {5}


async def test_open_refuses_a_number_of_shards_other_than_the_runs(
    checked_buffer: Any, buffer_factory: Any
) -> None:
    await checked_buffer(shards=2)
    with pytest.raises(ValueError, match=r"buffer\.shards=3: .* the run in Redis 2"):
        await buffer_factory(shards=3)


@pytest.mark.parametrize("shards", [1, 3])
async def test_shares_are_balanced_by_what_attention_costs(
    buffer_factory: Any, shards: int
) -> None:
    buffer = await buffer_factory(shards=shards)
    # All have 60 tokens.
    await buffer.push(make_group("long", num_tokens=60, size=1))
    for name in "ab":
        await buffer.push(make_group(name, num_tokens=10, size=6))
    arguments: dict[str, Any] = {"step": 1, "version": 0, "num_groups": 3, "num_shares": 2}
    leases = [
        await buffer.lease(share=share, timeout_s=60, pair_cost=1.0, **arguments)
        for share in range(2)
    ]
    shares = [{group.group_id for group in lease.groups} for lease in leases]
    assert {"long"} in shares and {"a", "b"} in shares


@pytest.mark.parametrize("shards", [1, 3])
async def test_ranks_share_one_batch_and_a_restarted_one_gets_its_share_again(
    buffer_factory: Any, shards: int
) -> None:
    clients = [await buffer_factory(shards=shards) for _ in range(4)]
    arguments: dict[str, Any] = {"step": 3, "version": 0, "num_groups": 8, "num_shares": 4}
    waiting = [
        asyncio.create_task(client.lease(share=share, timeout_s=300, **arguments))
        for share, client in enumerate(clients)
    ]
    for i in range(9):
        await clients[0].push(make_group(f"g{i}"))
    leases = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert len({(lease.lease_token, lease.group_ids) for lease in leases}) == 1
    shares = [[group.group_id for group in lease.groups] for lease in leases]
    assert sorted(itertools.chain(*shares)) == sorted(leases[0].group_ids)
    restarted = await buffer_factory(shards=shards)
    again = await restarted.lease(share=2, timeout_s=0, **arguments)
    assert [group.group_id for group in again.groups] == shares[2]
    with pytest.raises(ValueError, match=r"step=3 was leased with .*= 0, 8, 4"):
        await lease_batch(restarted, 3, 8)


@pytest.fixture
async def shards(buffer_factory: Any) -> tuple[Shard, ...]:
    """Two shards of which the first holds groups a, b and c, leased in batches of 3."""
    buffer = await buffer_factory(shards=2, max_staleness=5)
    assert isinstance(buffer, ShardedReplayBuffer)
    return buffer.shards


REQUEST = LeaseRequest(
    step=1, version=0, num_groups=3, num_shares=1, lineage="", enough=3, pair_cost=0.0
)
BATCH = Formed("t1", ("a", "b", "far"), (16, 16, 5), frozenset(), None, ())


async def test_batch_is_taken_under_the_lock_of_its_step(shards: tuple[Shard, ...]) -> None:
    home = shards[0]
    for name in "abc":
        await home.push(make_group(name))
    for _ in range(2):  # each call is sent twice, as after a lost reply
        assert isinstance(await home.lock_step(REQUEST, "t1", 60_000), Locked)
    waiting = await home.lock_step(REQUEST, "t2", 60_000)
    assert isinstance(waiting, BatchNotReady) and waiting.until_ms > 0
    assert [key for key, _ in waiting.seen] == [home.keys.wake("forming")]
    peek = await home.peek(0, 2)
    assert [name for _, name in peek.candidates] == ["a", "b"] and peek.ready == 3
    for _ in range(2):
        taken = await home.take(REQUEST, "t1", 60_000, ["a", "b", "unknown"])
        assert taken.ids == ("a", "b") and taken.costs == (16, 16)
    assert await home._redis.hget(home.keys.group("a"), "leases") == b"1"
    assert not await home.record(REQUEST, msgspec.structs.replace(BATCH, lease_token="t2"))
    for _ in range(2):
        assert await home.record(REQUEST, BATCH)
    found = await home.lock_step(REQUEST, "t2", 60_000)
    assert isinstance(found, Record) and found.ids == ("a", "b", "far")
    assert found.costs == (16, 16, 5) and not found.is_done
    held = await home.still_leased("t1", ["a", "b", "c"])
    assert held.ids == {"a", "b"} and held.num_consumed == 0
    await home.mark_done(BATCH.lease(REQUEST, ()))
    done = await home.lock_step(REQUEST, "t2", 60_000)
    assert isinstance(done, Record) and done.is_done


async def test_take_refuses_what_went_stale_since_the_peek(shards: tuple[Shard, ...]) -> None:
    await shards[0].push(make_group("a"))
    await shards[0].announce_version(6)
    request = msgspec.structs.replace(REQUEST, version=6)
    assert (await shards[0].take(request, "t", 60_000, ["a"])).ids == ()


@pytest.mark.parametrize("has_taken", [False, True])
async def test_rank_that_dies_while_forming_a_batch_leaves_groups_that_return(
    checked_buffer: Any, has_taken: bool
) -> None:
    buffer = await checked_buffer(shards=3)
    for i in range(6):
        await buffer.push(make_group(f"g{i}@{i % 3}"))
    shards = buffer.shards
    request = LeaseRequest(0, 0, 6, 1, "", 6, 0.0)
    assert isinstance(await shards[0].lock_step(request, "dead", 200), Locked)
    if has_taken:
        for k in (1, 2):
            taken = await shards[k].take(request, "dead", 250, [f"g{k}@{k}"])
            assert taken.ids == (f"g{k}@{k}",)
    async with asyncio.timeout(60):
        lease = await lease_batch(buffer, 0, 6, timeout_s=300)
    assert len(lease.group_ids) == 6 and lease.lease_token != "dead"
    assert not await shards[0].unlock("dead")


async def test_batch_that_was_lost_as_a_whole_is_formed_again(checked_buffer: Any) -> None:
    hasty = await checked_buffer(shards=3, lease_timeout_s=1.0)
    for i in range(3):
        await hasty.push(make_group(f"g{i}@{i}"))
    old = await lease_batch(hasty, 0, 3)
    await asyncio.sleep(1.05)
    calm = await checked_buffer(shards=3)
    assert await calm.sweep() == 3
    new = await lease_batch(calm, 0, 3)
    assert new.lease_token != old.lease_token
    assert await hasty.consume(old, old.group_ids) == await hasty.nack(old, "late") == 0
    assert await calm.consume(new, new.group_ids) == 3


async def test_ranks_that_wait_for_groups_neither_poll_nor_wake_each_other(
    buffer_factory: Any, redis: Any
) -> None:
    clients = [await buffer_factory(shards=3) for _ in range(3)]
    waiting = [
        asyncio.create_task(lease_batch(client, 0, 9, share=i, num_shares=3, timeout_s=300))
        for i, client in enumerate(clients)
    ]
    await until_blocked(redis, 9)  # each of three ranks at each of three shards
    for i in range(5):
        await clients[0].push(make_group(f"g{i}@1"))
    await clients[0].flush(60)
    await until_blocked(redis, 9)
    before = (await redis.info("stats"))["total_commands_processed"]
    await asyncio.sleep(0.5)
    after = (await redis.info("stats"))["total_commands_processed"]
    assert after - before <= 1  # INFO itself
    for i in range(4):
        await clients[0].push(make_group(f"h{i}@2"))
    leases = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert len(leases[0].group_ids) == 9


async def test_ack_of_many_steps_leaves_no_record_of_them(
    buffer_factory: Any, redis: Any, run_name: str
) -> None:
    buffer = await buffer_factory(shards=2, groups_per_step=1, max_staleness=9)
    for step in range(70):
        await buffer.push(make_group(f"g{step}@1"))  # none at home, where the records are
        lease = await lease_batch(buffer, step)
        await buffer.consume(lease, lease.group_ids)
    assert await buffer.ack(69) == 70
    home = Keys(run_name)
    assert await redis.zcard(home("batches")) == 0
    assert await redis.hget(home("settings"), "acked_step") == b"69"


async def test_admission_that_is_cancelled_keeps_no_credit(buffer_factory: Any) -> None:
    buffer = await buffer_factory(shards=3, groups_per_step=1, max_staleness=30)
    for turns in range(40):
        admitting = asyncio.create_task(buffer.admit(f"g{turns}", 60))
        for _ in range(turns):
            await asyncio.sleep(0)
        admitting.cancel()
        try:
            await buffer.abandon((await admitting).group_id, "test")
        except asyncio.CancelledError:
            continue
    assert (await buffer.stats()).running == 0
