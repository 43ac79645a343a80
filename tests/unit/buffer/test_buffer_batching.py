"""Messages that several tasks send at once, to a real server and through one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import ResponseError

from buffer.redis.batching import MAX_BYTES, MAX_MESSAGES, Batcher, Make, Message
from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.redis.payloads import Allocate, Arena, fresh
from buffer.redis.wakeups import BufferClosedError
from buffer.replay_buffer import ReplayBuffer
from buffer.results import PushResult
from tests.support.invariants import find_violations


class Echo:
    """An exchange that replies to each message with its own first part, once released."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, messages: Sequence[Message]) -> list[Any]:
        texts = [bytes(message.parts[0]) for message in messages]
        self.batches.append(texts)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        assert [bytes(message.parts[0]) for message in messages] == texts  # not overwritten
        return [ResponseError("no") if text == b"refused" else text for text in texts]


def _text(text: str) -> Make:
    def make(allocate: Allocate) -> Message:
        memory = allocate(len(text))
        memory[:] = text.encode()
        return Message([memory], 1)

    return make


def _unmakeable(_: Allocate) -> Message:
    raise ValueError("cannot be made")


def _start(batcher: Batcher, *texts: str, num_bytes: int = 1) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(batcher.send(_text(text), num_bytes)) for text in texts]


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_messages_that_arrive_while_two_batches_are_in_flight_form_the_next() -> None:
    echo = Echo()
    batcher = Batcher(echo)
    tasks = _start(batcher, "a", "b")
    await _turns()
    tasks += _start(batcher, "c")
    await _turns()
    tasks += _start(batcher, "d", "e")
    await _turns()
    tasks += _start(batcher, "f")
    await _turns()
    assert echo.batches == [[b"a", b"b"], [b"c"]]
    echo.may_answer.set()
    assert await asyncio.gather(*tasks) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert echo.batches[2:] == [[b"d", b"e", b"f"]]


async def test_batch_is_bounded_in_messages_and_in_bytes() -> None:
    echo = Echo()
    echo.may_answer.set()
    batcher = Batcher(echo)
    await asyncio.gather(*_start(batcher, *"x" * (2 * MAX_MESSAGES + 1)))
    assert [len(batch) for batch in echo.batches] == [MAX_MESSAGES, MAX_MESSAGES, 1]
    echo.batches.clear()
    await asyncio.gather(
        *_start(batcher, "large", num_bytes=2 * MAX_BYTES),
        *_start(batcher, "half", "half", "more", num_bytes=MAX_BYTES // 2),
    )
    assert sorted(echo.batches) == [[b"half", b"half"], [b"large"], [b"more"]]


async def test_cancelled_message_does_not_affect_the_others() -> None:
    echo = Echo()
    batcher = Batcher(echo)
    under_way = _start(batcher, "a", "b")
    await _turns()
    other = _start(batcher, "c")
    await _turns()
    waiting = _start(batcher, "d", "e")
    await _turns()
    under_way[0].cancel()
    waiting[0].cancel()
    await _turns()
    assert under_way[0].cancelled() and waiting[0].cancelled()  # at once, not with the batch
    echo.may_answer.set()
    assert await asyncio.gather(under_way[1], *other, waiting[1]) == [b"b", b"c", b"e"]
    assert echo.batches == [[b"a", b"b"], [b"c"], [b"e"]]


async def test_failed_message_does_not_affect_the_others() -> None:
    echo = Echo()
    echo.may_answer.set()
    batcher = Batcher(echo)
    unmakeable = asyncio.create_task(batcher.send(_unmakeable, 1))
    tasks = _start(batcher, "a", "refused", "b")
    first, refused, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, last) == (b"a", b"b") and isinstance(refused, ResponseError)
    with pytest.raises(ValueError, match="cannot be made"):
        await unmakeable


async def test_batch_that_is_lost_fails_its_own_messages_only() -> None:
    echo = Echo()
    batcher = Batcher(echo)
    lost = _start(batcher, "a", "b")
    await _turns()
    echo.error = ConnectionError("lost")
    echo.may_answer.set()
    errors = await asyncio.gather(*lost, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectionError, ConnectionError]
    echo.error = None
    assert await asyncio.gather(*_start(batcher, "c")) == [b"c"]


async def test_close_ends_waiting_and_sent_messages() -> None:
    batcher = Batcher(Echo())
    tasks = _start(batcher, "a")
    await _turns()
    tasks += _start(batcher, "b")
    await _turns()
    tasks += _start(batcher, "c")
    await _turns()
    await batcher.close()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [BufferClosedError] * 3
    with pytest.raises(BufferClosedError, match="before this call"):
        await batcher.send(_text("d"), 1)


def test_arena_gives_out_pieces_that_do_not_overlap_and_the_same_memory_again() -> None:
    arena = Arena(1000)
    assert len(arena.take(100)) == 100  # the block is empty yet
    arena.take(50)
    arena.clear()
    first, second = arena.take(100), arena.take(50)
    first[:], second[:] = b"a" * 100, b"b" * 50
    assert bytes(first) == b"a" * 100
    beyond = arena.take(400)
    beyond[:] = b"c" * 400
    assert bytes(second) == b"b" * 50
    arena.clear()
    again = arena.take(100)
    again[:] = b"d" * 100
    for _ in range(2):
        arena.clear()
        assert len(arena.take(5000)) == 5000  # larger than it keeps
    assert len(fresh(7)) == 7


# At a real server ----------------------------------------------------------------------------


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[BufferRedis]:
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def buffer(buffer_factory: Any) -> ReplayBuffer:
    return await buffer_factory()


async def test_concurrent_pushes_each_get_their_own_reply(
    buffer: ReplayBuffer, make_group: Callable[..., Any]
) -> None:
    groups = [make_group(f"g{i}") for i in range(100)]
    pushes = [asyncio.create_task(buffer.push(group)) for group in [*groups, *groups[:10]]]
    bad = asyncio.create_task(buffer.push(make_group("has space")))
    results = await asyncio.gather(*pushes)
    twice = [{results[i], results[100 + i]} for i in range(10)]
    assert twice == [{PushResult.stored, PushResult.duplicate}] * 10
    assert set(results[10:100]) == {PushResult.stored}
    with pytest.raises(ValueError, match="white space"):
        await bad
    assert (await buffer.stats()).ready == 100
    assert await find_violations(buffer) == []


async def test_pushes_survive_a_server_that_forgets_the_script_between_them(
    buffer: ReplayBuffer, redis: BufferRedis, make_group: Callable[..., Any]
) -> None:
    for part in range(3):
        names = [f"{part}-{i}" for i in range(20)]
        results = await asyncio.gather(*(buffer.push(make_group(name)) for name in names))
        assert set(results) == {PushResult.stored}
        await redis.script_flush()
    assert (await buffer.stats()).pushed == 60


async def test_pushes_whose_replies_are_lost_are_sent_again_and_stored_once(
    buffer: ReplayBuffer, redis: BufferRedis, make_group: Callable[..., Any]
) -> None:
    names = [f"g{i}" for i in range(200)]
    pushes = [asyncio.create_task(buffer.push(make_group(name))) for name in names]
    for _ in range(10):
        await redis.client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.005)
    results = await asyncio.gather(*pushes)
    assert set(results) <= {PushResult.stored, PushResult.duplicate}
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready) == (200, 200) and stats.is_conserved
    assert await find_violations(buffer) == []


async def test_cancelled_pushes_leave_nothing_half_done(
    buffer: ReplayBuffer, redis: BufferRedis, run_name: str, make_group: Callable[..., Any]
) -> None:
    for turns in range(12):
        names = [f"{turns}-{i}" for i in range(6)]
        pushes = [asyncio.create_task(buffer.push(make_group(name))) for name in names]
        for _ in range(turns):
            await asyncio.sleep(0)
        for push in pushes[::2]:
            push.cancel()
        assert await asyncio.gather(*pushes[1::2]) == [PushResult.stored] * 3
        await asyncio.gather(*pushes, return_exceptions=True)
    assert (await buffer.stats()).is_conserved
    assert await find_violations(buffer) == []
    async for key in redis.scan_iter(Keys(run_name).payload("*")):
        group = Keys(run_name).group(key.decode().rpartition(":")[2])
        assert await redis.hget(group, "state") == b"ready"
