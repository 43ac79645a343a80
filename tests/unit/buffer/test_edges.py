"""Tests beside the model: keys, counters, bounds of work, repeated calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from buffer.errors import NotOwnerError
from buffer.lease import Formed, LeaseRequest
from buffer.push import PushedGroup, PushReply
from buffer.redis.connection import connect
from buffer.redis.scripts import BOUND, RunNotOpenError, Scripts
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Lease, NewGroup, PushResult
from buffer.types import PromptRef, Rerun
from configs.choices import OnFull, OnStale, Selector
from configs.schema import BufferConfig
from tests.support.buffer.copies import Copies
from tests.support.buffer.groups import lease_batch, make_group, next_retry, train_batch
from tests.support.invariants import find_violations


async def _fill(buffer: Any, names: Any, version: int = 0) -> None:
    for name in names:
        assert await buffer.push(make_group(name, version)) is PushResult.stored


async def _group(buffer: ReplayBuffer, group_id: str) -> dict[str, str]:
    fields: Any = await buffer._redis.hgetall(buffer.keys.group(group_id))
    return {name.decode(): value.decode() for name, value in fields.items()}


async def _quarantine(buffer: ReplayBuffer, lease: Lease, group_id: str) -> bool:
    return await buffer.quarantine(lease.lease_token, group_id, "undecodable")


# Rollout side ---------------------------------------------------------------------------------


async def test_running_groups_are_ordered_by_the_oldest_version_they_can_hold(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer()
    await buffer.announce_version(5)
    engines = {"e0": "5", "e1": "4"}
    await buffer._redis.hset(buffer.keys("engine_versions"), mapping=engines)
    assert (await buffer.admit("g", 0)).version == 5
    assert await buffer._redis.zscore(buffer.keys("running"), "g") == 4


@pytest.mark.parametrize("is_again", [False, True])
@pytest.mark.parametrize("end", ["pushed", "filtered", "expired", "replaced"])
async def test_copy_of_an_admission_gives_no_credit_and_no_prompt_twice(
    checked_buffer: Any, monkeypatch: pytest.MonkeyPatch, end: str, is_again: bool
) -> None:
    copies = Copies(monkeypatch, are_twice=True)
    buffer = await checked_buffer()
    await buffer.reclaim(3)
    again = PromptRef(task="sums", index=9)
    if is_again:
        await buffer.admit("3-before", 0)
        await buffer.abandon("3-before", "stopped", Rerun.always, again)
    own = [PromptRef(task="sums", index=n) for n in (1, 2)]
    groups = [NewGroup(f"3-{n}", prompt, n) for n, prompt in enumerate(own, 1)]
    admissions = await buffer.admit_groups(groups, 0, worker=3)
    given = [(one.group_id, one.prompt) for one in admissions]
    assert given == ([("3-1", again)] if is_again else [("3-1", own[0]), ("3-2", own[1])])
    for group_id, _ in given:
        if end == "pushed":
            await buffer.push(make_group(group_id))
        if end == "filtered":
            await buffer.abandon(group_id, "zero_variance")
        if end == "expired":
            await buffer._redis.zadd(buffer.keys("credits"), {group_id: 1}, xx=True)
    await buffer.sweep()
    if end == "replaced":
        await (await checked_buffer()).reclaim(3)
    before = await buffer.stats()
    for send in copies.calls:
        await send()
    after = await buffer.stats()
    assert replace(after, oldest_ready_age_s=before.oldest_ready_age_s) == before
    assert (before.running, before.pushed) == (0, len(given) if end == "pushed" else 0)


async def test_late_reclaim_ends_no_group_and_a_worker_that_redis_has_forgotten_is_admitted(
    checked_buffer: Any,
) -> None:
    former, buffer = await checked_buffer(), await checked_buffer()
    for one in (former, buffer):
        assert await one.reclaim(3) == await one.reclaim(4) == 0
    await buffer.admit_groups([NewGroup("3-1")], 0, worker=3)
    assert await former.reclaim(3) == 0  # a copy that comes late
    assert (await buffer.stats()).running == 1
    calls = buffer.keys("calls")  # as it was a second before
    await buffer._redis.hdel(calls, buffer._caller_for(3))
    await buffer._redis.hset(calls, "3", former._caller_for(3))
    await buffer.admit_groups([NewGroup("3-2")], 0, worker=3)
    with pytest.raises(TimeoutError):
        await former.admit_groups([NewGroup("3-3")], 0, worker=3)


@pytest.mark.parametrize("is_dead", [False, True])
async def test_admission_that_arrives_after_it_was_called_off_or_its_worker_died_gives_nothing(
    checked_buffer: Any, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    buffer = await checked_buffer()
    await buffer.reclaim(3)
    copies, arrived = Copies(monkeypatch), asyncio.Event()
    send, network = Scripts._run, asyncio.Event()

    async def slow(scripts: Scripts, name: str, kind: Any, command: bytes) -> Any:
        if name == "rollout/admit_groups" and not arrived.is_set():
            copies.calls.append(lambda: send(scripts, name, kind, command))
            arrived.set()
            await network.wait()  # for ever
        return await send(scripts, name, kind, command)

    monkeypatch.setattr(Scripts, "_run", slow)
    group = NewGroup("3-1", PromptRef(task="sums", index=1), 1)
    admitting = asyncio.create_task(buffer.admit_groups([group], 60, worker=3))
    await arrived.wait()
    if is_dead:
        await (await checked_buffer()).reclaim(3)
        await copies.calls[0]()
    admitting.cancel()
    await asyncio.wait([admitting])
    await copies.calls[0]()
    if is_dead:
        with pytest.raises(TimeoutError, match="no room for group 3-2"):  # it lives after all
            await buffer.admit_groups([group._replace(group_id="3-2")], 0.01, worker=3)
    stats = await buffer.stats()
    assert (stats.running, stats.rerun, stats.retries_waiting) == (0, 0, 0)


async def test_group_is_kept_in_a_small_hash(checked_buffer: Any) -> None:
    buffer = await checked_buffer()
    await buffer.push(make_group("g", 0, newest=2))
    assert await buffer._redis.object("encoding", buffer.keys.group("g")) == b"listpack"


async def _commit(buffer: ReplayBuffer, values: dict[str, bytes], num_chunks: int) -> Any:
    for key, value in values.items():
        await buffer._redis.set(key, value, px=60_000)
    group = PushedGroup("g", 0, 0, "0:4", 10, 50, 4, 100, "sums", "0", 0, num_chunks, 0)
    (reply,) = await buffer._scripts.run(
        "rollout/push_groups", list[PushReply], bound=BOUND, groups=[group]
    )
    return reply.word


async def test_payload_in_chunks_lives_and_dies_as_one(buffer_factory: Any) -> None:
    buffer = await buffer_factory()
    first = buffer.keys.payload("g")
    keys = [first, f"{first}:1", f"{first}:2"]
    assert await _commit(buffer, dict.fromkeys(keys, b"part"), 2) == "stored"
    assert [await buffer._redis.pttl(key) for key in keys] == [-1] * 3
    await buffer.consume(await _lease_of_garbage(buffer), ["g"])
    await buffer.ack(1)
    assert await buffer._redis.exists(*keys) == 0


async def _lease_of_garbage(buffer: ReplayBuffer) -> Lease:
    """Holds group g, whose payload nothing could decode."""
    assert isinstance(await buffer._form(LeaseRequest(1, 0, 1, 1, "", 1, 0.0), "token"), Formed)
    return Lease(
        step=1,
        version=0,
        lease_token="token",
        group_ids=("g",),
        groups=(),
        mask_below_version=None,
    )


async def test_chunk_that_expired_before_the_commit_is_asked_for_again(buffer_factory: Any) -> None:
    buffer = await buffer_factory()
    first = buffer.keys.payload("g")
    assert await _commit(buffer, {first: b"index", f"{first}:1": b"part"}, 2) == "missing"
    assert await buffer._redis.pttl(first) > 0
    assert (await buffer.stats()).pushed == 0


@pytest.mark.parametrize("reason", ["stale", "lineage"])
async def test_push_that_is_refused_leaves_a_tombstone_only(
    checked_buffer: Any, reason: str
) -> None:
    buffer = await checked_buffer(max_staleness=1, remember_s=50.0)
    await buffer.announce_version(3)
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
    assert await next_retry(buffer) == PromptRef(task="sums", index=7, attempt=attempt)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1024, "<=1k"), (1025, "<=4k"), (16384, "<=16k"), (70_000, ">64k")]
)
async def test_drops_are_counted_by_length(checked_buffer: Any, tokens: int, bucket: str) -> None:
    buffer = await checked_buffer(max_staleness=0, on_stale=OnStale.drop)
    await buffer.announce_version(1)
    group = make_group("g", 0, num_tokens=tokens, size=1)
    assert await buffer.push(group) is PushResult.stale
    stats = await buffer.stats()
    assert stats.counters[f"dropped_len:{bucket}"] == 1 and stats.retries_waiting == 0
    assert stats.dropped_tokens == {"stale": tokens}


async def test_bytes_of_ready_and_leased_groups_take_capacity_and_no_others(
    checked_buffer: Any,
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
    await train_batch(buffer, 1, 2)
    assert (await buffer.stats()).bytes_consumed == 2 * size
    await _fill(buffer, "cd")
    lease = await lease_batch(buffer, 2, 2)
    with pytest.raises(TimeoutError):
        await buffer.push(make_group("e"), 0)
    assert await _quarantine(buffer, lease, "c") == 1
    assert await _quarantine(buffer, lease, "c") == 1  # sent again
    assert (await buffer.stats()).bytes_quarantined == size
    assert await buffer.push(make_group("e"), 0) is PushResult.stored


async def test_drop_stalest_evicts_more_than_one_call_may_for_a_large_group(
    buffer_factory: Any,
) -> None:
    buffer = await buffer_factory(on_full=OnFull.drop_stalest)
    await _fill(buffer, [f"g{number}" for number in range(2 * BOUND + 1)])
    held = (await buffer.stats()).bytes
    await buffer._redis.hset(buffer.keys("settings"), "capacity_bytes", held)
    large = make_group("large", num_tokens=held // 20)
    assert await buffer.push(large) is PushResult.stored
    stats = await buffer.stats()
    assert stats.dropped["full"] > BOUND and stats.bytes <= held
    assert await find_violations(buffer) == []


# Trainer side ---------------------------------------------------------------------------------


async def test_consumed_groups_are_counted_once_by_age_and_leave_tombstones(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer()
    await _fill(buffer, "abcd")
    lease = await lease_batch(buffer, 1, 4)
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
    checked_buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.replay_buffer.BOUND", 2)
    buffer = await checked_buffer()
    await _fill(buffer, "abcde")
    await train_batch(buffer, 1, 5)
    assert await buffer.ack(5) == 5
    with pytest.raises(ValueError, match="consumed before"):
        await lease_batch(buffer, 1)


async def test_validate_returns_groups_that_need_more_masking_and_keeps_those_with_a_gap(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer(max_staleness=2, on_stale=OnStale.mask_tokens)
    await buffer.announce_version(4)
    for name, oldest, newest in (("more", 2, 4), ("fine", 4, 4), ("gone", 2, 3), ("gap", 1, 4)):
        await buffer.push(make_group(name, oldest, newest=newest))
    lease = await lease_batch(buffer, 1, 4, version=4)
    assert lease.mask_below_version == 2
    await buffer.change_settings({"max_staleness": 0})
    assert await buffer.validate(lease, 4) == {"fine", "gap"}  # gap: only its 1 was masked
    assert (await _group(buffer, "more"))["state"] == "ready"
    assert (await _group(buffer, "gone"))["state"] == "dropped:stale"
    assert (await lease_batch(buffer, 2, version=4)).mask_below_version == 4


async def test_group_without_trainable_tokens_left_counts_as_masked(checked_buffer: Any) -> None:
    buffer = await checked_buffer(on_stale=OnStale.mask_tokens)
    await buffer.push(make_group("g", 0))
    lease = await lease_batch(buffer, 1)
    await buffer.consume(replace(lease, version=3, mask_below_version=2), ["g"])
    stats = await buffer.stats()
    assert (stats.tokens_masked, stats.tokens_trained) == (10, 0)
    assert stats.trained_by_staleness == {1: 1}


async def test_on_stale_wait_leaves_no_more_groups_of_a_version_than_later_steps_can_take(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer(max_staleness=2, on_stale=OnStale.wait, groups_per_step=2)
    for name in "abcdef":  # as many as the limit allows, all at version 0
        await buffer.admit(name, 1)
    for name in "ab":
        await buffer.push(make_group(name, 0))
    await train_batch(buffer, 1, 2)
    for name in "gh":
        await buffer.admit(name, 1)
        await buffer.push(make_group(name, 1))
    # If this step took g and h, four groups of version 0 would be left for the last one.
    for name in "cd":
        with pytest.raises(TimeoutError, match=f"for group {name}, which started at version 0"):
            await lease_batch(buffer, 2, 2, version=1)
        await buffer.push(make_group(name, 0))
    assert (await train_batch(buffer, 2, 2, version=1)).group_ids == ("c", "d")
    for name in "ef":
        await buffer.push(make_group(name, 0))
    assert (await train_batch(buffer, 3, 2, version=2)).group_ids == ("e", "f")
    assert (await buffer.stats()).dropped == {}


# Takeovers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
async def test_zombie_trainer_changes_nothing(checked_buffer: Any, shards: int) -> None:
    zombie = await checked_buffer(max_staleness=5, shards=shards)
    await zombie.reconcile("old", step=0, version=0, resume_version=0)
    for name in "abc":
        await zombie.push(make_group(name))
    await train_batch(zombie, 1)
    held = await lease_batch(zombie, 2)
    heir = await checked_buffer(shards=shards)
    await heir.reconcile("new", step=0, version=0, resume_version=1)
    for refused, message in (
        (zombie.ack(1, "old"), "acknowledges step 1, but another trainer"),
        (zombie.announce_version(9), "announces version 9, but another trainer"),
        (lease_batch(zombie, 3), "leases step 3, but another trainer"),
        (zombie.reconcile("old", step=0, version=0, resume_version=2), "lineage='old'"),
    ):
        with pytest.raises(NotOwnerError, match=message):
            await refused
    assert await zombie.validate(held, 0) == frozenset()
    assert await zombie.consume(held, held.group_ids) == 0
    assert await zombie.renew(held) == await zombie.nack(held, "late") == 0
    stats = await heir.stats()
    assert (stats.ready, stats.acked, stats.consumed, stats.trainer_version) == (3, 0, 0, 1)
    await train_batch(heir, 1, version=1)
    assert await heir.ack(1, "new") == 1


async def test_trainer_that_died_while_it_announced_a_version_is_resumed_above_that(
    buffer_factory: Any,
) -> None:
    buffer = await buffer_factory(shards=3)
    await buffer.shards[2].announce_version(1)  # the other two do not know it
    with pytest.raises(ValueError, match="resume_version=1: version 1 was announced"):
        await buffer.reconcile("next", step=0, version=0, resume_version=1)
    assert (await buffer.stats()).lineage == ""
    await buffer.reconcile("next", step=0, version=0, resume_version=2)
    assert (await buffer.stats()).trainer_version == 2


async def test_trained_group_that_the_server_lost_is_not_taken_again(checked_buffer: Any) -> None:
    buffer = await checked_buffer()
    await buffer.reconcile("b", step=1, version=0, resume_version=0, consumed_group_ids=["lost"])
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
    assert await next_retry(buffer) == PromptRef(task="sums", index=1, reruns=1)
    assert await next_retry(buffer) is None


async def test_zombie_changes_nothing_in_the_middle_of_a_takeover(checked_buffer: Any) -> None:
    zombie, heir = await checked_buffer(), await checked_buffer()
    await zombie.reconcile("a", step=0, version=0, resume_version=0)
    await _fill(zombie, "xy")
    held = await lease_batch(zombie, 1, 2)
    await heir.begin_reconcile("b", 0, 0, 0, 0)
    assert await zombie.consume(held, held.group_ids) == 0
    assert await zombie.renew(held) == await zombie.nack(held, "late") == 0
    assert await zombie.validate(held, 0) == frozenset()
    for refused in (
        lease_batch(zombie, 1, 2),
        zombie.ack(9, "a"),
        zombie.finish_reconcile("a", ["x"]),
        zombie.begin_reconcile("a", 0, 0, 0, 0),
    ):
        with pytest.raises(NotOwnerError):
            await refused
    with pytest.raises(TimeoutError):  # its groups are not back yet
        await lease_batch(heir, 1, 2)
    await heir.finish_reconcile("b", [])
    assert await zombie.consume(held, held.group_ids) == 0
    assert len((await lease_batch(heir, 1, 2)).groups) == 2


@pytest.mark.parametrize("selector", list(Selector))
async def test_interrupted_restore_is_finished_by_the_next(
    checked_buffer: Any, selector: Selector
) -> None:
    buffer = await checked_buffer(max_staleness=9, selector=selector)
    await buffer.announce_version(4)
    for number in range(6):
        await buffer.push(make_group(f"g{number}", number % 4))
    await buffer.begin_reconcile("b", 3, 3, 5, 3)
    for _ in range(3):
        await buffer._scripts.run("trainer/reconcile_groups", Any, lineage="b", bound=1)
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


@pytest.mark.parametrize("at_first", [OnStale.wait, OnStale.drop])
async def test_restore_makes_no_running_group_look_older(
    checked_buffer: Any, at_first: OnStale
) -> None:
    buffer = await checked_buffer(max_staleness=1, on_stale=at_first, groups_per_step=9)
    await buffer.announce_version(5)
    await buffer.admit("survives", 0)
    await buffer.announce_version(6)
    await buffer.admit("will-be-dropped", 0)
    await buffer.reconcile("next", step=0, version=5, resume_version=9)
    await buffer.change_settings({"on_stale": "wait"})
    await buffer.push(make_group("a", 9))
    lease = await lease_batch(buffer, 1, version=9)
    await buffer.consume(lease, lease.group_ids)
    await buffer.announce_version(10)
    await buffer.push(make_group("b", 10))
    with pytest.raises(TimeoutError, match="for group survives, which started at version 9"):
        await lease_batch(buffer, 2, version=10)
    assert await buffer.push(make_group("survives", 5)) is PushResult.stored
    assert await buffer.push(make_group("will-be-dropped", 6)) is PushResult.abandoned_lineage


async def test_rollbacks_older_than_the_last_32_drop_their_versions(buffer_factory: Any) -> None:
    buffer = await buffer_factory(max_staleness=99)
    await buffer.push(make_group("kept", 0))
    for number in range(40):
        await buffer.reconcile(f"l{number}", step=0, version=number, resume_version=number + 1)
    rollbacks = (await buffer._redis.hget(buffer.keys("settings"), "rollbacks")).split()
    assert len(rollbacks) == 32 and rollbacks[0].startswith(b"-1:")
    assert (await _group(buffer, "kept"))["min_version"] == "40"
    assert await buffer.push(make_group("late", 0)) is PushResult.abandoned_lineage
    assert await buffer.push(make_group("recent", 39)) is PushResult.stored
    assert (await _group(buffer, "recent"))["min_version"] == "40"
    assert await find_violations(buffer) == []


# One batch, one run --------------------------------------------------------------------------


async def test_lease_refuses_more_shares_than_groups(checked_buffer: Any) -> None:
    with pytest.raises(ValueError, match="num_shares <= num_groups"):
        await lease_batch(await checked_buffer(), 1, num_shares=2)


async def test_late_rank_gets_its_own_share_without_dropped_groups(checked_buffer: Any) -> None:
    buffer = await checked_buffer(max_staleness=1)
    await _fill(buffer, "ab")
    await buffer.announce_version(1)
    await _fill(buffer, "cd", version=1)
    shares = {"step": 5, "version": 1, "num_groups": 4, "num_shares": 2, "timeout_s": 0}
    early = await buffer.lease(share=0, **shares)
    await buffer.change_settings({"max_staleness": 0})
    assert await buffer.validate(early, 1) == {"c", "d"}
    late = await buffer.lease(share=1, **shares)
    assert late.group_ids == early.group_ids and late.lease_token == early.lease_token
    whole = {g.group_id for g in early.groups} | {g.group_id for g in late.groups}
    assert {"c", "d"} <= whole
    assert not {"a", "b"} & {g.group_id for g in late.groups}


async def test_lease_drops_ready_groups_past_max_staleness(checked_buffer: Any) -> None:
    buffer = await checked_buffer(max_staleness=1)
    await _fill(buffer, "ab")
    await buffer.announce_version(1)
    await _fill(buffer, "cd", version=1)
    # Version 2 is not announced yet: the rank that leases may be faster than rank 0.
    lease = await lease_batch(buffer, 0, 2, version=2)
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
        assert (await buffer.get_leash()).max_staleness == value


async def test_sweep_takes_more_groups_than_one_script_may_move(
    checked_buffer: Any, buffer_factory: Any
) -> None:
    buffer = await buffer_factory(max_staleness=0)
    await asyncio.gather(*(buffer.push(make_group(f"g{i}", size=1)) for i in range(300)))
    await buffer.announce_version(1)
    assert await buffer.sweep() == 300
    stats = await buffer.stats()
    assert stats.is_conserved and stats.dropped == {"stale": 300} and stats.bytes == 0


async def test_blocked_lease_takes_over_when_another_one_expires(checked_buffer: Any) -> None:
    dead = await checked_buffer(lease_timeout_s=1.0)
    await _fill(dead, "a")
    await lease_batch(dead)
    async with asyncio.timeout(60):
        lease = await lease_batch(dead, 1, timeout_s=300)
    assert lease.group_ids == ("a",)


async def test_open_keeps_existing_settings(checked_buffer: Any) -> None:
    buffer = await checked_buffer(max_staleness=2, groups_per_step=4)
    await buffer.announce_version(9)
    await buffer.change_settings({"max_staleness": 5})
    again = await checked_buffer(max_staleness=1, groups_per_step=8)
    stats = await again.stats()
    assert (stats.trainer_version, stats.max_staleness, stats.groups_per_step) == (9, 5, 4)


async def test_run_that_was_not_opened_is_named(redis_url: str) -> None:
    buffer = ReplayBuffer(await connect(redis_url), "no-such-run", BufferConfig())
    with pytest.raises(RunNotOpenError, match="'no-such-run' is not open"):
        await buffer.stats()
    with pytest.raises(RunNotOpenError, match="'no-such-run' is not open"):
        await buffer.push(make_group("g"))
    await buffer.close()


@pytest.mark.parametrize("shards", [1, 3])
async def test_groups_between_the_disk_and_a_copy_in_memory_stay_consumed(
    checked_buffer: Any, shards: int
) -> None:
    buffer = await checked_buffer(shards=shards, groups_per_step=2, max_staleness=9)
    await buffer.reconcile("a", step=0, version=0, resume_version=0)
    for number in range(8):
        await buffer.push(make_group(f"{number}-a", 0, index=number))
    steps: list[tuple[str, ...]] = []
    for step in (1, 2, 3, 4):
        lease = await lease_batch(buffer, step, 2, version=step - 1)
        steps.append(lease.group_ids)
        if step < 4:
            await buffer.announce_version(step)
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
    again = await lease_batch(buffer, 3, 2, version=4)
    assert not {*again.group_ids} & {*steps[0], *steps[1]}

    # The copy is lost too: the disk has all that is left.
    found = await buffer.reconcile("c", step=1, version=1, resume_version=5)
    assert (found.acked, found.requeued) == (0, 4)
    stats = await buffer.stats()
    assert (stats.acked, stats.consumed, stats.ready, stats.leased) == (2, 0, 6, 0)
