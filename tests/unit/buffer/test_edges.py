"""What the model does not cover: keys, counters, bounds of work, repeated calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from buffer.errors import NotOwnerError
from buffer.redis.connection import connect
from buffer.redis.scripts import RunNotOpenError
from buffer.replay_buffer import BOUND, ReplayBuffer
from buffer.results import Lease, PushResult
from buffer.types import PromptRef
from configs.choices import OnFull, OnStale, Selector
from configs.schema import BufferConfig
from tests.support.invariants import find_violations

STEP: dict[str, Any] = {"share": 0, "num_shares": 1, "timeout_s": 0}


async def _fill(buffer: Any, make_group: Any, names: Any, version: int = 0) -> None:
    for name in names:
        assert await buffer.push(make_group(name, version)) is PushResult.stored


async def _lease(buffer: Any, step: int, version: int, num_groups: int) -> Lease:
    lease: Lease = await buffer.lease(step=step, version=version, num_groups=num_groups, **STEP)
    return lease


async def _train(buffer: Any, step: int, version: int, num_groups: int) -> Lease:
    lease = await _lease(buffer, step, version, num_groups)
    assert await buffer.consume(lease, lease.group_ids) == num_groups
    return lease


async def _group(buffer: ReplayBuffer, group_id: str) -> dict[str, str]:
    fields: Any = await buffer._redis.hgetall(buffer.keys.group(group_id))
    return {name.decode(): value.decode() for name, value in fields.items()}


async def _quarantine(buffer: ReplayBuffer, lease: Lease, group_id: str) -> int:
    arguments = (lease.lease_token, "undecodable", group_id)
    return int(await buffer._scripts.run("trainer/quarantine_group", *arguments))


# Rollout side ---------------------------------------------------------------------------------


async def test_running_groups_are_ordered_by_the_oldest_version_they_can_hold(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer()
    await buffer.publish_version(5)
    engines = {"e0": "5", "e1": "4"}
    await buffer._redis.hset(buffer.keys("engine_versions"), mapping=engines)
    assert (await buffer.admit("g", 0)).version == 5
    assert await buffer._redis.zscore(buffer.keys("running"), "g") == 4


async def test_repeated_take_retry_returns_the_same_prompt(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=0)
    await buffer.publish_version(1)
    assert await buffer.push(make_group("old", 0)) is PushResult.stale
    first = await buffer._scripts.run("rollout/take_retry", "token", "")
    assert first is not None
    assert await buffer._scripts.run("rollout/take_retry", "token", "") == first
    assert await buffer.take_retry() is None


async def test_duplicate_push_ends_a_credit_that_a_late_admission_took(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer()
    await buffer.admit("g", 0)
    await buffer.push(make_group("g"))
    await buffer.admit("g", 0)  # a retry of the admission that arrives late
    assert await buffer.push(make_group("g")) is PushResult.duplicate
    stats = await buffer.stats()
    assert (stats.running, stats.pushed, stats.tokens) == (0, 1, 16)
    assert stats.oldest_ready_age_s is not None and stats.oldest_ready_age_s < 10


async def test_group_is_kept_in_a_small_hash(checked_buffer: Any, make_group: Any) -> None:
    buffer = await checked_buffer()
    await buffer.push(make_group("g", 0, newest=2))
    assert await buffer._redis.object("encoding", buffer.keys.group("g")) == b"listpack"


async def _commit(buffer: ReplayBuffer, values: dict[str, bytes], num_chunks: int) -> Any:
    for key, value in values.items():
        await buffer._redis.set(key, value, px=60_000)
    arguments = ("g", 0, 0, "0:4", 10, 50, 4, 100, "sums", 0, 0, num_chunks, 0)
    (answer,) = await buffer._scripts.run("rollout/push_groups", BOUND, *arguments)
    return answer


async def test_payload_in_chunks_lives_and_dies_as_one(buffer_factory: Any) -> None:
    buffer = await buffer_factory()
    first = buffer.keys.payload("g")
    keys = [first, f"{first}:1", f"{first}:2"]
    assert await _commit(buffer, dict.fromkeys(keys, b"part"), 2) == [b"stored"]
    assert [await buffer._redis.pttl(key) for key in keys] == [-1] * 3
    await buffer.consume(await _lease_of_garbage(buffer), ["g"])
    await buffer.ack(1)
    assert await buffer._redis.exists(*keys) == 0


async def _lease_of_garbage(buffer: ReplayBuffer) -> Lease:
    """Holds group g, whose payload nothing could decode."""
    arguments = (1, 0, 1, 1, 60_000, "token", "")
    assert (await buffer._scripts.run("trainer/form_batch", *arguments, BOUND, 1, "0"))[
        0
    ] == b"leased"
    return Lease(
        step=1,
        version=0,
        lease_token="token",
        group_ids=("g",),
        groups=(),
        mask_below_version=None,
        deadline=0.0,
    )


async def test_chunk_that_expired_before_the_commit_is_asked_for_again(buffer_factory: Any) -> None:
    buffer = await buffer_factory()
    first = buffer.keys.payload("g")
    assert await _commit(buffer, {first: b"index", f"{first}:1": b"part"}, 2) == [b"missing"]
    assert await buffer._redis.pttl(first) > 0
    assert (await buffer.stats()).pushed == 0


@pytest.mark.parametrize("reason", ["stale", "lineage"])
async def test_push_that_is_refused_leaves_a_tombstone_only(
    checked_buffer: Any, make_group: Any, reason: str
) -> None:
    buffer = await checked_buffer(max_staleness=1, remember_s=50.0)
    await buffer.publish_version(3)
    group = make_group("g", 1, index=7, attempt=1)
    if reason == "lineage":
        await buffer.reconcile("b", step=1, version=0, resume_version=4)
        assert await buffer.push(group) is PushResult.abandoned_lineage
    else:
        assert await buffer.push(group) is PushResult.stale
    assert await buffer.push(group) is PushResult.duplicate
    assert await _group(buffer, "g") == {"state": f"dropped:{reason}"}
    assert 0 < await buffer._redis.ttl(buffer.keys.group("g")) <= 50
    assert await buffer._redis.exists(buffer.keys.payload("g")) == 0
    stats = await buffer.stats()
    assert (stats.pushed, stats.dropped, stats.bytes) == (1, {reason: 1}, 0)
    attempt = 2 if reason == "stale" else 1  # a rollback is not the prompt's fault
    assert await buffer.take_retry() == PromptRef(task="sums", index=7, attempt=attempt)


@pytest.mark.parametrize("on_stale", OnStale)
async def test_prompt_of_a_group_that_a_rollback_undid_runs_again_under_every_policy(
    checked_buffer: Any, make_group: Any, on_stale: OnStale
) -> None:
    buffer = await checked_buffer(max_staleness=9, max_retries=0, on_stale=on_stale)
    await buffer.publish_version(3)
    await buffer.push(make_group("ready", 3, index=7))
    await buffer.reconcile("b", step=1, version=2, resume_version=4)
    assert await buffer.push(make_group("late", 3, index=8)) is PushResult.abandoned_lineage
    assert (await buffer.stats()).dropped == {"lineage": 2}
    assert await buffer.take_retry() == PromptRef(task="sums", index=7)
    assert await buffer.take_retry() == PromptRef(task="sums", index=8)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1024, "<=1k"), (1025, "<=4k"), (16384, "<=16k"), (70_000, ">64k")]
)
async def test_drops_are_counted_by_length(
    checked_buffer: Any, make_group: Any, tokens: int, bucket: str
) -> None:
    buffer = await checked_buffer(max_staleness=0, on_stale=OnStale.drop)
    await buffer.publish_version(1)
    group = make_group("g", 0, num_tokens=tokens, size=1)
    assert await buffer.push(group) is PushResult.stale
    stats = await buffer.stats()
    assert stats.counters[f"dropped_len:{bucket}"] == 1 and stats.retries_waiting == 0
    assert stats.dropped_tokens == {"stale": tokens}


async def test_bytes_of_ready_and_leased_groups_take_capacity_and_no_others(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer()
    await buffer.push(make_group("a"))
    size = (await buffer.stats()).bytes
    await buffer._redis.hset(buffer.keys("settings"), "capacity_bytes", 2 * size)
    await buffer.push(make_group("b"))
    with pytest.raises(TimeoutError, match=f"full with 2 groups and {2 * size} bytes"):
        await buffer.push(make_group("c"), 0)
    with pytest.raises(ValueError, match=f"may hold {2 * size}: raise buffer.capacity_bytes"):
        await buffer.push(make_group("huge", num_tokens=10_000))
    await _train(buffer, 1, 0, 2)
    assert (await buffer.stats()).bytes_consumed == 2 * size
    await _fill(buffer, make_group, "cd")
    lease = await _lease(buffer, 2, 0, 2)
    with pytest.raises(TimeoutError):
        await buffer.push(make_group("e"), 0)
    assert await _quarantine(buffer, lease, "c") == 1
    assert await _quarantine(buffer, lease, "c") == 1  # sent again
    assert (await buffer.stats()).bytes_quarantined == size
    assert await buffer.push(make_group("e"), 0) is PushResult.stored


async def test_drop_stalest_evicts_more_than_one_call_may_for_a_large_group(
    buffer_factory: Any, make_group: Any
) -> None:
    buffer = await buffer_factory(on_full=OnFull.drop_stalest)
    await _fill(buffer, make_group, [f"g{number}" for number in range(2 * BOUND + 1)])
    held = (await buffer.stats()).bytes
    await buffer._redis.hset(buffer.keys("settings"), "capacity_bytes", held)
    large = make_group("large", num_tokens=held // 20)
    assert await buffer.push(large) is PushResult.stored
    stats = await buffer.stats()
    assert stats.dropped["full"] > BOUND and stats.bytes <= held
    assert await find_violations(buffer) == []


# Trainer side ---------------------------------------------------------------------------------


async def test_consumed_groups_are_counted_once_by_age_and_leave_tombstones(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer()
    await _fill(buffer, make_group, "abcd")
    lease = await _lease(buffer, 1, 0, 4)
    for _ in range(2):
        assert await buffer.consume(lease, "ab") == 2
    assert [await buffer.nack(lease, "half") for _ in range(2)] == [2, 0]
    assert [await buffer.ack(1) for _ in range(2)] == [2, 0]
    stats = await buffer.stats()
    assert stats.counters["nacked:half"] == 2 and stats.trained_by_staleness == {0: 2}
    assert stats.trained_by_age[1.0] == stats.trained_by_age[float("inf")] == 2
    assert await _group(buffer, "a") == {"state": "acked"}
    assert await buffer._redis.exists(buffer.keys("lease:1")) == 0


async def test_ack_works_in_bounded_parts(
    checked_buffer: Any, make_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.replay_buffer.BOUND", 2)
    buffer = await checked_buffer()
    await _fill(buffer, make_group, "abcde")
    await _train(buffer, 1, 0, 5)
    assert await buffer.ack(5) == 5
    with pytest.raises(ValueError, match="consumed before"):
        await _lease(buffer, 1, 0, 1)


async def test_validate_returns_groups_that_need_more_masking_and_keeps_those_with_a_gap(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=2, on_stale=OnStale.mask_tokens)
    await buffer.publish_version(4)
    for name, oldest, newest in (("more", 2, 4), ("fine", 4, 4), ("gone", 2, 3), ("gap", 1, 4)):
        await buffer.push(make_group(name, oldest, newest=newest))
    lease = await _lease(buffer, 1, 4, 4)
    assert lease.mask_below_version == 2
    await buffer.change_settings({"max_staleness": 0})
    assert await buffer.validate(lease, 4) == {"fine", "gap"}  # gap: only its 1 was masked
    assert (await _group(buffer, "more"))["state"] == "ready"
    assert (await _group(buffer, "gone"))["state"] == "dropped:stale"
    assert (await _lease(buffer, 2, 4, 1)).mask_below_version == 4


async def test_group_without_trainable_tokens_left_counts_as_masked(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(on_stale=OnStale.mask_tokens)
    await buffer.push(make_group("g", 0))
    lease = await _lease(buffer, 1, 0, 1)
    await buffer.consume(replace(lease, version=3, mask_below_version=2), ["g"])
    stats = await buffer.stats()
    assert (stats.tokens_masked, stats.tokens_trained) == (10, 0)
    assert stats.trained_by_staleness == {1: 1}


@pytest.mark.parametrize("selector", [Selector.freshest, Selector.fifo])
async def test_on_stale_wait_takes_groups_about_to_go_stale_first(
    checked_buffer: Any, make_group: Any, selector: Selector
) -> None:
    buffer = await checked_buffer(max_staleness=1, on_stale=OnStale.wait, selector=selector)
    await buffer.publish_version(1)
    for name, version in (("a", 1), ("b", 1), ("brink", 0), ("c", 1)):
        await buffer.push(make_group(name, version))
    second = "c" if selector is Selector.freshest else "a"
    assert (await _lease(buffer, 1, 1, 2)).group_ids == ("brink", second)


async def test_on_stale_wait_leaves_no_more_groups_of_a_version_than_later_steps_can_take(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=2, on_stale=OnStale.wait, groups_per_step=2)
    for name in "abcdef":  # as many as the limit allows, all at version 0
        await buffer.admit(name, 1)
    for name in "ab":
        await buffer.push(make_group(name, 0))
    await _train(buffer, 1, 0, 2)
    for name in "gh":
        await buffer.admit(name, 1)
        await buffer.push(make_group(name, 1))
    # If this step took g and h, four groups of version 0 would be left for the last one.
    for name in "cd":
        with pytest.raises(TimeoutError, match=f"for group {name}, which started at version 0"):
            await buffer.lease(step=2, version=1, num_groups=2, **STEP)
        await buffer.push(make_group(name, 0))
    assert (await _train(buffer, 2, 1, 2)).group_ids == ("c", "d")
    for name in "ef":
        await buffer.push(make_group(name, 0))
    assert (await _train(buffer, 3, 2, 2)).group_ids == ("e", "f")
    assert (await buffer.stats()).dropped == {}


@pytest.mark.parametrize("shards", [1, 3])
async def test_shortest_groups_are_taken_first_but_none_goes_stale_for_that(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    buffer = await checked_buffer(max_staleness=1, selector=Selector.shortest, shards=shards)
    await buffer.publish_version(1)
    for name, version, length in (
        *(("long", 1, 9), ("brink", 0, 99), ("short", 1, 5)),
        *(("longest", 1, 100), ("shortest", 1, 4), ("middling", 1, 6)),
    ):
        await buffer.push(make_group(name, version, num_tokens=length))
    assert (await _lease(buffer, 1, 1, 2)).group_ids == ("brink", "shortest")
    rest = await _lease(buffer, 2, 1, 3)
    assert rest.group_ids == ("short", "middling", "long")
    await buffer.nack(rest, "test")  # each to its place
    assert (await _lease(buffer, 3, 1, 4)).group_ids == (*rest.group_ids, "longest")


async def test_equally_short_groups_are_taken_in_the_order_of_arrival(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(selector=Selector.shortest)
    for name in ("c", "a", "b"):
        await buffer.push(make_group(name))
    assert (await _lease(buffer, 1, 0, 3)).group_ids == ("c", "a", "b")


# Takeovers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
async def test_zombie_trainer_changes_nothing(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    zombie = await checked_buffer(max_staleness=5, shards=shards)
    await zombie.reconcile("old", step=0, version=0, resume_version=0)
    for name in "abc":
        await zombie.push(make_group(name))
    await _train(zombie, 1, 0, 1)
    held = await _lease(zombie, 2, 0, 1)
    heir = await checked_buffer(shards=shards)
    await heir.reconcile("new", step=0, version=0, resume_version=1)
    for refused, message in (
        (zombie.ack(1, "old"), "acknowledges step 1, but another trainer"),
        (zombie.publish_version(9), "publishes version 9, but another trainer"),
        (_lease(zombie, 3, 0, 1), "leases step 3, but another trainer"),
        (zombie.reconcile("old", step=0, version=0, resume_version=2), "lineage='old'"),
    ):
        with pytest.raises(NotOwnerError, match=message):
            await refused
    assert await zombie.validate(held, 0) == frozenset()
    assert await zombie.consume(held, held.group_ids) == 0
    assert await zombie.renew(held) == await zombie.nack(held, "late") == 0
    stats = await heir.stats()
    assert (stats.ready, stats.acked, stats.consumed, stats.trainer_version) == (3, 0, 0, 1)
    await _train(heir, 1, 1, 1)
    assert await heir.ack(1, "new") == 1


async def test_trainer_that_died_while_it_published_is_resumed_above_that(
    buffer_factory: Any,
) -> None:
    buffer = await buffer_factory(shards=3)
    await buffer.shards[2].publish_version(1)  # the other two do not know it
    with pytest.raises(ValueError, match="resume_version=1: version 1 was published"):
        await buffer.reconcile("next", step=0, version=0, resume_version=1)
    assert (await buffer.stats()).lineage == ""
    await buffer.reconcile("next", step=0, version=0, resume_version=2)
    assert (await buffer.stats()).trainer_version == 2


async def test_poison_group_is_quarantined_by_a_restore_unless_the_checkpoint_has_it(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_attempts=1)
    await buffer.push(make_group("g"))
    await _lease(buffer, 1, 0, 1)
    done = await buffer.reconcile("b", step=0, version=0, resume_version=0)
    assert (done.requeued, done.quarantined) == (0, 1)
    done = await buffer.reconcile(
        "c", step=1, version=0, resume_version=0, consumed_group_ids=["g", "lost"]
    )
    assert done.acked == 1 and (await buffer.stats()).bytes_quarantined == 0
    # The server lost this one, and its producer may push it again.
    assert await buffer.push(make_group("lost")) is PushResult.duplicate


async def test_prompt_of_a_trained_group_that_the_server_lost_does_not_run_again(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer()
    for number in range(2):  # to a server that lost its last second both are being generated
        group_id = (await buffer.admit(f"0-{number}", 1)).group_id
        assert await buffer.begin(group_id, PromptRef(task="sums", index=number), 0, number + 1)
    await buffer.reconcile("a", step=1, version=0, resume_version=0, consumed_group_ids=["0-0"])
    assert await buffer.reclaim(0) == 1  # the one that is not in the checkpoint
    assert await buffer.take_retry() == PromptRef(task="sums", index=1, reruns=1)
    assert await buffer.take_retry() is None


async def test_zombie_changes_nothing_in_the_middle_of_a_takeover(
    checked_buffer: Any, make_group: Any
) -> None:
    zombie, heir = await checked_buffer(), await checked_buffer()
    await zombie.reconcile("a", step=0, version=0, resume_version=0)
    await _fill(zombie, make_group, "xy")
    held = await _lease(zombie, 1, 0, 2)
    await heir.begin_reconcile("b", 0, 0, 0, 0)
    assert await zombie.consume(held, held.group_ids) == 0
    assert await zombie.renew(held) == await zombie.nack(held, "late") == 0
    assert await zombie.validate(held, 0) == frozenset()
    for refused in (
        _lease(zombie, 1, 0, 2),
        zombie.ack(9, "a"),
        zombie.finish_reconcile("a", ["x"]),
        zombie.begin_reconcile("a", 0, 0, 0, 0),
    ):
        with pytest.raises(NotOwnerError):
            await refused
    with pytest.raises(TimeoutError):  # its groups are not back yet
        await _lease(heir, 1, 0, 2)
    await heir.finish_reconcile("b", [])
    assert await zombie.consume(held, held.group_ids) == 0
    assert len((await _lease(heir, 1, 0, 2)).groups) == 2


@pytest.mark.parametrize("selector", list(Selector))
async def test_interrupted_restore_is_finished_by_the_next(
    checked_buffer: Any, make_group: Any, selector: Selector
) -> None:
    buffer = await checked_buffer(max_staleness=9, selector=selector)
    await buffer.publish_version(4)
    for number in range(6):
        await buffer.push(make_group(f"g{number}", number % 4))
    await buffer.begin_reconcile("b", 3, 3, 5, 3)
    for _ in range(3):
        await buffer._scripts.run("trainer/reconcile_groups", "b", 1)
    # Pushes and sweeps go on meanwhile; nothing is dropped as stale by half of a renumbering.
    await buffer.push(make_group("late", 2))
    await buffer.change_settings({"max_staleness": 4})
    await buffer.sweep()
    # Its trainer dies; another one restores the same checkpoint.
    done = await buffer.reconcile("c", step=3, version=3, resume_version=6)
    assert done.dropped == 0
    moved = {f"g{number}": number % 4 + 3 for number in range(6)} | {"late": 5}
    for name, version in moved.items():
        assert (await _group(buffer, name))["min_version"] == str(version), name
    assert (await buffer.stats()).by_staleness == {0: 1, 1: 2, 2: 2, 3: 2}


async def test_push_from_before_a_rollback_is_renumbered_with_mask_tokens(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=2, on_stale=OnStale.mask_tokens)
    await buffer.publish_version(6)
    await buffer.reconcile("b", step=3, version=3, resume_version=7)
    for name, oldest, newest in (("both", 3, 7), ("new", 7, 7), ("old", 2, 2)):
        assert await buffer.push(make_group(name, oldest, newest=newest)) is PushResult.stored
    assert await buffer.push(make_group("older", 0)) is PushResult.stale
    late = make_group("gone", 3, newest=5)
    assert await buffer.push(late) is PushResult.abandoned_lineage
    assert (await buffer.stats()).by_staleness == {0: 2, 1: 1}
    for _ in range(2):  # also when it asks again
        lease = await _lease(buffer, 4, 7, 3)
        versions = {group.group_id: tuple(group.tokens_by_version) for group in lease.groups}
        assert versions == {"both": (7,), "new": (7,), "old": (6,)}


async def test_quarantined_groups_are_renumbered_when_they_are_released(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=9)
    await buffer.publish_version(5)
    await buffer.push(make_group("keep", 3))
    await buffer.push(make_group("gone", 4))
    lease = await _lease(buffer, 4, 5, 2)
    for name in lease.group_ids:
        await _quarantine(buffer, lease, name)
    await buffer.reconcile("b", step=3, version=3, resume_version=6)
    assert await buffer.release("keep") and await buffer.release("gone")
    assert (await _group(buffer, "keep"))["min_version"] == "6"
    assert (await _group(buffer, "gone"))["state"] == "dropped:lineage"


async def test_restoring_a_checkpoint_of_a_lost_branch_drops_all(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=9)
    await buffer.publish_version(5)
    await buffer.push(make_group("a", 3))
    await buffer.reconcile("b", step=3, version=3, resume_version=6)
    await buffer.push(make_group("b", 6))
    # Version 4 was given up by lineage b.
    done = await buffer.reconcile("c", step=4, version=4, resume_version=7)
    assert (done.dropped, (await _group(buffer, "a"))["state"]) == (2, "dropped:lineage")


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


async def test_groups_of_an_abandoned_lineage_are_dropped_and_counted(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=9, max_retries=0)
    for version in range(1, 5):
        await buffer.publish_version(version)
    await buffer.push(make_group("kept", 2))
    await buffer.push(make_group("mixed", 1, newest=2))
    await buffer.push(make_group("gone", 3, index=7))
    await buffer.push(make_group("half-gone", 2, newest=4))
    done = await buffer.reconcile("next", step=0, version=2, resume_version=5)
    assert done.dropped == 2
    stats = await buffer.stats()
    assert stats.dropped == {"lineage": 2} and stats.by_staleness == {0: 1, 1: 1}
    prompt = await buffer.take_retry()
    assert prompt is not None and prompt.attempt == 0  # no fault of its own: it costs no attempt
    assert await buffer.push(make_group("late", 4)) is PushResult.abandoned_lineage
    assert await buffer.push(make_group("late-but-good", 2)) is PushResult.stored
    assert await buffer.push(make_group("across", 2, newest=5)) is PushResult.stored
    lease = await buffer.lease(step=1, version=5, num_groups=4, **STEP)
    versions = {g.group_id: tuple(g.tokens_by_version) for g in lease.groups}
    assert versions == {"kept": (5,), "mixed": (4, 5), "late-but-good": (5,), "across": (5,)}
    assert await buffer.consume(lease, lease.group_ids) == 4
    assert (await buffer.stats()).max_staleness_trained == 1


async def test_group_that_is_leased_again_and_again_goes_to_quarantine(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_attempts=2)
    await buffer.push(make_group("poison"))
    for step in (1, 2):
        lease = await buffer.lease(step=step, version=0, num_groups=1, **STEP)
        await buffer.nack(lease, "the step crashed")
    (found,) = await buffer.quarantined()
    assert (found.group_id, found.attempts, found.num_tokens) == ("poison", 2, 16)
    assert await buffer.release("poison") and not await buffer.release("poison")
    for step in (3, 4):
        lease = await buffer.lease(step=step, version=0, num_groups=1, **STEP)
        await buffer.nack(lease, "the step crashed")
    assert await buffer.discard("poison") and not await buffer.discard("poison")
    stats = await buffer.stats()
    assert stats.dropped == {"discarded": 1} and stats.quarantined == stats.bytes == 0
    assert [event.event for event in await buffer.events("poison")][-1] == "dropped"


async def test_rollbacks_older_than_the_last_32_drop_their_versions(
    buffer_factory: Any, make_group: Any
) -> None:
    buffer = await buffer_factory(max_staleness=99)
    await buffer.push(make_group("kept", 0))
    for number in range(40):
        await buffer.reconcile(f"l{number}", step=0, version=number, resume_version=number + 1)
    gaps = (await buffer._redis.hget(buffer.keys("settings"), "gaps")).decode().split()
    assert len(gaps) == 32 and gaps[0].startswith("-1:")
    assert (await _group(buffer, "kept"))["min_version"] == "40"
    assert await buffer.push(make_group("late", 0)) is PushResult.abandoned_lineage
    assert await buffer.push(make_group("recent", 39)) is PushResult.stored
    assert (await _group(buffer, "recent"))["min_version"] == "40"
    assert await find_violations(buffer) == []


# One batch, one run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"), [(None, "payload_missing"), (b"LSHG damaged", "undecodable")]
)
async def test_undecodable_group_is_quarantined_and_the_rest_is_trained(
    buffer_factory: Any, make_group: Any, payload: bytes | None, reason: str
) -> None:
    buffer = await buffer_factory()
    await _fill(buffer, make_group, "ab")
    redis, key = buffer._redis, buffer.keys.payload("a")
    await (redis.delete(key) if payload is None else redis.set(key, payload))
    lease = await _lease(buffer, 0, 0, 2)
    assert [group.group_id for group in lease.groups] == ["b"]
    assert await buffer.validate(lease, 0) == {"b"}
    (found,) = await buffer.quarantined()
    assert (found.group_id, found.reason, found.attempts) == ("a", reason, 1)
    stats = await buffer.stats()
    assert (stats.quarantined, stats.leased) == (1, 1) and stats.is_conserved


async def test_uncommitted_payload_expires_by_itself(checked_buffer: Any, make_group: Any) -> None:
    buffer = await checked_buffer()
    redis, key = buffer._redis, buffer.keys.payload("g")
    await redis.set(key, b"orphan of a producer that died", px=5)
    while await redis.exists(key):
        await asyncio.sleep(0.005)
    assert await buffer.push(make_group("g")) is PushResult.stored
    assert await redis.pttl(key) == -1


async def test_lease_refuses_more_shares_than_groups(checked_buffer: Any) -> None:
    with pytest.raises(ValueError, match="num_shares <= num_groups"):
        await (await checked_buffer()).lease(
            step=1, version=0, num_groups=1, share=0, num_shares=2, timeout_s=0
        )


async def test_late_rank_gets_its_own_share_without_dropped_groups(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=1)
    await _fill(buffer, make_group, "ab")
    await buffer.publish_version(1)
    await _fill(buffer, make_group, "cd", version=1)
    shares = {"step": 5, "version": 1, "num_groups": 4, "num_shares": 2, "timeout_s": 0}
    early = await buffer.lease(share=0, **shares)
    await buffer.change_settings({"max_staleness": 0})
    assert await buffer.validate(early, 1) == {"c", "d"}
    late = await buffer.lease(share=1, **shares)
    assert late.group_ids == early.group_ids and late.lease_token == early.lease_token
    whole = {g.group_id for g in early.groups} | {g.group_id for g in late.groups}
    assert {"c", "d"} <= whole
    assert not {"a", "b"} & {g.group_id for g in late.groups}


async def test_lease_drops_ready_groups_past_max_staleness(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=1)
    await _fill(buffer, make_group, "ab")
    await buffer.publish_version(1)
    await _fill(buffer, make_group, "cd", version=1)
    # Version 2 is not published yet: the rank that leases may be faster than the one that tells.
    lease = await _lease(buffer, 0, 2, 2)
    assert set(lease.group_ids) == {"c", "d"}
    assert (await buffer.stats()).dropped == {"stale": 2}


async def test_tuning_remembers_the_largest_bound_that_was_ever_in_force(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer(max_staleness=2)
    assert (await buffer.stats()).max_staleness_largest == 0, "it was never changed"
    for value, largest in ((1, 2), (4, 4), (3, 4)):
        await buffer.change_settings({"max_staleness": value})
        stats = await buffer.stats()
        assert (stats.max_staleness, stats.max_staleness_largest) == (value, largest)
        assert await buffer.get_max_staleness() == value


async def test_sweep_takes_more_groups_than_one_script_may_move(
    checked_buffer: Any, buffer_factory: Any, make_group: Any
) -> None:
    buffer = await buffer_factory(max_staleness=0)
    await asyncio.gather(*(buffer.push(make_group(f"g{i}", size=1)) for i in range(300)))
    await buffer.publish_version(1)
    assert await buffer.sweep() == 300
    stats = await buffer.stats()
    assert stats.is_conserved and stats.dropped == {"stale": 300} and stats.bytes == 0


async def test_blocked_lease_takes_over_when_another_one_expires(
    checked_buffer: Any, make_group: Any
) -> None:
    dead = await checked_buffer(lease_timeout_s=1.0)
    await _fill(dead, make_group, "a")
    await _lease(dead, 0, 0, 1)
    async with asyncio.timeout(60):
        lease = await dead.lease(
            step=1, version=0, num_groups=1, share=0, num_shares=1, timeout_s=300
        )
    assert lease.group_ids == ("a",)


async def test_open_keeps_existing_settings(checked_buffer: Any) -> None:
    buffer = await checked_buffer(max_staleness=2, groups_per_step=4)
    await buffer.publish_version(9)
    await buffer.change_settings({"max_staleness": 5})
    again = await checked_buffer(max_staleness=1, groups_per_step=8)
    stats = await again.stats()
    assert (stats.trainer_version, stats.max_staleness, stats.groups_per_step) == (9, 5, 4)


async def test_run_that_was_not_opened_is_named(redis_url: str, make_group: Any) -> None:
    buffer = ReplayBuffer(await connect(redis_url), "no-such-run", BufferConfig())
    with pytest.raises(RunNotOpenError, match="'no-such-run' is not open"):
        await buffer.stats()
    with pytest.raises(RunNotOpenError, match="'no-such-run' is not open"):
        await buffer.push(make_group("g"))
    await buffer.close()


@pytest.mark.parametrize("shards", [1, 3])
async def test_groups_between_the_disk_and_a_copy_in_memory_stay_consumed(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    buffer = await checked_buffer(shards=shards, groups_per_step=2, max_staleness=9)
    await buffer.reconcile("a", step=0, version=0, resume_version=0)
    for number in range(8):
        await buffer.push(make_group(f"{number}-a", 0, index=number))
    steps: list[tuple[str, ...]] = []
    for step in (1, 2, 3, 4):
        lease = await buffer.lease(
            step=step, version=step - 1, num_groups=2, share=0, num_shares=1, timeout_s=1
        )
        steps.append(lease.group_ids)
        if step < 4:
            await buffer.publish_version(step)
            await buffer.consume(lease, lease.group_ids)
    assert await buffer.are_consumed([*steps[0], *steps[2]])
    assert not await buffer.are_consumed([*steps[2], *steps[3]]), "the last are leased"

    # The disk has step 1, though that is not acknowledged; the copy has step 2.
    found = await buffer.reconcile(
        "b",
        step=2,
        version=2,
        resume_version=4,
        consumed_group_ids=steps[0],
        durable_step=1,
    )
    assert (found.acked, found.requeued) == (2, 4)
    assert not await buffer.are_consumed(steps[0]) and await buffer.are_consumed(steps[1])
    stats = await buffer.stats()
    assert (stats.acked, stats.consumed, stats.ready, stats.leased) == (2, 2, 4, 0)
    again = await buffer.lease(step=3, version=4, num_groups=2, share=0, num_shares=1, timeout_s=1)
    assert not {*again.group_ids} & {*steps[0], *steps[1]}

    # The copy is lost too: the disk has all that is left.
    found = await buffer.reconcile("c", step=1, version=1, resume_version=5)
    assert (found.acked, found.requeued) == (0, 4)
    stats = await buffer.stats()
    assert (stats.acked, stats.consumed, stats.ready, stats.leased) == (2, 0, 6, 0)
