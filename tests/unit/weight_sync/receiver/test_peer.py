"""A copy from a peer, whose slot is held only while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import uvicorn

from tests.support.weights.receiver_specs import receiver_spec
from tests.support.weights.staging import LAYOUT, Clock, content, full, manifest_of, stage
from weight_sync.receiver import peer
from weight_sync.receiver.app import make_app
from weight_sync.receiver.peer import copy_from_peer
from weight_sync.receiver.receiver import Receiver
from weight_sync.receiver.store import StagedStore
from weight_sync.types import Manifest, UnknownVersion, WeightSyncError

TIMEOUT_S = 10.0
_START_S = 30.0


class WatchedStore(StagedStore):
    """Calls `on_hold` with the seconds before receiver east holds a version."""

    on_hold: Callable[[float], None] | None = None

    def hold(self, version: int, who: str, ttl_s: float) -> None:
        if self.on_hold is not None and who == "receiver east":
            self.on_hold(ttl_s)
        super().hold(version, who, ttl_s)


class Served:
    """A receiver with versions 1 and 2, behind its HTTP API."""

    def __init__(self, folder: Path) -> None:
        spec, self.clock = receiver_spec("west", folder, TIMEOUT_S), Clock()
        self.receiver = Receiver(spec)
        self.receiver.store.close()  # one store at a time has the folder
        self.store = WatchedStore(Path(spec.folder), spec.num_slots, clock=self.clock)
        self.receiver.store = self.store
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


def copy(west: Served, data: torch.Tensor) -> Manifest:
    """The process of receiver east."""
    spec = receiver_spec("east", Path(), TIMEOUT_S)
    return asyncio.run(copy_from_peer(west.url, 1, LAYOUT, data, spec))


def room() -> torch.Tensor:
    return torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)


def test_hold_is_short_and_renewed_with_every_range(
    west: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that outlasted the whole copy would outlive a joiner that dies by minutes."""
    holds: list[float] = []

    def note(ttl_s: float) -> None:
        holds.append(ttl_s)
        west.clock.now += 1.5 * TIMEOUT_S  # a slow copy, in all longer than one hold

    west.store.on_hold, data = note, room()
    monkeypatch.setattr(peer, "RANGE_BYTES", 500)
    manifest = copy(west, data)
    assert torch.equal(data, content(1)) and manifest == manifest_of(1, content(1))
    assert len(holds) > LAYOUT.num_bytes / 500
    assert max(holds) <= 2 * TIMEOUT_S + 1
    west.store.begin(full(3))


def test_copy_that_fails_half_way_lets_go(west: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "wire_s", lambda *_: 0.0)
    with pytest.raises(WeightSyncError, match=r"slower than weight_sync\.min_bandwidth"):
        copy(west, room())
    west.clock.now += 1  # that of the range that was broken off
    west.store.let_go(1, "read 1")
    west.store.begin(full(3))


class Trickle(BaseHTTPRequestHandler):
    """A peer whose receiver answers for it, but for the data: a byte now and then."""

    west: Served
    where: str

    def do_GET(self) -> None:
        if not self.path.startswith("/data"):
            return self._forward()
        with contextlib.suppress(OSError):
            for head in (b"HTTP/1.1 206 P\r\nX: ", b"a\r\nContent-Length: 99999\r\n\r\n"):
                self.wfile.write(head)
                while head.endswith(b": ") == (self.where == "head"):
                    self.wfile.write(b"x")
                    time.sleep(0.02)

    def do_POST(self) -> None:
        self._forward()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.west.url + self.path, body or None, dict(self.headers.items()))
        with urlopen(request, timeout=_START_S) as response:
            said = response.read()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.parametrize("where", ["head", "data"])
def test_peer_that_sends_a_byte_now_and_then_is_left(
    west: Served, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(peer, "wire_s", lambda *_: 0.5)
    handler = type("Handler", (Trickle,), {"west": west, "where": where})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        spec = receiver_spec("east", Path(), TIMEOUT_S)
        with pytest.raises(WeightSyncError, match=r"slower than weight_sync\.min_bandwidth"):
            asyncio.run(copy_from_peer(url, 1, LAYOUT, room(), spec))
        server.shutdown()


def test_version_that_goes_in_the_middle_ends_the_copy(
    west: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds: list[float] = []

    def lose(ttl_s: float) -> None:
        holds.append(ttl_s)
        if len(holds) == 3:
            raise UnknownVersion("version 1 is not staged here")

    west.store.on_hold = lose
    monkeypatch.setattr(peer, "RANGE_BYTES", 500)
    with pytest.raises(WeightSyncError, match="version 1 is not staged here"):
        copy(west, room())
    west.store.begin(full(3))
