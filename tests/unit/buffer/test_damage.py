"""Keys overwritten by other clients: no endless loop, no error without an explanation."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from buffer.connect import Buffer
from buffer.dump.export import dump_buffer
from buffer.errors import BufferFullError, NotOwnerError
from buffer.redis.client import BufferRedis, DamagedRunError
from buffer.redis.keys import Keys
from buffer.redis.scripts import _FOLDER
from buffer.run_state import RunState
from buffer.shard_routes import shard_of
from buffer.types import PromptRef, Rerun
from tests.support.buffer.groups import lease_batch, make_group
from tests.support.invariants import find_violations

BufferFactory = Callable[..., Awaitable[Buffer]]
HOSTILE = (b"inf", b"-inf", b"nan", b"1e300", b"-1", b"9" * 400, b"abc", b"", b"\xff\xfe\x1b[2J")
EXPLAINED = (DamagedRunError, TimeoutError, ValueError, BufferFullError, NotOwnerError)
"""A ValueError of ours, not one of int() or decode(): see `_is_ours`."""


@pytest.mark.parametrize("score", ["inf", "-inf", 1e300, -1e300, 2.0**60, -5.0, 0.5])
async def test_stats_end_whatever_the_scores_in_ready_are(
    buffer_factory: BufferFactory, run_name: str, redis: Redis, score: Any
) -> None:
    buffer = await buffer_factory(groups_per_step=2)
    await buffer.push(make_group("good"))
    await redis.zadd(Keys(run_name)("ready"), {"bad": score})

    async with asyncio.timeout(60):  # the server itself stands still, so only its absence is seen
        stats = await buffer.stats()

    assert stats.ready == 2 and stats.by_staleness[0] >= 1


async def test_stats_show_a_run_with_garbled_counters(
    buffer_factory: BufferFactory, run_name: str, redis: Redis
) -> None:
    buffer = await buffer_factory(groups_per_step=2)
    keys = Keys(run_name)
    for name in ("settings", "stats", "engine_versions"):
        for i, value in enumerate(HOSTILE):
            await redis.hset(keys(name), b"\xff\x1b%d" % i, value)  # type: ignore[arg-type]
    await redis.hset(keys("stats"), "trained_age:evil", "1")
    await redis.hset(keys("stats"), "trained_staleness:evil", "1")
    assert (await buffer.stats()).pushed == 0


@pytest.mark.parametrize("name", ["trainer_version", "max_staleness", "groups_per_step"])
@pytest.mark.parametrize("value", [b"\xff", b"abc", b"inf"])
async def test_setting_that_cannot_be_read_is_named(
    buffer_factory: BufferFactory, run_name: str, redis: Redis, name: str, value: bytes
) -> None:
    buffer = await buffer_factory(groups_per_step=2)
    await redis.hset(Keys(run_name)("settings"), name, value)  # type: ignore[arg-type]
    with pytest.raises(DamagedRunError, match=name):
        await buffer.stats()
        await buffer.admit("a", 0.1)


async def test_lease_puts_a_group_without_its_hash_into_quarantine(
    buffer_factory: BufferFactory, run_name: str, redis: Redis, shards: int
) -> None:
    buffer = await buffer_factory(groups_per_step=2, shards=shards)
    names = []
    for i in range(4):
        names.append((await buffer.admit(f"g{i}", 60)).group_id)
        await buffer.push(make_group(names[-1]))
    gone, overwritten = names[0], names[1]
    for shard in range(shards):
        await redis.unlink(Keys(run_name, shard).group(gone))
        await redis.unlink(Keys(run_name, shard).group(overwritten))
    where = shard_of(overwritten, shards)
    await redis.lpush(Keys(run_name, where).group(overwritten), "a list")

    batch = await lease_batch(buffer, 1, 2)

    assert set(batch.group_ids) == set(names[2:])
    put_away = {group.group_id: group.reason for group in await buffer.quarantined()}
    assert put_away == {gone: "damaged", overwritten: "damaged"}
    assert (await buffer.stats()).is_conserved
    with pytest.raises(ValueError, match="discard it"):
        await buffer.release(gone)
    assert await buffer.discard(gone) and await buffer.discard(overwritten)
    assert (await buffer.stats()).is_conserved and (await buffer.stats()).bytes_quarantined == 0


@pytest.fixture(params=[1, 2])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


async def test_lease_survives_names_that_no_push_could_give(
    buffer_factory: BufferFactory, run_name: str, redis: Redis, shards: int
) -> None:
    buffer = await buffer_factory(groups_per_step=2, shards=shards)
    for i in range(2):
        await buffer.push(make_group((await buffer.admit(f"g{i}", 60)).group_id))
    bad = {b"\xff\xfe": -2, b"two words": -1, "none-of-this-shard": 0.25, "x\x1b[2J": 0.5}
    for shard in range(shards):
        await redis.zadd(Keys(run_name, shard)("ready"), bad)
    try:
        async with asyncio.timeout(60):
            batch = await lease_batch(buffer, 1, 2, timeout_s=300 if shards == 1 else 0.02)
        assert len(batch.groups) == 2
    except TimeoutError as error:
        assert shards == 2  # a name that belongs to another shard remains, and is reported
        assert "step 1 waited 0.02 s" in str(error)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hash", "undecodable"),
        ("list", "undecodable"),
        ("garbage", "undecodable"),
        ("missing", "payload_missing"),
    ],
)
async def test_group_without_a_payload_of_its_own_goes_to_quarantine(
    buffer_factory: BufferFactory, run_name: str, redis: Redis, kind: str, reason: str
) -> None:
    buffer = await buffer_factory(groups_per_step=2)
    for name in ("a", "b"):
        await buffer.push(make_group(name))
    key = Keys(run_name).payload("a")
    await redis.unlink(key)
    if kind == "hash":
        await redis.hset(key, "a", "b")  # type: ignore[misc]
    elif kind == "list":
        await redis.lpush(key, "a")  # type: ignore[misc]
    elif kind == "garbage":
        await redis.set(key, b"LSHG damaged")
    lease = await lease_batch(buffer, 1, 2)
    assert [group.group_id for group in lease.groups] == ["b"]
    assert await buffer.validate(lease, 0) == {"b"}
    (found,) = await buffer.quarantined()
    assert (found.group_id, found.reason, found.attempts) == ("a", reason, 1)
    stats = await buffer.stats()
    assert (stats.quarantined, stats.leased) == (1, 1) and stats.is_conserved


async def _life(buffer: Buffer, state: RunState) -> list[Exception]:
    """Every verb once; what they raised."""
    prompt = PromptRef(task="sums", index=3)
    raised: list[Exception] = []

    async def call(verb: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(60):
                return await verb
        except Exception as error:
            raised.append(error)

    await call(buffer.admit("new", 0.02))
    await call(buffer.begin("new", prompt, 0, 1))
    await call(buffer.renew_credits(["new"]))
    await call(buffer.push(make_group("new"), 0.02))
    await call(buffer.admit("lost", 0.02))
    await call(buffer.fail("lost", prompt, 3))
    await call(buffer.abandon("lost", "why", Rerun.as_stale, prompt))
    await call(buffer.reclaim(9))
    await call(buffer.stats())
    await call(find_violations(buffer))
    await call(buffer.quarantined())
    await call(buffer.quarantined_prompts())
    await call(buffer.events("one"))
    batch = await call(lease_batch(buffer, 1, 2, timeout_s=0.02))
    if batch is not None:
        kept = await call(buffer.validate(batch, 0))
        await call(buffer.renew(batch))
        await call(buffer.consume(batch, kept or ()))
    again = await call(lease_batch(buffer, 2, 1, timeout_s=0.02))
    if again is not None:
        await call(buffer.nack(again, "why"))
    await call(buffer.sweep())
    await call(buffer.release("put-away"))
    await call(buffer.discard("put-away"))
    await call(buffer.announce_version(1))
    await call(buffer.get_leash())
    await call(buffer.reconcile("lineage", step=0, version=0, resume_version=2))
    await call(buffer.ack(1, "lineage"))
    await call(state.record_commits({"engine": 1}))
    await call(state.wait_engines_at(1, 0.02))
    await call(state.enter_commit("engine", 1, 1, 0.02))
    await call(state.add_wait("a", "b", 1))
    for read in (state.waits, state.counters, state.phase):
        await call(read())
    for read in (state.receivers, state.staged_versions, state.task_positions):
        await call(read())
    await call(state.available_version())
    await call(state.read_metrics("0-0", 0))
    return raised


def _is_ours(error: Exception) -> bool:
    words = (
        "codec can't decode",
        "invalid literal",
        "could not convert",
        "for base 10",
        "of range",
    )
    return isinstance(error, EXPLAINED) and not any(word in str(error) for word in words)


NAMES = (
    *(
        "settings",
        "stats",
        "group:one",
        "group:put-away",
        "lease:1",
        "reconcile",
        "engine_versions",
    ),
    *("waits", "counters", "tasks", "prompts", "failures", "staged"),
    *("weights", "receivers", "quarantined_prompts"),
)
SETS = (
    *("ready", "leased", "consumed", "quarantined", "running", "credits", "batches"),
    "commit_gate",
)
OTHERS = ("retries", "events", "metrics", "phase", "forming", "wake:batch", "lineages", "order")


async def _hostile_run(factory: BufferFactory, redis: Redis, run: str) -> tuple[Any, Any]:
    buffer = await factory(groups_per_step=2, capacity_groups=50, capacity_bytes=10**6)
    return buffer, await redis.hgetall(Keys(run)("settings"))


@pytest.mark.parametrize("turn", range(2))
async def test_damaged_hash_fields_end_no_verb_without_an_explanation(
    buffer_factory: BufferFactory,
    run_name: str,
    redis: BufferRedis,
    turn: int,
    tmp_path: Path,
) -> None:
    keys = Keys(run_name)
    buffer, fresh = await _hostile_run(buffer_factory, redis, run_name)
    state = RunState(redis, run_name)
    for number, name in enumerate(NAMES):
        value = HOSTILE[(number + 5 * turn) % len(HOSTILE)]
        await _begin(buffer, redis, keys, fresh)
        held = cast("dict[bytes, bytes]", await redis.hgetall(keys(name)))
        for field in [
            *held,
            b"\xff",
            b"3 sums",
            b"sums 3",
            b"engine",
            b"0",
            b"chunks",
            b"rollbacks",
        ]:
            await redis.hset(keys(name), field, value)  # type: ignore[arg-type]
        raised = await _life(buffer, state)
        await _expect_explained(f"{name}={value!r}", raised, redis, run_name, tmp_path)


@pytest.mark.parametrize("turn", range(2))
async def test_keys_of_another_type_end_no_verb_without_an_explanation(
    buffer_factory: BufferFactory,
    run_name: str,
    redis: BufferRedis,
    turn: int,
    tmp_path: Path,
) -> None:
    keys = Keys(run_name)
    buffer, fresh = await _hostile_run(buffer_factory, redis, run_name)
    state = RunState(redis, run_name)
    for number, name in enumerate((*NAMES[1:], *SETS, *OTHERS)):
        kind = ("missing", "string", "list", "members", "scores")[(number + turn) % 5]
        await _begin(buffer, redis, keys, fresh)
        if name not in SETS or kind in ("missing", "string", "list"):
            await redis.unlink(keys(name))
        if kind == "string":
            await redis.set(keys(name), b"\xffabc")
        elif kind == "list":
            await redis.lpush(keys(name), b"\xffabc", "99999999999999999999 5 sums", "0 1 \xff")
        elif kind == "members":
            await redis.zadd(keys(name), {b"\xff": 0, b"": 1, b"a b": 2, b"ghost": 3})
        elif kind == "scores":
            scores = {"one": "inf", "g1": "-inf", "g2": 1e300, "g3": -1e300, "g4": 0.5}
            await redis.zadd(keys(name), scores)  # type: ignore[arg-type]
        raised = await _life(buffer, state)
        await _expect_explained(f"{name}: {kind}", raised, redis, run_name, tmp_path)


async def _begin(buffer: Buffer, redis: Redis, keys: Keys, fresh: Any) -> None:
    """A run with something in most of its keys, for a client that has not taken it over."""
    buffer._lineage = ""
    names = [name async for name in redis.scan_iter(match=keys("*"), count=1000)]
    if names:
        await redis.unlink(*names)
    await redis.hset(keys("settings"), mapping=fresh)
    for name in ("put-away", "one", "two", "three"):
        await buffer.push(make_group(name), 60)
    batch = await lease_batch(buffer)
    await buffer.quarantine(batch.lease_token, batch.group_ids[0], "test")
    await lease_batch(buffer, 1, 2)
    await buffer.admit("runs", 60)
    await buffer.begin("runs", PromptRef(task="sums", index=3), 0, 1)


async def _expect_explained(
    what: str, raised: list[Exception], redis: BufferRedis, run: str, folder: Path
) -> None:
    try:
        await dump_buffer(redis, run, folder / "dump")
    except DamagedRunError as error:
        raised.append(error)
    for error in raised:
        if not _is_ours(error):
            pytest.fail(f"{what}: {''.join(traceback.format_exception(error)[-3:])}")


def test_scripts_hold_no_loop_that_counts_without_a_bound() -> None:
    for path in _FOLDER.rglob("*.lua"):
        code = [line.partition("--")[0] for line in path.read_text().splitlines()]
        assert not any(line.split()[:1] in (["while"], ["repeat"]) for line in code), path
