"""Events of receivers that catch up, against a real socket."""

from __future__ import annotations

import asyncio
import json

from configs.schema import WeightSyncConfig
from tests.support.weights.known_weights import scene_layout
from tests.support.weights.memory_board import MemoryBoard
from weight_sync.coordinator.catch_up import CatchUp
from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.receiver.client import ReceiverStatus
from weight_sync.timeouts import Timeouts

STATUS = {"name": "a", "pid": 1, "complete": [0], "receiving": None, "received": 0}
WHOLE = {**STATUS, "newest": None, "epoch": None, "layout_digest": None}
"""Version 0 is whole here, and no engine sees it yet."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The answer to a request to catch up is lost; all others arrive."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"/catch_up" not in head:
        body = json.dumps(WHOLE if b"/status" in head else {}).encode()
        lines = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(lines + body)
        await writer.drain()
    writer.close()


async def test_lost_answer_is_made_up_for_though_the_version_was_not_yet_released() -> None:
    board = MemoryBoard()
    timeouts = Timeouts(config=WeightSyncConfig(), layout=scene_layout(1), control_s=60.0)
    fleet = Fleet(board, timeouts, "key")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        board.registered["a"] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        (client,) = await fleet.registered()
        async with asyncio.TaskGroup() as tasks:
            catch_up = CatchUp(timeouts, fleet, board, tasks)
            status = ReceiverStatus(**{**WHOLE, "complete": (0,)})  # type: ignore[arg-type]
            assert catch_up.begin(0, [client], [Member(client=client, status=status)]) == []
        assert [e["who"] for e in board.events("catch_up_failed")] == ["a"]
        for _ in range(2):  # it is told once
            assert await catch_up.tend(0, [client]) == []
        await fleet.close()
    (event,) = board.events("catch_up")
    assert event["detail"] == "version 0 is here, though the answer was lost"
    assert board.staged == [("a", 0)] * 2
