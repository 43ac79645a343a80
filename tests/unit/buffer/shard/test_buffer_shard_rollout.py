"""What rollout workers ask of a shard: credits, pushes, capacity, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer.redis.replies import Admitted, NoRoom, PushReply
from buffer.shard import BOUND
from buffer.types import PromptRef, Rerun
from configs.choices import OnFull, OnStale
from tests.support.invariants import find_violations_of_shard

PROMPT = PromptRef(task="sums", index=3)


async def test_credits_end_where_the_leash_says(open_shard: Any) -> None:
    shard = await open_shard(groups_per_step=2, max_staleness=0)
    assert await shard.admit("a", 60_000) == Admitted(0)
    assert await shard.admit("b", 60_000) == Admitted(0)
    refused = await shard.admit("c", 60_000)
    assert isinstance(refused, NoRoom) and (refused.in_use, refused.limit) == (2, 2)
    assert await shard.admit("b", 60_000) == Admitted(0)
    assert (await shard.stats()).running == 2


async def test_the_limit_is_shared_out_to_the_shards(open_shard: Any) -> None:
    shards = [
        await open_shard(groups_per_step=5, shard=k, num_shards=2, max_staleness=0) for k in (0, 1)
    ]
    room = []
    for shard in shards:
        count = 0
        while isinstance(await shard.admit(f"g{count}", 60_000), Admitted):
            count += 1
        room.append(count)
    assert room == [3, 2]


async def test_running_groups_are_ordered_by_the_oldest_version_they_can_hold(
    open_shard: Any,
) -> None:
    shard = await open_shard()
    await shard.publish(5)
    await shard.redis.hset(shard.keys("engine_versions"), mapping={"e0": "5", "e1": "4"})
    assert await shard.admit("g", 60_000) == Admitted(5)
    assert await shard.redis.zscore(shard.keys("running"), "g") == 4


async def test_a_credit_that_is_not_renewed_returns(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.admit("dead", 10)
    await shard.admit("alive", 10)
    assert await shard.renew_credits(["alive", "unknown"], 60_000) == 1
    await asyncio.sleep(0.02)
    assert (await shard.sweep()).credits == 1
    stats = await shard.stats()
    assert (stats.running, stats.abandoned_by_reason) == (1, {"expired": 1})
    assert (await shard.put("dead")).word == "stored"  # late, but a group is a group


async def test_abandon_counts_once_and_requeues_once(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.admit("g", 60_000)
    assert await shard.abandon("g", "stale", Rerun.as_stale, PROMPT)
    assert not await shard.abandon("g", "stale", Rerun.as_stale, PROMPT)
    stats = await shard.stats()
    assert (stats.running, stats.abandoned, stats.retries_waiting) == (0, 1, 1)
    assert await shard.take_retry("t1") == PromptRef(task="sums", index=3, attempt=1)
    assert await shard.take_retry("t1") == PromptRef(task="sums", index=3, attempt=1)
    assert await shard.take_retry("t2") is None


async def test_a_push_counts_once_and_gives_the_credit_back(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.admit("g", 60_000)
    assert (await shard.put("g", blocked_ms=1500)).word == "stored"
    await shard.admit("g", 60_000)  # a retry of the admission that arrives late
    assert (await shard.put("g", blocked_ms=1500)).word == "duplicate"
    stats = await shard.stats()
    assert (stats.running, stats.pushed, stats.bytes, stats.tokens) == (0, 1, 100, 10)
    assert (stats.push_blocked, stats.push_blocked_s) == (1, 1.5)
    assert stats.oldest_ready_age_s is not None and stats.oldest_ready_age_s < 10


async def test_a_group_is_kept_in_a_small_hash(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.put("g", 0, 1, 2)
    encoding = await shard.redis.object("encoding", shard.keys.group("g"))
    assert encoding == b"listpack"


async def test_a_payload_in_chunks_lives_and_dies_as_one(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.put("g", num_chunks=3)
    keys = [shard.keys.payload("g"), *(f"{shard.keys.payload('g')}:{n}" for n in (1, 2, 3))]
    assert [await shard.redis.pttl(key) for key in keys] == [-1] * 4
    await shard.train(1, 0, 1)
    await shard.ack(1)
    assert await shard.redis.exists(*keys) == 0


async def test_a_chunk_that_is_missing_is_asked_for_again(open_shard: Any) -> None:
    shard = await open_shard()
    first = shard.keys.payload("g")
    await shard.redis.set(f"{first}:2", b"here before, expires between SET and commit", px=1)
    await asyncio.sleep(0.01)
    shard.should_check = False
    arguments = ("g", 0, 0, "0:4", 10, 4, 100, "sums", 0, 0, 2, 0)
    message = shard._scripts.after_sets([(first, b"i")], 60_000, *arguments)
    assert await shard._scripts.exchange("rollout/push_groups", [128], [message]) == [[b"missing"]]
    assert await shard.redis.pttl(first) > 0


@pytest.mark.parametrize("reason", ["stale", "lineage"])
async def test_a_push_that_is_refused_leaves_a_tombstone_only(open_shard: Any, reason: str) -> None:
    shard = await open_shard(max_staleness=1, remember_s=50.0)
    await shard.publish(3)
    if reason == "lineage":
        await shard.restore("b", step=1, version=1, resume_version=4)
        assert (await shard.put("g", 2, index=7, attempt=1)).word == "abandoned_lineage"
    else:
        assert (await shard.put("g", 1, index=7, attempt=1)).word == "stale"
    assert (await shard.put("g", 1, index=7, attempt=1)).word == "duplicate"
    assert await shard.group("g") == {"state": f"dropped:{reason}"}
    assert 0 < await shard.redis.ttl(shard.keys.group("g")) <= 50
    assert await shard.redis.exists(shard.keys.payload("g")) == 0
    stats = await shard.stats()
    assert (stats.pushed, stats.dropped, stats.bytes) == (1, {reason: 1}, 0)
    assert stats.dropped_tokens == {reason: 10} and stats.dropped_by_length == {"<=1k": 1}
    attempt = 2 if reason == "stale" else 1  # a rollback is not the prompt's fault
    assert await shard.take_retry("t") == PromptRef(task="sums", index=7, attempt=attempt)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1024, "<=1k"), (1025, "<=4k"), (16384, "<=16k"), (70_000, ">64k")]
)
async def test_drops_are_counted_by_length(open_shard: Any, tokens: int, bucket: str) -> None:
    shard = await open_shard(max_staleness=0, on_stale=OnStale.drop)
    await shard.publish(1)
    assert (await shard.put("g", 0, tokens=tokens)).word == "stale"
    stats = await shard.stats()
    assert stats.dropped_by_length == {bucket: 1} and stats.retries_waiting == 0


# Capacity -------------------------------------------------------------------------------------


async def test_a_full_buffer_refuses_and_says_when_there_is_room(open_shard: Any) -> None:
    shard = await open_shard(capacity_groups=2)
    await shard.fill("ab")
    full = await shard.put("c")
    assert full == PushReply("full", full.last_wake, 2, 200, 2, None, "block")
    assert await shard.redis.exists(shard.keys.payload("c")) == 0
    assert not (await shard.has_space(100)).has_room
    assert (await shard.stats()).pushed == 2
    await shard.train(1, 0, 1)
    space = await shard.has_space(100)
    assert space.has_room and space.groups == 1 and space.last_wake != full.last_wake
    assert (await shard.put("c", blocked_ms=5)).word == "stored"
    assert (await shard.stats()).push_blocked == 1


async def test_bytes_of_ready_and_leased_groups_count_and_no_others(open_shard: Any) -> None:
    shard = await open_shard(capacity_bytes=250)
    await shard.fill("ab")
    assert (await shard.put("c")).word == "full"
    assert (await shard.put("c", size=50)).word == "stored"
    huge = await shard.put("d", size=251)
    assert (huge.word, huge.capacity_bytes) == ("too_large", 250)
    await shard.train(1, 0, 3)
    assert (await shard.stats()).bytes_consumed == 250
    await shard.fill("ef")
    formed = await shard.lease(2, 0, 2)
    assert (await shard.put("g")).word == "full"
    assert await shard.quarantine("o", "undecodable", formed.ids[0])
    assert (await shard.put("g")).word == "stored"


async def test_drop_stalest_makes_room(open_shard: Any) -> None:
    shard = await open_shard(capacity_groups=3, on_full=OnFull.drop_stalest)
    for name, version in (("old", 0), ("new", 2), ("mid", 1)):
        await shard.put(name, version)
    assert (await shard.put("d", 2)).word == "stored"
    assert await shard.state("old") == "dropped:full"
    stats = await shard.stats()
    assert (stats.ready, stats.dropped, stats.retries_waiting) == (3, {"full": 1}, 0)
    assert (await shard.put("d", 2)).word == "duplicate"


async def test_drop_stalest_evicts_for_a_large_group_in_bounded_calls(open_shard: Any) -> None:
    shard = await open_shard(capacity_bytes=300, on_full=OnFull.drop_stalest)
    shard.should_check = False
    for number in range(2 * BOUND + 1):
        await shard.put(f"g{number}", size=1)
    words = [(await shard.put("large", size=300)).word for _ in range(3)]
    assert words == ["again", "again", "stored"]
    assert (await shard.stats()).dropped == {
        "full": 2 * BOUND + 1
    } and await find_violations_of_shard(shard) == []


async def test_drop_stalest_waits_when_all_is_leased(open_shard: Any) -> None:
    shard = await open_shard(capacity_groups=1, on_full=OnFull.drop_stalest)
    await shard.fill("a")
    await shard.lease(1, 0, 1)
    reply = await shard.put("b")
    assert (reply.word, reply.on_full) == ("full", "drop_stalest")


async def test_mode_error_says_so(open_shard: Any) -> None:
    shard = await open_shard(capacity_groups=1, on_full=OnFull.error)
    await shard.fill("a")
    assert (await shard.put("b")).on_full == "error"
