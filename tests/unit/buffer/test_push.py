"""Pushes that several tasks send at once, to a real server and through one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from buffer.push import MAX_BYTES, MAX_PUSHES, PendingPush, PushedGroup, Pushes, PushReply
from buffer.redis.client import BufferClosedError
from buffer.redis.keys import Keys
from buffer.redis.payloads import Arena, fresh
from buffer.replay_buffer import ReplayBuffer
from buffer.results import PushResult
from tests.support.buffer.groups import make_group
from tests.support.invariants import find_violations


class Echo:
    """Stands for `Scripts` and `Durability`: replies to each push with its id, once released."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None
        self.pushes = Pushes(cast("Any", self), Keys("run"), cast("Any", None), cast("Any", self))

    async def exchange(
        self,
        parts: Sequence[Any],
        num_replies: int,
        name: str,
        kind: Any,
        bound: int,
        groups: Sequence[PushedGroup],
    ) -> list[Any]:
        ids, sent = [group.group_id for group in groups], b"".join(parts)
        self.batches.append(ids)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        assert b"".join(parts) == sent  # not overwritten
        assert num_replies == len(ids)
        of_sets = [ResponseError("no") if group_id == "refused" else True for group_id in ids]
        return [*of_sets, [PushReply(cast("Any", group_id)) for group_id in ids]]

    async def note_server(self) -> None:
        return

    async def start(self, *names: str, num_bytes: int = 1) -> list[asyncio.Task[str]]:
        """Pushes of these groups, as far as they get before a reply."""
        tasks = [asyncio.create_task(self._push(name, num_bytes)) for name in names]
        for _ in range(5):
            await asyncio.sleep(0)
        return tasks

    async def _push(self, name: str, num_bytes: int) -> str:
        group = make_group(name, index=-1 if name == "unmakeable" else 0)
        push = PendingPush(group, compress=False)
        push.memory_bytes = num_bytes
        return (await self.pushes.store(push)).word


@pytest.fixture
async def echo() -> Echo:
    return Echo()


async def test_pushes_that_arrive_while_two_batches_are_in_flight_form_the_next(echo: Echo) -> None:
    tasks = await echo.start("a", "b")
    for names in ("c", "de", "f"):
        tasks += await echo.start(*names)
    assert echo.batches == [["a", "b"], ["c"]]
    echo.may_answer.set()
    assert await asyncio.gather(*tasks) == [*"abcdef"]
    assert echo.batches[2:] == [["d", "e", "f"]]


async def test_batch_is_bounded_in_pushes_and_in_bytes(echo: Echo) -> None:
    echo.may_answer.set()
    await asyncio.gather(*await echo.start(*"x" * (2 * MAX_PUSHES + 1)))
    assert [len(batch) for batch in echo.batches] == [MAX_PUSHES, MAX_PUSHES, 1]
    echo.batches.clear()
    echo.may_answer.clear()
    tasks = await echo.start("first") + await echo.start("second")
    tasks += await echo.start("large", num_bytes=2 * MAX_BYTES)
    tasks += await echo.start("half", "half", "more", num_bytes=MAX_BYTES // 2)
    echo.may_answer.set()
    await asyncio.gather(*tasks)
    assert sorted(echo.batches[2:]) == [["half", "half"], ["large"], ["more"]]


async def test_cancelled_push_does_not_affect_the_others(echo: Echo) -> None:
    under_way = await echo.start("a", "b")
    other, waiting = await echo.start("c"), await echo.start("d", "e")
    under_way[0].cancel()
    waiting[0].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert under_way[0].cancelled() and waiting[0].cancelled()  # at once, not with the batch
    echo.may_answer.set()
    assert await asyncio.gather(under_way[1], *other, waiting[1]) == ["b", "c", "e"]
    assert echo.batches == [["a", "b"], ["c"], ["e"]]


async def test_failed_push_does_not_affect_the_others(echo: Echo) -> None:
    echo.may_answer.set()
    tasks = await echo.start("a", "unmakeable", "refused", "b")
    first, unmakeable, refused, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, last) == ("a", "b") and isinstance(refused, ResponseError)
    assert isinstance(unmakeable, ValueError) and "index=-1 does not fit" in str(unmakeable)


async def test_batch_that_is_lost_fails_its_own_pushes_only(echo: Echo) -> None:
    lost = await echo.start("a", "b")
    echo.error = ConnectionError("lost")
    echo.may_answer.set()
    errors = await asyncio.gather(*lost, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectionError, ConnectionError]
    echo.error = None
    assert await asyncio.gather(*await echo.start("c")) == ["c"]


async def test_close_ends_waiting_and_sent_pushes(echo: Echo) -> None:
    tasks = [task for name in "abc" for task in await echo.start(name)]
    await echo.pushes.close()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [BufferClosedError] * 3
    (late,) = await echo.start("d")
    with pytest.raises(BufferClosedError, match="before this call"):
        await late


def test_arena_gives_out_pieces_that_do_not_overlap_and_the_same_memory_again() -> None:
    arena = Arena(1000)
    assert len(arena.allocate(100)) == 100  # the block is empty yet
    arena.allocate(50)
    arena.clear()
    first, second = arena.allocate(100), arena.allocate(50)
    first[:], second[:] = b"a" * 100, b"b" * 50
    assert bytes(first) == b"a" * 100
    beyond = arena.allocate(400)
    beyond[:] = b"c" * 400
    assert bytes(second) == b"b" * 50
    arena.clear()
    again = arena.allocate(100)
    again[:] = b"d" * 100
    for _ in range(2):
        arena.clear()
        assert len(arena.allocate(5000)) == 5000  # larger than it keeps
    assert len(fresh(7)) == 7


# At a real server ----------------------------------------------------------------------------


@pytest.fixture
async def buffer(buffer_factory: Any) -> ReplayBuffer:
    return await buffer_factory()


async def test_concurrent_pushes_each_get_their_own_reply(buffer: ReplayBuffer) -> None:
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
    buffer: ReplayBuffer,
) -> None:
    for part in range(3):
        names = [f"{part}-{i}" for i in range(20)]
        results = await asyncio.gather(*(buffer.push(make_group(name)) for name in names))
        assert set(results) == {PushResult.stored}
        await buffer._redis.script_flush()
    assert (await buffer.stats()).pushed == 60


async def test_pushes_whose_replies_are_lost_are_sent_again_and_stored_once(
    buffer: ReplayBuffer,
) -> None:
    names = [f"g{i}" for i in range(200)]
    pushes = [asyncio.create_task(buffer.push(make_group(name))) for name in names]
    for _ in range(10):
        await buffer._redis.client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.005)
    results = await asyncio.gather(*pushes)
    assert set(results) <= {PushResult.stored, PushResult.duplicate}
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready) == (200, 200) and stats.is_conserved
    assert await find_violations(buffer) == []


async def test_cancelled_pushes_leave_nothing_half_done(buffer: ReplayBuffer) -> None:
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
    async for key in buffer._redis.scan_iter(buffer.keys.payload("*")):
        group = buffer.keys.group(key.decode().rpartition(":")[2])
        assert await buffer._redis.hget(group, "state") == b"ready"
