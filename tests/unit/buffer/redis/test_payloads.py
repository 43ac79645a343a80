"""Large values read straight into their own memory, over connections that commands use too."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from redis import exceptions

from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect
from buffer.redis.payloads import BLOCK_BYTES, BLOCKS_KEPT, SCRATCH_BYTES, Blocks


def _fresh(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


async def _store(redis: BufferRedis, prefix: str, sizes: list[int]) -> dict[str, bytes]:
    dice = np.random.default_rng(len(sizes))
    values = {f"{{{prefix}}}:{i}": dice.bytes(size) for i, size in enumerate(sizes)}
    for key, value in values.items():
        await redis.set(key, value, ex=60)
    return values


async def test_values_of_any_size_come_back(redis: BufferRedis, run_name: str) -> None:
    edges = [SCRATCH_BYTES + shift for shift in range(-12, 3)]
    sizes = [0, 1, 2, 3, 5_000_000, *edges, *range(0, 3000, 7), 70_000, 1_000_000, 1]
    values = await _store(redis, run_name, sizes)
    missing = f"{{{run_name}}}:missing"
    received = await redis.receive([missing, *values, missing], _fresh)
    assert received[0] is None and received[-1] is None
    assert [bytes(value) for value in received[1:-1] if value is not None] == [*values.values()]
    assert all(value is None or value.readonly for value in received)


@pytest.mark.parametrize("seed", range(8))
async def test_values_match_their_keys_however_their_sizes_change(
    redis: BufferRedis, run_name: str, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    growing = [66_000] * 30 + [1 << 20] * 6
    sizes = growing if seed == 0 else dice.lognormal(11, 2, 48).clip(1, 4 << 20).astype(int)
    values = await _store(redis, f"{run_name}-{seed}", [int(size) for size in sizes])
    received = await redis.receive([*values], _fresh)
    assert [bytes(value) for value in received if isinstance(value, memoryview)] == [
        *values.values()
    ]
    assert await redis.get(f"{run_name}-nothing") is None  # no reply is left over


async def test_values_with_line_ends_in_them_are_no_replies(
    redis: BufferRedis, run_name: str
) -> None:
    await redis.set(run_name, b"\r\n$-1\r\n" * 20_000, ex=60)
    received = await redis.receive([run_name] * 3, _fresh)
    assert [value == b"\r\n$-1\r\n" * 20_000 for value in received] == [True] * 3


async def test_receive_requests_only_some_megabytes_at_once(
    redis: BufferRedis, run_name: str
) -> None:
    values = await _store(redis, run_name, [1 << 20] * 24)
    # By TCP: for a Unix socket Valkey's omem counts what has left until all of it has.
    options = dict(redis.connection_pool.connection_kwargs)
    options.pop("local_path", None)
    over_tcp = BufferRedis.of(options, redis.where, redis.try_for_s)
    largest = 0
    watcher = await connect_again(redis)
    receiving = asyncio.create_task(over_tcp.receive([*values], _fresh))
    while not receiving.done():
        clients = await watcher.client_list()
        largest = max(largest, *(int(client["omem"]) for client in clients))
    await watcher.aclose()
    assert [bytes(v) for v in await receiving if v is not None] == [*values.values()]
    await over_tcp.aclose()
    assert largest < 10 << 20


async def connect_again(redis: BufferRedis) -> BufferRedis:
    options = redis.connection_pool.connection_kwargs
    return await connect(f"redis://:{options['password']}@{options['host']}:{options['port']}")


async def test_error_is_raised_and_the_connection_goes_on(
    redis: BufferRedis, run_name: str
) -> None:
    good, bad = f"{{{run_name}}}:good", f"{{{run_name}}}:bad"
    await redis.set(good, b"x" * 100_000, ex=60)
    await redis.rpush(bad, "a list")
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await redis.receive([good, bad, good], _fresh)
    assert await redis.strlen(good) == 100_000
    assert await redis.receive([good], _fresh) == [b"x" * 100_000]
    await redis.delete(bad)


async def test_connection_that_is_cut_is_replaced(redis: BufferRedis, run_name: str) -> None:
    values = await _store(redis, run_name, [3_000_000] * 8)
    watcher = await connect_again(redis)
    for _ in range(10):
        receiving = asyncio.create_task(redis.receive([*values], _fresh))
        await asyncio.sleep(0.002)
        await watcher.client_kill_filter(_type="normal", skipme=True)
        assert [bytes(v) for v in await receiving if v is not None] == [*values.values()]
    await watcher.aclose()


@pytest.mark.parametrize("pause_ms", [0, 0.3, 1, 3, 10])
async def test_replies_of_a_cancelled_call_are_not_taken_for_the_next(
    redis: BufferRedis, run_name: str, pause_ms: float
) -> None:
    values = await _store(redis, run_name, [800_000] * 8)
    for _ in range(5):
        receiving = asyncio.create_task(redis.receive([*values], _fresh))
        await asyncio.sleep(pause_ms / 1000)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        assert await redis.echo("next") == b"next"
        key = list(values)[-1]
        assert await redis.receive([key], _fresh) == [values[key]]


def test_block_is_used_again_only_when_nothing_refers_to_it() -> None:
    blocks = Blocks()
    dice = np.random.default_rng(0)
    held: list[tuple[Any, int]] = []
    places = set()
    for number in range(600):
        piece = blocks.allocate(int(dice.integers(1, BLOCK_BYTES // 2)))
        array = np.frombuffer(piece.toreadonly(), np.uint8)
        places.add(array.ctypes.data // BLOCK_BYTES)
        piece[:1], piece[-1:] = bytes([number % 251]), bytes([number % 251])
        held.append((array[:1], number % 251))
        held.append((array[-1:], number % 251))
        if number % 10 == 0:
            assert all(view[0] == value for view, value in held)
        for _ in range(int(dice.integers(0, 5))):
            if held:
                held.pop(int(dice.integers(len(held))))
    assert len(places) < 100  # not one for each of the 300 blocks


def test_free_blocks_are_kept_in_bounded_number() -> None:
    blocks = Blocks()
    held = [blocks.allocate(BLOCK_BYTES // 2) for _ in range(4 * BLOCKS_KEPT)]
    held.clear()
    gc.collect()
    assert len(blocks._free) == BLOCKS_KEPT
