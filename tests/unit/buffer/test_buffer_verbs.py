"""Each verb of the buffer at a real server; the law of conservation is checked after every call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer.redis.connection import connect
from buffer.redis.scripts import RunNotOpenError
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Lease, PushResult
from buffer.run_state import RunState

STEP: dict[str, Any] = {"share": 0, "num_shares": 1, "timeout_s": 0}


async def _fill(buffer: ReplayBuffer, make_group: Any, names: str, version: int = 0) -> None:
    for name in names:
        assert await buffer.push(make_group(name, version)) is PushResult.stored


async def test_group_goes_through_all_states(checked_buffer: Any, make_group: Any) -> None:
    buffer = await checked_buffer(groups_per_step=1)
    assert await buffer.admit("g", 1) == ("g", 0)
    assert (await buffer.stats()).running == 1
    assert await buffer.push(make_group("g")) is PushResult.stored
    stats = await buffer.stats()
    assert (stats.running, stats.ready, stats.by_staleness) == (0, 1, {0: 1})
    assert stats.bytes > 0 and stats.tokens == 16
    lease = await buffer.lease(step=0, version=0, num_groups=1, **STEP)
    assert lease.group_ids == ("g",) and lease.groups[0].group_id == "g"
    assert (await buffer.stats()).leased == 1
    assert await buffer.validate(lease, 0) == {"g"}
    await buffer.publish_version(1)
    assert await buffer.consume(lease, ["g"]) == 1
    stats = await buffer.stats()
    assert (stats.consumed, stats.max_staleness_trained, stats.tokens_trained) == (1, 0, 10)
    assert await buffer.ack(0) == 1
    stats = await buffer.stats()
    assert (stats.acked, stats.consumed, stats.bytes, stats.tokens) == (1, 0, 0, 0)


@pytest.mark.parametrize("state", ["ready", "leased", "consumed", "acked"])
async def test_late_retry_of_a_push_does_not_change_the_payload(
    checked_buffer: Any, redis_url: str, run_name: str, make_group: Any, state: str
) -> None:
    buffer = await checked_buffer()
    await buffer.push(make_group("g"))
    if state != "ready":
        lease = await buffer.lease(step=0, version=0, num_groups=1, **STEP)
    if state in ("consumed", "acked"):
        await buffer.consume(lease, ["g"])
    if state == "acked":
        await buffer.ack(0)
    assert await buffer.push(make_group("g")) is PushResult.duplicate
    redis = await connect(redis_url)
    expiry = await redis.pttl(f"{{leash:{run_name}}}:payload:g")
    assert expiry == (-2 if state == "acked" else -1)  # gone, or there without an expiry
    await redis.aclose()


@pytest.mark.parametrize(
    ("payload", "reason"), [(None, "payload_missing"), (b"LSHG damaged", "undecodable")]
)
async def test_undecodable_group_is_quarantined_and_the_rest_is_trained(
    buffer_factory: Any,
    redis_url: str,
    run_name: str,
    make_group: Any,
    payload: bytes | None,
    reason: str,
) -> None:
    buffer = await buffer_factory()
    await _fill(buffer, make_group, "ab")
    redis = await connect(redis_url)
    key = f"{{leash:{run_name}}}:payload:a"
    await (redis.delete(key) if payload is None else redis.set(key, payload))
    lease = await buffer.lease(step=0, version=0, num_groups=2, **STEP)
    assert [group.group_id for group in lease.groups] == ["b"]
    assert await buffer.validate(lease, 0) == {"b"}
    (found,) = await buffer.quarantined()
    assert (found.group_id, found.reason, found.attempts) == ("a", reason, 1)
    stats = await buffer.stats()
    assert (stats.quarantined, stats.leased) == (1, 1) and stats.is_conserved
    await redis.aclose()


async def test_uncommitted_payload_expires_by_itself(
    checked_buffer: Any, redis_url: str, run_name: str, make_group: Any
) -> None:
    buffer = await checked_buffer()
    redis = await connect(redis_url)
    key = f"{{leash:{run_name}}}:payload:g"
    await redis.set(key, b"orphan of a producer that died", px=5)
    while await redis.exists(key):
        await asyncio.sleep(0.005)
    assert await buffer.push(make_group("g")) is PushResult.stored
    assert await redis.pttl(key) == -1
    await redis.aclose()


async def test_ranks_share_one_batch_balanced_by_tokens(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer()
    for name, tokens in (("a", 40), ("b", 10), ("c", 20), ("d", 30)):
        await buffer.push(make_group(name, num_tokens=tokens))

    async def lease(share: int) -> Lease:
        got: Lease = await buffer.lease(
            step=0, version=0, num_groups=4, share=share, num_shares=2, timeout_s=1
        )
        return got

    first, second = await asyncio.gather(lease(0), lease(1))
    assert first.lease_token == second.lease_token
    assert first.group_ids == second.group_ids == ("a", "b", "c", "d")
    assert {g.group_id for g in first.groups} == {"a", "b"}
    assert {g.group_id for g in second.groups} == {"c", "d"}
    assert first.num_tokens == second.num_tokens == 100


async def test_late_rank_gets_its_own_share_without_dropped_groups(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=1)
    await _fill(buffer, make_group, "ab")
    await buffer.publish_version(1)
    await _fill(buffer, make_group, "cd", version=1)
    shares = {"step": 5, "version": 1, "num_groups": 4, "num_shares": 2, "timeout_s": 0}
    early = await buffer.lease(share=0, **shares)
    await buffer.set_max_staleness(0)
    assert await buffer.validate(early, 1) == {"c", "d"}
    late = await buffer.lease(share=1, **shares)
    assert late.group_ids == early.group_ids and late.lease_token == early.lease_token
    whole = {g.group_id for g in early.groups} | {g.group_id for g in late.groups}
    assert {"c", "d"} <= whole
    assert not {"a", "b"} & {g.group_id for g in late.groups}


async def test_lease_refuses_other_arguments_for_the_same_step(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer()
    await _fill(buffer, make_group, "abc")
    await buffer.lease(step=0, version=0, num_groups=2, **STEP)
    with pytest.raises(ValueError, match=r"step=0 was leased with .*= 0, 2, 1"):
        await buffer.lease(step=0, version=0, num_groups=3, **STEP)
    with pytest.raises(ValueError, match="num_shares <= num_groups"):
        await buffer.lease(step=1, version=0, num_groups=1, share=0, num_shares=2, timeout_s=0)


# Staleness ------------------------------------------------------------------------------------


async def test_lease_drops_ready_groups_past_max_staleness(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=1)
    await _fill(buffer, make_group, "ab")
    await buffer.publish_version(1)
    await _fill(buffer, make_group, "cd", version=1)
    # Version 2 is not published yet: the rank that leases may be faster than the one that tells.
    lease = await buffer.lease(step=0, version=2, num_groups=2, **STEP)
    assert set(lease.group_ids) == {"c", "d"}
    assert (await buffer.stats()).dropped == {"stale": 2}


async def test_tuning_remembers_the_largest_bound_that_was_ever_in_force(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer(max_staleness=2)
    assert (await buffer.stats()).max_staleness_largest == 0, "it was never changed"
    for value, largest in ((1, 2), (4, 4), (3, 4)):
        await buffer.set_max_staleness(value)
        stats = await buffer.stats()
        assert (stats.max_staleness, stats.max_staleness_largest) == (value, largest)
        assert await buffer.get_max_staleness() == value
    with pytest.raises(ValueError, match="max_staleness=-1"):
        await buffer.set_max_staleness(-1)


async def test_sweep_takes_more_groups_than_one_script_may_move(
    checked_buffer: Any, buffer_factory: Any, make_group: Any
) -> None:
    buffer = await buffer_factory(max_staleness=0)
    await asyncio.gather(*(buffer.push(make_group(f"g{i}", size=1)) for i in range(300)))
    await buffer.publish_version(1)
    assert await buffer.sweep() == 300
    stats = await buffer.stats()
    assert stats.is_conserved and stats.dropped == {"stale": 300} and stats.bytes == 0


# Leases and their tokens -----------------------------------------------------------------------


async def test_expired_lease_returns_and_its_token_is_fenced(
    checked_buffer: Any, make_group: Any
) -> None:
    zombie = await checked_buffer(lease_timeout_s=0.02)
    await _fill(zombie, make_group, "ab")
    old = await zombie.lease(step=0, version=0, num_groups=2, **STEP)
    await asyncio.sleep(0.03)
    healthy = await checked_buffer(lease_timeout_s=60)
    assert await healthy.sweep() == 2
    new = await healthy.lease(step=0, version=0, num_groups=2, **STEP)
    assert new.lease_token != old.lease_token and new.group_ids == old.group_ids
    assert await zombie.validate(old, 0) == frozenset()
    assert await zombie.consume(old, old.group_ids) == 0
    assert await zombie.nack(old, "late") == 0
    assert await healthy.consume(new, new.group_ids) == 2
    assert await zombie.consume(old, old.group_ids) == 0
    stats = await healthy.stats()
    assert (stats.expired, stats.consumed, stats.leased) == (2, 2, 0)


async def test_blocked_lease_takes_over_when_another_one_expires(
    checked_buffer: Any, make_group: Any
) -> None:
    dead = await checked_buffer(lease_timeout_s=0.1)
    await _fill(dead, make_group, "a")
    await dead.lease(step=0, version=0, num_groups=1, **STEP)
    async with asyncio.timeout(2):
        lease = await dead.lease(
            step=1, version=0, num_groups=1, share=0, num_shares=1, timeout_s=5
        )
    assert lease.group_ids == ("a",)


async def test_validate_renews_the_lease(checked_buffer: Any, make_group: Any) -> None:
    buffer = await checked_buffer(lease_timeout_s=0.2)
    await _fill(buffer, make_group, "a")
    lease = await buffer.lease(step=0, version=0, num_groups=1, **STEP)
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert await buffer.validate(lease, 0) == {"a"}
        assert await buffer.sweep() == 0
    await asyncio.sleep(0.25)
    assert await buffer.sweep() == 1


# Admission and versions -----------------------------------------------------------------------


async def test_engine_that_cannot_follow_does_not_stop_admission(
    checked_buffer: Any, redis_url: str, run_name: str
) -> None:
    buffer = await checked_buffer(groups_per_step=2, max_staleness=1)
    state = RunState(await connect(redis_url), run_name)
    await state.record_commits({"stuck": 0, "good": 0})
    await buffer.publish_version(1)
    await buffer.publish_version(2)  # no engine may have requests: both are 2 behind
    with pytest.raises(TimeoutError, match="0 may be"):
        await buffer.admit("a", 0)
    await state.record_commits({"good": 1})  # limit (1 + 1 - 1) * 2
    for name in "ab":
        await buffer.admit(name, 0)
    with pytest.raises(TimeoutError, match="2 may be"):
        await buffer.admit("c", 0)
    await state.record_commits({"good": 2})
    for name in "cd":
        await buffer.admit(name, 0)
    with pytest.raises(TimeoutError, match="4 may be"):
        await buffer.admit("e", 0)
    await state.close()


async def test_admission_with_max_staleness_0_waits_until_an_engine_serves_the_newest_version(
    checked_buffer: Any, redis_url: str, run_name: str
) -> None:
    buffer = await checked_buffer(groups_per_step=1, max_staleness=0)
    state = RunState(await connect(redis_url), run_name)
    await state.record_commits({"stuck": 0, "good": 0})
    await buffer.publish_version(1)
    waiting = asyncio.create_task(buffer.admit("a", 10))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await state.record_commits({"good": 1})
    async with asyncio.timeout(5):
        assert (await waiting).version == 1
    await state.close()


async def test_open_keeps_existing_settings(checked_buffer: Any) -> None:
    buffer = await checked_buffer(max_staleness=2, groups_per_step=4)
    await buffer.publish_version(9)
    await buffer.set_max_staleness(5)
    again = await checked_buffer(max_staleness=1, groups_per_step=8)
    stats = await again.stats()
    assert (stats.trainer_version, stats.max_staleness, stats.groups_per_step) == (9, 5, 4)


async def test_run_that_was_not_opened_is_named(redis_url: str, make_group: Any) -> None:
    buffer = ReplayBuffer(await connect(redis_url), "no-such-run", lease_timeout_s=1)
    with pytest.raises(RunNotOpenError, match="'no-such-run' is not open"):
        await buffer.stats()
    with pytest.raises(RunNotOpenError, match="'no-such-run' is not open"):
        await buffer.push(make_group("g"))
    await buffer.close()


async def test_scripts_come_back_after_the_server_forgot_them(
    checked_buffer: Any, redis_url: str, make_group: Any
) -> None:
    buffer = await checked_buffer()
    redis = await connect(redis_url)
    await redis.script_flush()
    assert await buffer.push(make_group("g")) is PushResult.stored
    await redis.script_flush()
    assert (await buffer.stats()).ready == 1
    await redis.aclose()
