"""The receiver process and its HTTP API, seen by an engine, a coordinator and a keyless client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from processes.child import Child
from tests.support.weights.forked_receivers import ForkedChild
from tests.support.weights.receiver_specs import CALL_S, KEY, receiver_spec
from tests.support.weights.wire_model import file_data, make_manifest, make_transfer, model_layout
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.receiver.store import StagedStore
from weight_sync.types import (
    ReceiverSpec,
    ReceiverUnreachable,
    StoreBusyError,
    TransferFailed,
    UnknownLayout,
    UnknownVersion,
    WeightSyncError,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LAYOUT = model_layout(2)
HUGE = b'{"digest": "x", "layout": {"num_ranks": 1e12, "tensors": [["a", "float32", [1]]]}}'
OTHER_DIGEST = json.dumps({"digest": "x", "layout": model_layout(1).to_json()}).encode()
UNKNOWN = replace(make_transfer(LAYOUT, 9), layout_digest="x")


DELTA = replace(make_transfer(LAYOUT, 9), base_version=8)
MANIFEST = asdict(make_manifest(LAYOUT, 9).note)


def as_body(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


class Receivers:
    """Starts receiver processes in a test's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[ReceiverProcess] = []
        self.clients: list[ReceiverClient] = []

    def spec(self, name: str) -> ReceiverSpec:
        return receiver_spec(name, self._folder)

    def stage(self, name: str, *versions: int, should_release: bool = True) -> None:
        """As an earlier process of this receiver would have left its folder."""
        store = StagedStore(Path(self.spec(name).folder), 2)
        store.set_layout(LAYOUT)
        for version in versions:
            slot = store.begin(make_transfer(LAYOUT, version))
            slot.data.copy_(file_data(LAYOUT, version))
            store.complete(slot, make_manifest(LAYOUT, version))
            if should_release:
                store.release(version)
        store.close()

    async def start(
        self, name: str, start_child: Callable[..., Any] = ForkedChild
    ) -> ReceiverClient:
        process = ReceiverProcess(self.spec(name), self._folder / f"{name}.log", start_child)
        self.processes.append(process)
        url = await process.start()
        self.clients.append(ReceiverClient(name, url, KEY))
        return self.clients[-1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for process in self.processes:
            await process.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    receivers = Receivers(tmp_path)
    yield receivers
    await receivers.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def north(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReceiverClient]:
    """Has released version 3, and is only asked by the tests that share it."""
    receivers = Receivers(tmp_path_factory.mktemp("north"))
    receivers.stage("north", 3)
    yield await receivers.start("north")
    await receivers.close()


def staged_bytes(path: str) -> bytes:
    return (Path(path) / "model.safetensors").read_bytes()


def file_bytes(version: int) -> bytes:
    return LAYOUT.file_header + file_data(LAYOUT, version).numpy().tobytes()


async def test_requests_without_the_key_are_refused(north: ReceiverClient) -> None:
    async with httpx.AsyncClient(base_url=north.url, trust_env=False) as anonymous:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": KEY}):
            for path in ("/status", "/newest?above=0&timeout_s=0", "/data/3", "/nowhere"):
                assert (await anonymous.get(path, headers=headers)).status_code == 401
            assert (await anonymous.post("/release", headers=headers)).status_code == 401


async def test_requests_that_make_no_sense_are_refused_in_words(north: ReceiverClient) -> None:
    size = LAYOUT.num_bytes
    async with httpx.AsyncClient(
        base_url=north.url, trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
    ) as http:
        for method, path, body, status in (
            ("POST", "/layout", b'{"digest": "x", "layout": {"tensors": 3}}', 400),
            ("POST", "/layout", HUGE, 400),
            ("POST", "/layout", OTHER_DIGEST, 409),
            ("POST", "/layout", b"{}", 400),
            ("POST", "/receive", as_body(transfer=UNKNOWN, epoch=1, first=0), 412),
            ("POST", "/verify", as_body(version=9, layout_digest="x", checksums=[]), 412),
            ("POST", "/catch_up", as_body(version=9, peers=[], layout_digest="x"), 412),
            ("POST", "/verify", as_body(**{**MANIFEST, "checksums": [[1], [2]]}), 400),
            ("POST", "/join", b'{"group": {}, "rank": 0}', 400),
            ("POST", "/receive", b"not json", 400),
            ("POST", "/release", b'{"version": Infinity}', 400),
            ("POST", "/release", b'{"version": 1e999}', 400),
            ("POST", "/release", b'{"version": 18446744073709551616}', 400),
            ("POST", "/release", b"[" * 100_000, 400),
            ("POST", "/hold", b'{"version": 3, "who": "x", "ttl_s": 1e300, "as_sent": false}', 400),
            ("GET", "/newest?above=9&timeout_s=nan", None, 400),
            ("GET", "/newest?above=9&timeout_s=2147483648", None, 400),
            ("POST", "/verify", as_body(**MANIFEST), 404),
            ("POST", "/receive", as_body(transfer=DELTA, epoch=1, first=0), 404),
            ("POST", "/release", b'{"version": 9}', 404),
            ("POST", "/hold", b'{"version": 9, "who": "x", "ttl_s": 1, "as_sent": false}', 404),
            ("GET", "/newest", None, 400),
            ("GET", "/newest?above=x&timeout_s=0", None, 400),
            ("GET", "/manifest/9", None, 404),
            ("GET", "/data/9", None, 404),
            ("GET", "/data/3", None, 416),
            ("GET", "/nowhere", None, 404),
        ):
            reply = await http.request(method, path, content=body)
            assert (path, reply.status_code) == (path, status)
            assert reply.json()["error"]
        for range_, status in (
            ("bytes=0-0", 206),
            (f"bytes=5-{size - 1}", 206),
            (f"bytes=0-{size}", 416),
            ("bytes=9-5", 416),
            ("bytes=-5", 416),
        ):
            reply = await http.get("/data/3", headers={"Range": range_})
            assert (range_, reply.status_code) == (range_, status)
    assert (await north.status(timeout_s=CALL_S)).layout_digest == LAYOUT.digest
    with pytest.raises(UnknownLayout, match="another model's weights"):
        await north.manifest(3, model_layout(1), timeout_s=CALL_S)


async def test_ranges_are_the_bytes_of_the_files_data(north: ReceiverClient) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        reply = await http.get(
            f"{north.url}/data/3",
            headers={"Authorization": f"Bearer {KEY}", "Range": "bytes=1000-70000"},
        )
    assert reply.content == file_data(LAYOUT, 3)[1000:70001].numpy().tobytes()
    assert reply.headers["content-range"] == f"bytes 1000-70000/{LAYOUT.num_bytes}"


async def test_release_wakes_waits_for_a_newer_version(receivers: Receivers) -> None:
    receivers.stage("east", 3)
    client = await receivers.start("east")
    newest = await client.newest(2, timeout_s=CALL_S)
    assert newest is not None and newest.version == 3
    assert await client.newest(3, timeout_s=0.1) is None
    waiting = [asyncio.create_task(client.newest(3, timeout_s=CALL_S)) for _ in range(2)]
    receivers.stage("west", 5)
    west = await receivers.start("west")
    await client.catch_up(5, [west.url], LAYOUT, timeout_s=CALL_S)
    for task in waiting:
        staged = await task
        assert staged is not None and staged.version == 5
        assert staged_bytes(staged.path) == file_bytes(5)


async def test_whole_version_is_invisible_before_its_release(receivers: Receivers) -> None:
    receivers.stage("east", 0, should_release=False)
    client = await receivers.start("east")
    status = await client.status(timeout_s=CALL_S)
    assert (status.newest, status.complete) == (None, (0,))
    waiting = asyncio.create_task(client.newest(-1, timeout_s=CALL_S))
    await client.verify(make_manifest(LAYOUT, 0), timeout_s=CALL_S)  # a retry of it changes nothing
    assert await client.newest(-1, timeout_s=0.1) is None
    await client.release(0, timeout_s=CALL_S)
    await client.release(0, timeout_s=CALL_S)
    staged = await waiting
    assert staged is not None and staged.version == 0
    assert (await client.manifest(0, LAYOUT, timeout_s=CALL_S)) == make_manifest(LAYOUT, 0)


async def test_killed_receiver_finds_its_versions_again(receivers: Receivers) -> None:
    receivers.stage("east", 3)
    client = await receivers.start("east", Child)  # as in production
    process = receivers.processes[0]
    of_system = Path(f"/proc/{process.pid}")
    assert KEY not in (of_system / "cmdline").read_text() + (of_system / "environ").read_text()
    assert KEY not in repr(process.spec)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait_dead() == -signal.SIGKILL
    with pytest.raises(ReceiverUnreachable, match="east"):
        await client.status(timeout_s=1.0)
    url = await process.start()
    again = ReceiverClient("east", url, KEY)
    receivers.clients.append(again)
    status = await again.status(timeout_s=CALL_S)
    assert (status.newest, status.layout_digest) == (3, LAYOUT.digest)
    assert status.obstacle == ""


async def test_receiver_ends_with_its_parent_and_leaves_its_versions(
    receivers: Receivers,
) -> None:
    receivers.stage("east", 3)
    await receivers.start("east")
    process, folder = receivers.processes[0], Path(receivers.spec("east").folder)
    await process.stop(should_remove=False)  # closes the pipe, as the end of its owner would
    assert await process.wait_dead() == 0
    assert folder.exists()
    await process.start()
    await process.stop()
    assert not folder.exists()


async def test_catch_up_goes_from_peer_to_peer_until_one_has_the_version(
    receivers: Receivers, north: ReceiverClient
) -> None:
    receivers.stage("west", 2)
    west, east = await receivers.start("west"), await receivers.start("east")
    with pytest.raises(TransferFailed, match="no peer sent version 3") as failed:
        await east.catch_up(3, [west.url, "http://127.0.0.1:1"], LAYOUT, timeout_s=CALL_S)
    assert west.url in str(failed.value) and "127.0.0.1:1" in str(failed.value)
    with pytest.raises(UnknownVersion):
        await east.manifest(3, LAYOUT, timeout_s=CALL_S)
    peer = await east.catch_up(3, [west.url, north.url], LAYOUT, timeout_s=CALL_S)
    assert peer == north.url
    staged = await east.newest(2, timeout_s=CALL_S)
    assert staged is not None and staged_bytes(staged.path) == file_bytes(3)
    assert await east.catch_up(3, [], LAYOUT, timeout_s=CALL_S) == ""
    await north.let_go(3, "receiver east", timeout_s=CALL_S)  # is let go already: no error


async def test_layout_travels_once_and_then_by_its_digest(
    receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    east = await receivers.start("east")
    bodies: list[dict[str, object]] = []
    call = east._call

    async def note(method: str, path: str, body: dict[str, object], *others: Any) -> Any:
        bodies.append(body)
        return await call(method, path, body, *others)

    monkeypatch.setattr(east, "_call", note)
    for version in (1, 2):
        with pytest.raises(TransferFailed, match="none was named"):
            await east.catch_up(version, [], LAYOUT, timeout_s=CALL_S)
    assert ["layout" in body for body in bodies] == [False, True, False, False]
    assert {body.get("digest", body.get("layout_digest")) for body in bodies} == {LAYOUT.digest}


async def test_peers_damaged_copy_is_refused(receivers: Receivers) -> None:
    receivers.stage("west", 3)
    west, east = await receivers.start("west"), await receivers.start("east")
    staged = await west.newest(2, timeout_s=CALL_S)
    assert staged is not None
    with (Path(staged.path) / "model.safetensors").open("r+b") as file:
        file.seek(len(LAYOUT.file_header) + 5000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(TransferFailed, match="1 tensors arrived damaged"):
        await east.catch_up(3, [west.url], LAYOUT, timeout_s=CALL_S)
    status = await east.status(timeout_s=CALL_S)
    assert (status.newest, status.complete) == (None, ())


async def test_held_version_stays(receivers: Receivers, north: ReceiverClient) -> None:
    receivers.stage("east", 2)
    east = await receivers.start("east")
    await east.hold(2, "engine 0", 300.0, timeout_s=CALL_S)
    await east.catch_up(3, [north.url], LAYOUT, timeout_s=CALL_S)
    for obstacle in ("version 2 is held by engine 0", ""):
        assert obstacle in (await east.status(timeout_s=CALL_S)).obstacle
        error = StoreBusyError if obstacle else TransferFailed
        with pytest.raises(error, match=obstacle or "not a member of epoch 1"):
            await east.receive(make_transfer(LAYOUT, 5), 1, 0, timeout_s=CALL_S)
        await east.let_go(2, "engine 0", timeout_s=CALL_S)


async def test_start_may_take_as_long_as_verifying_what_is_staged(receivers: Receivers) -> None:
    receivers.stage("east", 3)
    spec = replace(receivers.spec("east"), min_bandwidth=2 * LAYOUT.num_bytes / CALL_S)
    process = ReceiverProcess(spec, Path(spec.folder).parent / "east.log", ForkedChild)
    receivers.processes.append(process)
    url = await process.start(timeout_s=0.01)
    client = ReceiverClient("east", url, KEY)
    receivers.clients.append(client)
    assert (await client.status(timeout_s=CALL_S)).newest == 3


async def test_receiver_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "east").write_text("a file where its folder should be")
    process = ReceiverProcess(receiver_spec("east", tmp_path), tmp_path / "east.log", ForkedChild)
    with pytest.raises(WeightSyncError, match=r"ended at its start(.|\n)*FileExistsError"):
        await process.start()
    await process.stop(should_remove=False)
