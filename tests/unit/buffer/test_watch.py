"""Monitoring a buffer: the history of its groups, and checks of a damaged one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from buffer.results import PushResult
from configs.choices import OnFull, Selector
from tests.support.buffer.groups import lease_batch, make_group
from tests.support.invariants import find_violations


async def test_events_list_the_history_of_one_group(checked_buffer: Any) -> None:
    buffer = await checked_buffer()
    await buffer.admit("g", 0)
    await buffer.push(make_group("g"))
    await buffer.push(make_group("other"))
    first = await lease_batch(buffer, 7, 2)
    await buffer.nack(first, "crash")
    second = await lease_batch(buffer, 8)
    await buffer.consume(second, ["g"])
    await buffer.ack(8)
    events = await buffer.events("g")
    assert [(e.event, dict(e.detail)) for e in events] == [
        ("admitted", {"v": "0"}),
        ("pushed", {"v": "0"}),
        ("leased", {"s": "7", "o": first.lease_token}),
        ("nacked", {"r": "crash"}),
        ("leased", {"s": "8", "o": second.lease_token}),
        ("consumed", {"s": "8"}),
        ("acked", {"s": "8"}),
    ]
    assert all(e.group_id == "g" and abs(e.at - time.time()) < 60 for e in events)


@pytest.mark.parametrize("shards", [1, 3])
async def test_state_of_a_group_is_known_from_its_admission_on(
    buffer_factory: Any, shards: int
) -> None:
    buffer = await buffer_factory(1, shards=shards)
    name = (await buffer.admit("g", 0)).group_id
    states = [await buffer.group_state(name)]
    await buffer.push(make_group(name))
    states.append(await buffer.group_state(name))
    lease = await lease_batch(buffer)
    states.append(await buffer.group_state(name))
    await buffer.consume(lease, [name])
    states.append(await buffer.group_state(name))
    await buffer.ack(0)
    states.append(await buffer.group_state(name))
    assert states == ["running", "ready", "leased", "consumed", "acked"]
    assert await buffer.group_state("other") is None


async def test_groups_that_share_an_audit_entry_have_separate_histories(
    buffer_factory: Any,
) -> None:
    buffer = await buffer_factory()
    names = [f"g{i}" for i in range(40)]
    # The first push asks which server this is, and those beside it are let in one by one.
    await buffer.push(make_group(names[0]))
    await asyncio.gather(*(buffer.push(make_group(name)) for name in names[1:]))
    lease = await lease_batch(buffer, 1, 39)
    await buffer.consume(lease, lease.group_ids[:20])
    for name in names:  # 'g1' is part of 'g10'
        num_events = 1 + (name in lease.group_ids) + (name in lease.group_ids[:20])
        events = [event.event for event in await buffer.events(name)]
        assert events == ["pushed", "leased", "consumed"][:num_events]
    assert await buffer._redis.xlen(buffer.keys("events")) < len(names)


async def test_pushes_of_one_batch_are_answered_each_for_itself(buffer_factory: Any) -> None:
    buffer = await buffer_factory(max_staleness=1, capacity_groups=4, on_full=OnFull.drop_stalest)
    await buffer.announce_version(3)
    for name in ("old", "older"):
        await buffer.push(make_group(name, 2))
    pushes = (("a", 3), ("stale", 1), ("a", 3), ("b", 3), ("c", 3), ("old", 3))
    results = await asyncio.gather(*(buffer.push(make_group(*push)) for push in pushes))
    stored, duplicate = PushResult.stored, PushResult.duplicate
    assert results == [stored, PushResult.stale, duplicate, stored, stored, duplicate]
    stats = await buffer.stats()
    assert (stats.ready, stats.dropped) == (4, {"stale": 1, "full": 1})
    assert await find_violations(buffer) == []


async def test_audit_stream_is_bounded_and_can_be_off(buffer_factory: Any) -> None:
    buffer = await buffer_factory(audit_length=100)
    for number in range(300):
        await buffer.admit(f"g{number % 3}", 0)
        await buffer.abandon(f"g{number % 3}", "test")
    assert await buffer._redis.xlen(buffer.keys("events")) < 400
    await buffer._redis.hset(buffer.keys("settings"), "audit_length", "0")
    await buffer._redis.delete(buffer.keys("events"))
    await buffer.push(make_group("quiet"))
    assert await buffer._redis.exists(buffer.keys("events")) == 0
    assert await buffer.events("quiet") == []


async def test_events_are_found_in_a_long_stream(
    buffer_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.replay_buffer._EVENTS_AT_ONCE", 20)
    buffer = await buffer_factory()
    await buffer.push(make_group("first"))
    for number in range(90):
        await buffer._redis.xadd(buffer.keys("events"), {"g": f"x{number}", "e": "pushed"})
    await lease_batch(buffer, 1)
    assert [event.event for event in await buffer.events("first")] == ["pushed", "leased"]


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
    "hset group:a lease_token me": "lease_token does not go with its state ready",
    "set payload:x y": "orphan: ",
    "hset group:x lease_token y": "hash has no state",
    "hset group:x state acked": "more than a state that expires",
    "zadd running 0 x": "running without a deadline",
    "zadd credits 0 x": "not running",
    "zadd order 0 a": "its place in order is wrong",
    "zadd order 0 x": "in order but not ready",
    "zadd batches 3 3": "lease:3 and the set batches do not agree",
    "hset lease:4 lease_token x": "lease:4 and the set batches do not agree",
    "hincrby stats pushed 1": "were pushed, but",
    "hincrby stats bytes 1": "the counter bytes says",
    "hincrby stats tokens -1": "the counter tokens says 31",
}


@pytest.mark.parametrize("command", DAMAGE)
async def test_check_finds_damage(buffer_factory: Any, command: str) -> None:
    buffer = await buffer_factory(selector=Selector.fifo)
    for name in "ab":
        await buffer.push(make_group(name))
    assert await find_violations(buffer) == []
    verb, name, *arguments = command.split()
    await buffer._redis.execute_command(verb.upper(), buffer.keys(name), *arguments)
    found = await find_violations(buffer)
    assert any(DAMAGE[command] in text for text in found), found
