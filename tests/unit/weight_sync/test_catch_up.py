"""A copy from a peer, whose slot is kept no longer than somebody reads it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio
import torch
import uvicorn
from staging import LAYOUT, Clock, content, full, manifest_of, stage
from wire_fleet import KEY, receiver_spec

from weight_sync.errors import StoreBusyError, UnknownVersion
from weight_sync.layout import Manifest
from weight_sync.receiver import peer as catch_up
from weight_sync.receiver.app import make_app
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.peer import copy_from_peer
from weight_sync.receiver.receiver import Receiver
from weight_sync.types import WeightSyncError

TIMEOUT_S = 10.0
EAST = "receiver east"
_START_S = 30.0


class Served:
    """A receiver with versions 1 and 2, behind its HTTP API."""

    def __init__(self, folder: Path) -> None:
        self.receiver = Receiver(receiver_spec("west", folder, TIMEOUT_S), pid=1)
        self.store = self.receiver._store
        self.store._clock = self.clock = Clock()
        self.store.set_layout(LAYOUT)
        for version in (1, 2):
            stage(self.store, version)
        self._server = uvicorn.Server(
            uvicorn.Config(make_app(self.receiver), port=0, log_level="warning", lifespan="off")
        )
        self._thread = threading.Thread(target=self._serve)
        self._is_up = threading.Event()
        self._thread.start()
        assert self._is_up.wait(_START_S)

    def _serve(self) -> None:
        startup = self._server.startup

        async def start(*arguments: Any, **named: Any) -> None:
            await startup(*arguments, **named)
            self._is_up.set()

        self._server.startup = start  # type: ignore[method-assign]
        self._server.run()

    @property
    def url(self) -> str:
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START_S)
        self.receiver.close(should_remove=True)


@pytest.fixture
def west(tmp_path: Path) -> Iterator[Served]:
    west = Served(tmp_path)
    yield west
    west.close()


@pytest_asyncio.fixture
async def peer(west: Served) -> AsyncIterator[ReceiverClient]:
    """West, as a receiver that catches up sees it."""
    peer = ReceiverClient("west", west.url, KEY)
    yield peer
    await peer.close()


async def copy(peer: ReceiverClient, data: torch.Tensor) -> Manifest:
    return await copy_from_peer(
        peer, EAST, 1, LAYOUT, data, timeout_s=TIMEOUT_S, min_bandwidth=50e6
    )


def room() -> torch.Tensor:
    return torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)


async def test_every_range_renews_a_short_hold(west: Served, peer: ReceiverClient) -> None:
    """One that outlasted the whole copy would outlive a joiner that dies by minutes."""
    holds: list[float] = []
    hold = west.store.hold

    def note(version: int, who: str, ttl_s: float) -> None:
        if who == EAST:
            holds.append(ttl_s)
            west.clock.now += 1.5 * TIMEOUT_S  # a slow copy, in all longer than one hold
        hold(version, who, ttl_s)

    data = room()
    with patch.object(west.store, "hold", note), patch.object(catch_up, "_RANGE_BYTES", 500):
        manifest = await copy(peer, data)
    assert torch.equal(data, content(1)) and manifest == manifest_of(1, content(1))
    assert len(holds) > LAYOUT.num_bytes / 500
    assert max(holds) <= 2 * TIMEOUT_S + 1
    west.store.begin(full(3))


async def test_a_joiner_that_dies_costs_the_slot_for_two_silences(
    west: Served, peer: ReceiverClient
) -> None:
    async def die(*_: object, **__: object) -> None:
        raise WeightSyncError("dead")

    with (
        patch.object(peer, "manifest", die),
        patch.object(peer, "let_go", die),
        pytest.raises(WeightSyncError, match="dead"),
    ):
        await copy(peer, room())
    with pytest.raises(StoreBusyError, match=EAST):
        west.store.begin(full(3))
    west.clock.now += 2 * TIMEOUT_S + 2
    west.store.begin(full(3))


async def test_a_copy_that_is_too_slow_ends_half_way_and_lets_go(
    west: Served, peer: ReceiverClient
) -> None:
    read, num_reads = peer.read, 0

    async def read_slowly(*where: Any, **limits: Any) -> None:
        nonlocal num_reads
        num_reads += 1
        await read(*where, **limits)
        if num_reads == 2:
            await asyncio.Event().wait()

    with (
        patch.object(peer, "read", read_slowly),
        patch.object(catch_up, "_RANGE_BYTES", 500),
        patch.object(catch_up, "bucket_timeout_s", lambda *_: 1.0),
        pytest.raises(WeightSyncError, match=r"slower than weight_sync\.min_bandwidth"),
    ):
        await copy(peer, room())
    assert num_reads == 2
    west.store.begin(full(3))


async def test_a_version_that_goes_in_the_middle_ends_the_copy(
    west: Served, peer: ReceiverClient
) -> None:
    hold, num_holds = west.receiver.hold, 0

    def lose(version: int, who: str, ttl_s: float) -> None:
        nonlocal num_holds
        num_holds += who == EAST
        if num_holds == 3:
            raise UnknownVersion("version 1 is not staged here")
        hold(version, who, ttl_s)

    with (
        patch.object(west.receiver, "hold", lose),
        patch.object(catch_up, "_RANGE_BYTES", 500),
        pytest.raises(UnknownVersion, match="version 1 is not staged"),
    ):
        await copy(peer, room())
    west.store.begin(full(3))


async def test_a_range_that_is_gone_when_it_is_read_is_refused_in_words(
    west: Served, peer: ReceiverClient
) -> None:
    with pytest.raises(UnknownVersion, match="version 9 is not staged"):
        await peer.read(9, 0, memoryview(bytearray(10)), timeout_s=TIMEOUT_S)
