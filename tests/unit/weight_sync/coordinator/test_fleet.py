"""The coordinator waits for receivers only while they respond; against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from configs.schema import WeightSyncConfig
from tests.support.weights.known_weights import scene_layout
from tests.support.weights.memory_board import MemoryBoard
from weight_sync.coordinator.fleet import Backoff, Fleet
from weight_sync.timeouts import Timeouts
from weight_sync.types import ReceiverUnreachable, WeightSyncError

STATUS = (
    b'{"name": "a", "pid": 1, "newest": null, "complete": [], "receiving": null, "received": 0, '
    b'"epoch": null, "layout_digest": null}'
)
LIMIT_S = 60.0


class OneReceiver:
    """Responds to /status while it runs, and to other requests only once released."""

    def __init__(self) -> None:
        self.lives = True
        self.num_looks = 0
        self.num_connections = 0
        self.has_work = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.changed = asyncio.Condition()
        self._serving: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self._serving.add(task)
        await asyncio.wait([task])

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await self._answer(reader, writer)
        finally:
            writer.close()
            self.num_connections -= 1
        async with self.changed:
            self.changed.notify_all()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        sizes = [int(value) for name, value in _fields(head) if name == "content-length"]
        await reader.readexactly(sum(sizes))
        if not self.lives:
            await asyncio.Event().wait()
        if b"/status" in head:
            self.num_looks += 1
            body = STATUS
        else:
            self.has_work.set()
            await self.may_answer.wait()
            body = b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with self.changed:
            self.changed.notify_all()


def _fields(head: bytes) -> list[tuple[str, str]]:
    lines = head.decode().split("\r\n")[1:]
    return [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines)]


@contextlib.asynccontextmanager
async def fleet_of_one(
    timeout_s: float = 2.0,
) -> AsyncIterator[tuple[Fleet, MemoryBoard, OneReceiver]]:
    receiver, board = OneReceiver(), MemoryBoard()
    server = await asyncio.start_server(receiver.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    board.registered["a"] = f"http://127.0.0.1:{port}"
    config = WeightSyncConfig(timeout_s=timeout_s)
    fleet = Fleet(board, Timeouts(config=config, layout=scene_layout(1), control_s=1.0), "key")
    try:
        yield fleet, board, receiver
    finally:
        await fleet.close()
        server.close()
        await receiver.close()


async def test_receiver_that_works_is_waited_for_while_it_shows_signs_of_life() -> None:
    async with fleet_of_one() as (fleet, board, receiver):
        (client,) = await fleet.registered()
        call = asyncio.create_task(fleet.call(client, client.release(0, timeout_s=LIMIT_S)))
        async with asyncio.timeout(LIMIT_S), receiver.changed:
            await receiver.changed.wait_for(lambda: receiver.num_looks >= 4)
        assert not call.done()
        receiver.may_answer.set()
        await asyncio.wait([call], timeout=LIMIT_S)
        assert call.result() is None and board.records == []


async def test_receiver_that_falls_silent_is_given_up_long_before_its_request_is() -> None:
    async with fleet_of_one(timeout_s=0.6) as (fleet, board, receiver):
        (client,) = await fleet.registered()
        receiver.lives = False
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ReceiverUnreachable, match="did not respond to /status"):
                await fleet.call(client, client.release(0, timeout_s=1000.0))
        assert [(e["event"], e["who"]) for e in board.records] == [("excluded", "a")]
        assert await fleet.members([client]) == []  # and is not asked again
        await fleet.report_failure(client, "left_out", "that is no news")
        assert len(board.records) == 1


async def test_release_that_fails_is_reported_and_may_be_tried_again() -> None:
    async with fleet_of_one() as (fleet, board, receiver):
        (client,) = await fleet.registered()
        assert not await fleet.release(client, 3)  # its answer does not come in time
        assert [event["who"] for event in board.events("unreleased")] == ["a"]
        assert not fleet.has_released(client, 3)
        receiver.may_answer.set()
        assert await fleet.release(client, 3)
        assert fleet.has_released(client, 3) and not fleet.has_released(client, 4)


async def test_failure_is_reported_once_until_the_receiver_is_healthy() -> None:
    async def refuse(client: object) -> None:
        raise WeightSyncError("no room")

    async with fleet_of_one() as (fleet, board, _):
        clients = await fleet.registered()
        for _ in range(3):
            assert await fleet.ask(clients, refuse, "left_out") == {}
        assert [e["detail"] for e in board.events("left_out")] == ["no room"]
        fleet.mark_healthy(clients[0])
        await fleet.ask(clients, refuse, "left_out")
        assert len(board.events("left_out")) == 2


async def test_receiver_that_is_registered_no_more_is_let_go_after_its_last_request() -> None:
    async with fleet_of_one() as (fleet, board, receiver):
        (client,) = await fleet.registered()
        call = asyncio.create_task(fleet.call(client, client.release(0, timeout_s=LIMIT_S)))
        async with asyncio.timeout(LIMIT_S):
            await receiver.has_work.wait()
            del board.registered["a"]
            assert await fleet.registered() == []
            receiver.may_answer.set()
            await call  # was not cut off
            assert receiver.num_connections > 0
            assert await fleet.registered() == []
            async with receiver.changed:
                await receiver.changed.wait_for(lambda: receiver.num_connections == 0)


async def test_receiver_that_is_replaced_as_it_is_probed_keeps_its_connection_until_then() -> None:
    async with fleet_of_one() as (fleet, board, receiver):
        (old,) = await fleet.registered()
        probing = asyncio.create_task(fleet.members([old]))
        await asyncio.sleep(0)  # it has begun, and its request has not
        assert receiver.num_looks == 0 and not probing.done()
        board.registered["a"] = "http://127.0.0.1:9"
        assert old not in await fleet.registered()
        async with asyncio.timeout(LIMIT_S):
            assert [member.client for member in await probing] == [old]
            await fleet.registered()  # which closes it now
            async with receiver.changed:
                await receiver.changed.wait_for(lambda: receiver.num_connections == 0)


async def test_receiver_that_is_replaced_as_its_probe_fails_is_no_failure() -> None:
    async with fleet_of_one(timeout_s=0.6) as (fleet, board, receiver):
        (old,) = await fleet.registered()
        receiver.lives = False
        probing = asyncio.create_task(fleet.members([old]))
        await asyncio.sleep(0)
        board.registered["a"] = "http://127.0.0.1:9"
        await fleet.registered()
        async with asyncio.timeout(LIMIT_S):
            assert await probing == []
        await fleet.report_failure(old, "left_out", "it is gone")
        assert board.records == []


class Somebody:
    pass


def test_rest_doubles_with_each_failure_up_to_its_limit_and_ends_with_a_success() -> None:
    now = 0.0
    backoff = Backoff(10.0, 35.0, clock=lambda: now)
    who = Somebody()
    assert not backoff.has_failed(who) and not backoff.is_resting(who)
    assert [backoff.failed(who) for _ in range(4)] == [10.0, 20.0, 35.0, 35.0]
    now = 34.9
    assert backoff.is_resting(who) and not backoff.is_resting(Somebody())
    now = 35.0
    assert not backoff.is_resting(who) and backoff.has_failed(who)
    backoff.worked(who)
    assert not backoff.has_failed(who) and backoff.failed(who) == 10.0
