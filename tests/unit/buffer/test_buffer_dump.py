"""Dumping a run's buffer and loading it into another: the same groups, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from redis.asyncio import Redis

from buffer.connect import Buffer, buffer_on
from buffer.export import dump_buffer, load_buffer, read_dump, read_header
from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.redis.scripts import RunNotOpenError
from buffer.wire.codec import encode_group
from configs.schema import BufferConfig


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def other_name() -> str:
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
async def other_run(
    redis_url: str, other_name: str
) -> AsyncIterator[Callable[..., Awaitable[Buffer]]]:
    """Opens the run `other_name`."""
    opened: list[Buffer] = []

    async def make(**settings: Any) -> Buffer:
        config = BufferConfig(**settings)
        redis = await connect(redis_url)
        buffer = buffer_on(redis, other_name, config)
        opened.append(buffer)
        await buffer.open(config, 4)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()


async def _fill(buffer: Buffer, make_group: Any) -> None:
    """Two groups of each state: ready, leased and consumed; one more was acked."""
    for number in range(7):
        await buffer.push(make_group(f"g{number}", number // 4, index=number, num_tokens=20))
    for step, num_groups in ((0, 1), (1, 2), (2, 2)):
        lease = await buffer.lease(
            step=step, version=1, num_groups=num_groups, share=0, num_shares=1, timeout_s=1
        )
        if step < 2:
            await buffer.consume(lease, lease.group_ids)
        if step == 0:
            await buffer.ack(0)


async def _payloads(redis: Redis, run: str) -> dict[str, bytes]:
    keys = Keys(run)
    ids = [i for state in ("ready", "leased") for i in await redis.zrange(keys(state), 0, -1)]
    return {i.decode(): await redis.get(keys.payload(i.decode())) for i in ids}


async def test_a_dump_holds_every_group_once_and_changes_nothing(
    buffer_factory: Any, run_name: str, redis: Redis, make_group: Any, tmp_path: Path
) -> None:
    buffer = await buffer_factory()
    await _fill(buffer, make_group)
    before = await buffer.stats()
    report = await dump_buffer(redis, run_name, tmp_path / "d")
    assert (await buffer.stats()).ready == before.ready and (await buffer.stats()).is_conserved
    assert report.groups == {"ready": 2, "leased": 2, "consumed": 2}
    assert (report.gone, report.bytes) == (0, (tmp_path / "d").stat().st_size)
    groups = {group.group_id: group for group in read_dump(tmp_path / "d")}
    assert sorted(groups) == ["g1", "g2", "g3", "g4", "g5", "g6"]
    assert {i: g.payload for i, g in groups.items() if g.state in ("ready", "leased")} == (
        await _payloads(redis, run_name)
    )
    assert groups["g5"].fields["state"] == "ready" and groups["g5"].fields["index"] == "5"
    header = read_header(tmp_path / "d")
    assert header.run == run_name and header.shards[0].settings["groups_per_step"] == "4"
    assert header.shards[0].stats["pushed"] == "7"


async def test_a_dump_is_loaded_into_another_run_once_however_often(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    await _fill(await buffer_factory(), make_group)
    await dump_buffer(redis, run_name, tmp_path / "one")
    target = await other_run()
    report = await load_buffer(target, tmp_path / "one")
    assert (report.pushed, report.skipped) == ({"stored": 4}, {"consumed": 2})
    assert report.unreadable == {}
    again = await load_buffer(target, tmp_path / "one", include_consumed=True)
    assert (again.pushed, again.skipped) == ({"stored": 2, "duplicate": 4}, {})
    assert (await target.stats()).ready == 6


async def test_loaded_groups_are_the_same_byte_for_byte(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    other_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    await _fill(await buffer_factory(), make_group)
    await dump_buffer(redis, run_name, tmp_path / "one")
    await load_buffer(await other_run(), tmp_path / "one")
    payloads = await _payloads(redis, other_name)
    assert payloads == await _payloads(redis, run_name) and len(payloads) == 4


async def test_groups_that_are_too_old_for_the_new_run_are_reported(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    await _fill(await buffer_factory(), make_group)
    await dump_buffer(redis, run_name, tmp_path / "one")
    target = await other_run(max_staleness=0)
    await target.publish_version(1)
    report = await load_buffer(target, tmp_path / "one")
    assert report.pushed == {"stored": 3, "stale": 1}


async def test_nothing_is_loaded_from_a_file_that_was_cut_off(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    await _fill(await buffer_factory(), make_group)
    path = tmp_path / "one"
    await dump_buffer(redis, run_name, path)
    path.write_bytes(path.read_bytes()[:-1])
    target = await other_run()
    with pytest.raises(ValueError, match=r"one is no dump .* cut off"):
        await load_buffer(target, path)
    assert (await target.stats()).pushed == 0


@pytest.mark.slow
async def test_a_group_above_64_mb_is_dumped_and_loaded_whole(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    small = make_group("large", size=1)
    column = np.arange(8 * 9_000_000, dtype=np.uint8).reshape(8, -1)
    trajectory = replace(small.trajectories[0], columns={"routed_experts": column})
    group = replace(small, trajectories=(trajectory,))
    await (await buffer_factory()).push(group)
    assert await redis.strlen(Keys(run_name).payload("large")) < 100, "it is in chunks"
    await dump_buffer(redis, run_name, tmp_path / "one")
    (dumped,) = read_dump(tmp_path / "one")
    assert dumped.payload == encode_group(group)
    target = await other_run()
    assert (await load_buffer(target, tmp_path / "one")).pushed == {"stored": 1}
    lease = await target.lease(step=0, version=0, num_groups=1, share=0, num_shares=1, timeout_s=1)
    assert np.array_equal(lease.groups[0].trajectories[0].columns["routed_experts"], column)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
async def test_a_dump_of_several_shards_is_loaded_into_any_number(
    redis_url: str,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
    num_shards: int,
    other_name: str,
) -> None:
    source = buffer_on(await connect(redis_url), run_name, BufferConfig(shards=2))
    await source.open(BufferConfig(shards=2), 4)
    names = [f"g{number}@{number % 2}" for number in range(4)] + ["plain", "other"]
    for name in names:
        await source.push(make_group(name))
    report = await dump_buffer(redis, run_name, tmp_path / "one")
    assert report.groups == {"ready": 6}
    shards = read_header(tmp_path / "one").shards
    assert sum(int(shard.stats["pushed"]) for shard in shards) == 6 and len(shards) == 2
    target = await other_run(shards=num_shards)
    assert (await load_buffer(target, tmp_path / "one")).pushed == {"stored": 6}
    await dump_buffer(redis, other_name, tmp_path / "two")
    one, two = ({g.group_id: g.payload for g in read_dump(tmp_path / f)} for f in ("one", "two"))
    assert one == two
    await source.close()


async def test_damaged_and_missing_payloads_are_dumped_and_reported(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    buffer, keys = await buffer_factory(), Keys(run_name)
    for name in ("damaged", "missing", "swapped", "good"):
        await buffer.push(make_group(name))
    await redis.setrange(keys.payload("damaged"), 40, b"x")
    await redis.delete(keys.payload("missing"))
    await redis.set(keys.payload("swapped"), encode_group(make_group("another")))
    await dump_buffer(redis, run_name, tmp_path / "one")
    report = await load_buffer(await other_run(), tmp_path / "one")
    assert report.pushed == {"stored": 1}
    assert {i: why.split(":")[0][:30] for i, why in report.unreadable.items()} == {
        "damaged": "the checksum of a trajectory g",
        "missing": "its payload was gone when the ",
        "swapped": "its payload is that of group '",
    }


async def test_groups_are_loaded_with_the_numbers_that_a_rollback_gave_them(
    buffer_factory: Any,
    other_run: Any,
    run_name: str,
    redis: Redis,
    make_group: Any,
    tmp_path: Path,
) -> None:
    buffer = await buffer_factory()
    await buffer.push(make_group("g", 3))
    await redis.hset(
        Keys(run_name)("group:g"),
        mapping={"moved": "1", "versions": "8:10", "min_version": "8", "max_version": "8"},
    )
    await dump_buffer(redis, run_name, tmp_path / "one")
    target = await other_run(max_staleness=0)
    await target.publish_version(8)
    assert (await load_buffer(target, tmp_path / "one")).pushed == {"stored": 1}


async def test_groups_that_move_during_a_dump_are_in_it_exactly_once(
    buffer_factory: Any, run_name: str, redis: Redis, make_group: Any, tmp_path: Path
) -> None:
    buffer, worker = await buffer_factory(max_attempts=10**6), await buffer_factory()
    for number in range(600):
        await buffer.push(make_group(f"kept{number}", 5))

    async def work() -> None:
        for step in range(10_000):
            await worker.push(make_group(f"new{step}", 0))  # the stalest, so it is leased first
            lease = await worker.lease(
                step=step, version=0, num_groups=4, share=0, num_shares=1, timeout_s=5
            )
            await worker.consume(lease, [f"new{step}"])
            await worker.nack(lease, "test")  # the others go to leased and back to ready
            await worker.ack(step)

    busy = asyncio.create_task(work())
    try:
        for _ in range(5):
            await dump_buffer(redis, run_name, tmp_path / "one")
            ids = [group.group_id for group in read_dump(tmp_path / "one")]
            assert len(set(ids)) == len(ids)
            assert sum(name.startswith("kept") for name in ids) == 600
    finally:
        busy.cancel()
        await asyncio.wait({busy})
    assert busy.cancelled(), busy


async def test_a_run_that_is_not_there_is_named(redis: Redis, tmp_path: Path) -> None:
    with pytest.raises(RunNotOpenError, match="check the run's name"):
        await dump_buffer(redis, "never-opened", tmp_path / "one")
    assert list(tmp_path.iterdir()) == []
