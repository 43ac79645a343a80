"""Dumping a run's buffer and loading it into another: the same groups, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from buffer.connect import Buffer, buffer_on
from buffer.dump.export import DumpReport, dump_buffer
from buffer.dump.file import read_dump, read_header
from buffer.dump.load import load_buffer
from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.redis.scripts import RunNotOpenError
from buffer.wire.chunks import split_payload
from buffer.wire.codec import encode_group
from configs.schema import BufferConfig
from tests.support.buffer.groups import lease_batch, make_group


class Dumping:
    """Two runs on one server, of which the first is dumped and the second loaded."""

    def __init__(self, redis_url: str, redis: BufferRedis, path: Path) -> None:
        self.redis_url, self.redis, self.path = redis_url, redis, path
        self.run, self.other_run = (f"test-{uuid4().hex[:12]}" for _ in range(2))
        self._opened: list[Buffer] = []

    async def open(self, run: str, **settings: Any) -> Buffer:
        config = BufferConfig(**settings)
        buffer = buffer_on(await connect(self.redis_url), run, config)
        self._opened.append(buffer)
        await buffer.open(config, 4)
        return buffer

    async def fill(self) -> Buffer:
        """Two groups of each state: ready, leased and consumed; one more was acked."""
        buffer = await self.open(self.run)
        for number in range(7):
            group = make_group(f"g{number}", number // 4, index=number, num_tokens=20)
            await buffer.push(group)
        for step, num_groups in ((0, 1), (1, 2), (2, 2)):
            lease = await lease_batch(buffer, step, num_groups, version=1)
            if step < 2:
                await buffer.consume(lease, lease.group_ids)
            if step == 0:
                await buffer.ack(0)
        return buffer

    async def dump(self) -> DumpReport:
        return await dump_buffer(self.redis, self.run, self.path)

    async def payloads(self, run: str) -> dict[str, bytes]:
        keys = Keys(run)
        ids = [
            group_id.decode()
            for state in ("ready", "leased")
            for group_id in await self.redis.zrange(keys(state), 0, -1)
        ]
        return {group_id: await self.redis.get(keys.payload(group_id)) for group_id in ids}

    async def close(self) -> None:
        for buffer in self._opened:
            await buffer.close()
        await self.redis.aclose()


@pytest.fixture
async def dumping(redis_url: str, tmp_path: Path) -> AsyncIterator[Dumping]:
    made = Dumping(redis_url, await connect(redis_url), tmp_path / "one")
    yield made
    await made.close()


async def test_dump_holds_every_group_once_and_changes_nothing(dumping: Dumping) -> None:
    buffer = await dumping.fill()
    before = await buffer.stats()
    report = await dumping.dump()
    assert (await buffer.stats()).ready == before.ready and (await buffer.stats()).is_conserved
    assert report.groups == {"ready": 2, "leased": 2, "consumed": 2}
    assert (report.gone, report.bytes) == (0, (dumping.path).stat().st_size)
    groups = {group.group_id: group for group in read_dump(dumping.path)}
    assert sorted(groups) == ["g1", "g2", "g3", "g4", "g5", "g6"]
    assert {i: g.payload for i, g in groups.items() if g.state in ("ready", "leased")} == (
        await dumping.payloads(dumping.run)
    )
    assert groups["g5"].fields["state"] == "ready" and groups["g5"].fields["index"] == "5"
    header = read_header(dumping.path)
    assert header.run == dumping.run and header.shards[0].settings["groups_per_step"] == "4"
    assert header.shards[0].stats["pushed"] == "7"


async def test_dump_is_loaded_into_another_run_once_however_often(dumping: Dumping) -> None:
    await dumping.fill()
    await dumping.dump()
    target = await dumping.open(dumping.other_run)
    report = await load_buffer(target, dumping.path)
    assert (report.pushed, report.skipped) == ({"stored": 4}, {"consumed": 2})
    assert report.unreadable == {}
    payloads = await dumping.payloads(dumping.other_run)
    assert payloads == await dumping.payloads(dumping.run) and len(payloads) == 4
    again = await load_buffer(target, dumping.path)
    assert (again.pushed, again.skipped) == ({"duplicate": 4}, {"consumed": 2})
    assert (await target.stats()).ready == 4


async def test_groups_that_are_too_old_for_the_new_run_are_reported(dumping: Dumping) -> None:
    await dumping.fill()
    await dumping.dump()
    target = await dumping.open(dumping.other_run, max_staleness=0)
    await target.announce_version(1)
    report = await load_buffer(target, dumping.path)
    assert report.pushed == {"stored": 3, "stale": 1}


async def test_load_pushes_nothing_from_a_truncated_file(dumping: Dumping) -> None:
    await dumping.fill()
    path = dumping.path
    await dumping.dump()
    path.write_bytes(path.read_bytes()[:-1])
    target = await dumping.open(dumping.other_run)
    with pytest.raises(ValueError, match=r"one is not a .* dump, .* truncated"):
        await load_buffer(target, path)
    assert (await target.stats()).pushed == 0


async def test_group_in_chunks_is_dumped_and_loaded_whole(
    dumping: Dumping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.push.split_payload", partial(split_payload, chunk_bytes=2**16))
    small = make_group("large", size=1)
    column = np.arange(8 * 90_000).astype(np.uint8).reshape(8, -1)
    trajectory = replace(small.trajectories[0], columns={"routed_experts": column})
    group = replace(small, trajectories=(trajectory,))
    await (await dumping.open(dumping.run)).push(group)
    assert await dumping.redis.strlen(Keys(dumping.run).payload("large")) < 100, "it is in chunks"
    await dumping.dump()
    (dumped,) = read_dump(dumping.path)
    assert dumped.payload == encode_group(group)
    target = await dumping.open(dumping.other_run)
    assert (await load_buffer(target, dumping.path)).pushed == {"stored": 1}
    lease = await lease_batch(target)
    assert np.array_equal(lease.groups[0].trajectories[0].columns["routed_experts"], column)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
async def test_dump_of_several_shards_is_loaded_into_any_number(
    dumping: Dumping, num_shards: int
) -> None:
    source = await dumping.open(dumping.run, shards=2)
    names = [f"g{number}@{number % 2}" for number in range(4)] + ["plain", "other"]
    for name in names:
        await source.push(make_group(name))
    report = await dumping.dump()
    assert report.groups == {"ready": 6}
    shards = read_header(dumping.path).shards
    assert sum(int(shard.stats["pushed"]) for shard in shards) == 6 and len(shards) == 2
    target = await dumping.open(dumping.other_run, shards=num_shards)
    assert (await load_buffer(target, dumping.path)).pushed == {"stored": 6}
    second = dumping.path.with_name("two")
    await dump_buffer(dumping.redis, dumping.other_run, second)
    one, two = ({g.group_id: g.payload for g in read_dump(path)} for path in (dumping.path, second))
    assert one == two


async def test_damaged_and_missing_payloads_are_dumped_and_reported(dumping: Dumping) -> None:
    buffer, keys = await dumping.open(dumping.run), Keys(dumping.run)
    for name in ("damaged", "missing", "swapped", "good"):
        await buffer.push(make_group(name))
    await dumping.redis.setrange(keys.payload("damaged"), 40, b"x")
    await dumping.redis.delete(keys.payload("missing"))
    await dumping.redis.set(keys.payload("swapped"), encode_group(make_group("another")))
    await dumping.dump()
    report = await load_buffer(await dumping.open(dumping.other_run), dumping.path)
    assert report.pushed == {"stored": 1}
    assert {i: why.split(":")[0][:30] for i, why in report.unreadable.items()} == {
        "damaged": "the checksum of a trajectory g",
        "missing": "its payload was gone when the ",
        "swapped": "its payload is that of group '",
    }


async def test_groups_are_loaded_with_the_numbers_that_a_rollback_gave_them(
    dumping: Dumping,
) -> None:
    buffer = await dumping.open(dumping.run)
    await buffer.push(make_group("g", 3))
    await dumping.redis.hset(
        Keys(dumping.run)("group:g"),
        mapping={"renumbered": "1", "versions": "8:10", "min_version": "8", "max_version": "8"},
    )
    await dumping.dump()
    target = await dumping.open(dumping.other_run, max_staleness=0)
    await target.announce_version(8)
    assert (await load_buffer(target, dumping.path)).pushed == {"stored": 1}


async def test_groups_that_move_during_a_dump_are_in_it_exactly_once(dumping: Dumping) -> None:
    buffer, worker = (
        await dumping.open(dumping.run, max_attempts=10**6),
        await dumping.open(dumping.run),
    )
    for number in range(300):
        await buffer.push(make_group(f"kept{number}", 5))

    async def work() -> None:
        for step in range(10_000):
            await worker.push(make_group(f"new{step}", 0))  # the stalest, so it is leased first
            lease = await lease_batch(worker, step, 4)
            await worker.consume(lease, [f"new{step}"])
            await worker.nack(lease, "test")  # the others go to leased and back to ready
            await worker.ack(step)

    busy = asyncio.create_task(work())
    try:
        for _ in range(3):
            await dumping.dump()
            ids = [group.group_id for group in read_dump(dumping.path)]
            assert len(set(ids)) == len(ids)
            assert sum(name.startswith("kept") for name in ids) == 300
    finally:
        busy.cancel()
        await asyncio.wait({busy})
    assert busy.cancelled(), busy


async def test_dump_of_an_unknown_run_names_it(dumping: Dumping) -> None:
    with pytest.raises(RunNotOpenError, match="check the run's name"):
        await dumping.dump()
    assert not dumping.path.exists()
