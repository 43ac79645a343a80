"""How a shard is watched: its events, its numbers, and what `check` finds in a damaged one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from buffer.results import sum_stats
from configs.choices import OnFull, Selector
from tests.support.invariants import find_violations_of_shard


async def test_the_life_of_one_group_can_be_told(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.admit("g", 60_000)
    await shard.put("g")
    await shard.put("other")
    await shard.lease(7, 0, 2, "o1")
    await shard.nack("o1", "crash", ["g"])
    await shard.lease(8, 0, 1, "o2")
    await shard.consume(owner="o2", step=8, version=0, oldest=None, ids=["g"])
    await shard.ack(8)
    events = await shard.events("g")
    assert [(e.event, dict(e.detail)) for e in events] == [
        ("admitted", {"v": "0"}),
        ("pushed", {"v": "0"}),
        ("leased", {"s": "7", "o": "o1"}),
        ("nacked", {"r": "crash"}),
        ("leased", {"s": "8", "o": "o2"}),
        ("consumed", {"s": "8"}),
        ("acked", {"s": "8"}),
    ]
    assert all(e.group_id == "g" and abs(e.at - time.time()) < 60 for e in events)


async def test_groups_that_share_an_entry_of_the_audit_stream_have_lives_of_their_own(
    open_shard: Any,
) -> None:
    shard = await open_shard()
    names = [f"g{i}" for i in range(40)]
    await asyncio.gather(*(shard.put(name) for name in names))
    await shard.lease(1, 0, 39, "o")
    await shard.consume(owner="o", step=1, version=0, oldest=None, ids=names[:20])
    for number, name in enumerate(names):  # 'g1' is part of 'g10'
        told = [event.event for event in await shard.events(name)]
        assert (
            told
            == ["pushed", "leased", "consumed"][: 3 if number < 20 else 2 if number < 39 else 1]
        )
    assert await shard.redis.xlen(shard.keys("events")) < 10


async def test_pushes_of_one_batch_are_answered_each_for_itself(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=1, capacity_groups=3, on_full=OnFull.drop_stalest)
    await shard.publish(3)
    await shard.fill(["old"], 2)
    shard.should_check = False  # they are all in one script
    replies = await asyncio.gather(
        *(shard.put(name, version) for name, version in [("a", 3), ("stale", 1), ("a", 3)]),
        *(shard.put(name, 3) for name in ["b", "c", "old"]),
    )
    words = [reply.word for reply in replies]
    assert words == ["stored", "stale", "duplicate", "stored", "stored", "duplicate"]
    shard.should_check = True
    await shard.sweep()
    stats = await shard.stats()
    assert (stats.ready, stats.dropped) == (3, {"stale": 1, "full": 1})


async def test_the_audit_stream_is_bounded_and_can_be_off(open_shard: Any) -> None:
    shard = await open_shard(audit_length=100)
    shard.should_check = False
    for number in range(1500):
        await shard.admit(f"g{number % 3}", 60_000)
        await shard.abandon(f"g{number % 3}", "test")
    assert await shard.redis.xlen(shard.keys("events")) < 400
    await shard.redis.hset(shard.keys("settings"), "audit_length", "0")
    await shard.redis.delete(shard.keys("events"))
    await shard.put("quiet")
    assert await shard.redis.exists(shard.keys("events")) == 0
    assert await shard.events("quiet") == []


async def test_events_are_found_in_a_long_stream(open_shard: Any) -> None:
    shard = await open_shard()
    shard.should_check = False
    await shard.put("first")
    for number in range(2500):
        await shard.redis.xadd(shard.keys("events"), {"g": f"x{number}", "e": "pushed"})
    await shard.abandon("nobody", "test")
    await shard.lease(1, 0, 1)
    assert [e.event for e in await shard.events("first")] == ["pushed", "leased"]


async def test_numbers_of_shards_add_up(open_shard: Any) -> None:
    shards = [await open_shard(shard=k, num_shards=2, capacity_groups=9) for k in (0, 1)]
    for shard, names in zip(shards, ("ab", "c"), strict=True):
        await shard.fill(names)
        await shard.train(1, 0, 1)
    total = sum_stats([await shard.stats() for shard in shards])
    assert total.is_conserved
    assert (total.pushed, total.ready, total.consumed, total.capacity_groups) == (3, 1, 2, 9)
    assert total.trained_by_staleness == {0: 2} and total.trained_by_age[float("inf")] == 2
    assert total.by_staleness == {0: 1} and total.num_shards == 2
    assert total.max_staleness_trained == 0 and total.capacity_bytes is None


DAMAGE = {
    "hset group:a state leased": "state is leased but it is not in that set",
    "zrem ready a": "state is ready but it is not in that set",
    "zadd leased 5 a": "in the set leased but its state is ready",
    "zadd ready 5 a": "score in ready is not that of its versions",
    "del payload:a": "payload is missing",
    "expire payload:a 100": "payload expires",
    "expire group:a 100": "hash expires",
    "del group:a": "in the set ready but its state is unknown",
    "hdel group:a bytes": "lacks fields",
    "hset group:a state odd": "state odd does not exist",
    "hset group:a owner me": "owner does not go with its state ready",
    "set payload:x y": "orphan: ",
    "hset group:x owner y": "hash has no state",
    "hset group:x state acked": "more than a state that expires",
    "zadd running 0 x": "running without a deadline",
    "zadd credits 0 x": "not running",
    "zadd arrivals 0 a": "its place in arrivals is wrong",
    "zadd arrivals 0 x": "in arrivals but not ready",
    "zadd batches 3 3": "lease:3 and the set batches do not agree",
    "hset lease:4 owner x": "lease:4 and the set batches do not agree",
    "hincrby stats pushed 1": "were pushed, but",
    "hincrby stats bytes 1": "the counter bytes says 201, the groups that are held have 200",
    "hincrby stats tokens -1": "the counter tokens says 19",
}


@pytest.mark.parametrize("command", DAMAGE)
async def test_check_finds_damage(open_shard: Any, command: str) -> None:
    shard = await open_shard(selector=Selector.fifo)
    await shard.fill("ab")
    assert await find_violations_of_shard(shard) == []
    verb, name, *arguments = command.split()
    await shard.redis.execute_command(verb.upper(), shard.keys(name), *arguments)
    found = await find_violations_of_shard(shard)
    assert any(DAMAGE[command] in text for text in found), found


async def test_check_looks_at_more_groups_than_one_call_may(open_shard: Any) -> None:
    shard = await open_shard()
    shard.should_check = False
    for number in range(1200):
        await shard.put(f"g{number}")
    assert await find_violations_of_shard(shard) == []
    await shard.redis.delete(shard.keys.payload("g777"))
    assert len(await find_violations_of_shard(shard)) == 1
