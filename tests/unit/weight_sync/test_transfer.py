"""Versions on the wire: real sender and receiver processes, real gloo groups, whole files."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file
from wire_fleet import CALL_S, SenderProcess, WireFleet
from wire_model import file_data, make_manifest, make_transfer, num_buckets

from weight_sync.errors import (
    ChecksumMismatch,
    ReceiverUnreachable,
    StoreBusyError,
    TransferFailed,
    UnknownVersion,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FleetFactory = Callable[..., Awaitable[WireFleet]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def senders() -> AsyncIterator[dict[int, SenderProcess]]:
    """By rank; live ones are reused across tests."""
    senders: dict[int, SenderProcess] = {}
    yield senders
    await asyncio.gather(*(sender.stop() for sender in senders.values()))


@pytest_asyncio.fixture(loop_scope="module")
async def start_fleet(
    tmp_path: Path, senders: dict[int, SenderProcess]
) -> AsyncIterator[FleetFactory]:
    """The silence that they bear is longer than any call: losses must be noticed as such."""
    fleets: list[WireFleet] = []

    async def start(num_senders: int, *receivers: str, timeout_s: float = 300.0) -> WireFleet:
        for rank in range(num_senders):
            if rank not in senders or senders[rank].process.returncode is not None:
                senders[rank] = await SenderProcess.start(rank)
        fleet = WireFleet(tmp_path, [senders[rank] for rank in range(num_senders)], timeout_s)
        fleets.append(fleet)
        await asyncio.gather(*map(fleet.start_receiver, receivers))
        return fleet

    yield start
    for fleet in fleets:
        await fleet.close()


async def finish(fleet: WireFleet, version: int, *names: str) -> None:
    manifest = make_manifest(fleet.layout, version)
    for name in names:
        await fleet.clients[name].finish(manifest, timeout_s=CALL_S)
        await fleet.clients[name].release(version, timeout_s=CALL_S)


async def publish(fleet: WireFleet, version: int, base: int | None, *names: str) -> None:
    total = num_buckets(fleet.layout, make_transfer(fleet.layout, version, base))
    fleet.send(version, base)
    assert [await received for received in fleet.receive(version, base).values()] == [total] * len(
        names
    )
    assert [await sender.hear() for sender in fleet.senders] == [{}] * len(fleet.senders)
    await finish(fleet, version, *names)


async def assert_staged(fleet: WireFleet, version: int, *names: str) -> None:
    expected = fleet.layout.file_header + file_data(fleet.layout, version).numpy().tobytes()
    for name in names:
        staged = await fleet.clients[name].newest(version - 1, timeout_s=5.0)
        assert staged is not None and staged.version == version
        file = Path(staged.path) / "model.safetensors"
        assert file.read_bytes() == expected
        tensors = load_file(file)
        assert {name: tuple(t.shape) for name, t in tensors.items()} == {
            spec.name: spec.shape for spec in fleet.layout.tensors
        }


async def stop_in_the_middle(
    fleet: WireFleet, victim: str, number: signal.Signals
) -> dict[str, asyncio.Task[object]]:
    """Version 1 has half gone when a receiver is hit; returns the receivers' answers."""
    fleet.send(1, None, halt_at=20)
    tasks = fleet.receive(1)
    assert await fleet.senders[-1].hear() == {"at": 20}
    fleet.signal_receiver(victim, number)
    fleet.senders[-1].tell(go=True)
    return tasks


async def finish_with(fleet: WireFleet, survivor: str) -> None:
    """The next epoch, without the victim, goes on from the first bucket that did not arrive."""
    total = num_buckets(fleet.layout, make_transfer(fleet.layout, 1))
    status = await fleet.clients[survivor].status(timeout_s=CALL_S)
    first = status.received
    assert 10 < first < total and status.receiving == make_transfer(fleet.layout, 1)
    await fleet.join(survivor)
    fleet.send(1, None, first=first)
    assert await fleet.receive(1, first=first)[survivor] == total
    assert [await sender.hear() for sender in fleet.senders] == [{}] * len(fleet.senders)
    await finish(fleet, 1, survivor)
    await assert_staged(fleet, 1, survivor)


@pytest.mark.parametrize("victim", ["east", "west"])
async def test_killed_receiver_costs_itself_and_the_others_go_on_from_where_they_were(
    start_fleet: FleetFactory, victim: str
) -> None:
    fleet = await start_fleet(2, "east", "west")
    survivor = "west" if victim == "east" else "east"
    await fleet.join("east", "west")
    tasks = await stop_in_the_middle(fleet, victim, signal.SIGKILL)
    with pytest.raises(TransferFailed, match=rf"receiver {survivor} .*receiver {victim}"):
        await tasks[survivor]
    with pytest.raises(ReceiverUnreachable):
        await tasks[victim]
    for sender in fleet.senders:
        assert "bucket" in (await sender.hear())["error"]
    await finish_with(fleet, survivor)
    assert await fleet.receivers[victim].wait_dead() == -signal.SIGKILL


async def test_stopped_receiver_is_given_up_and_its_version_is_never_whole(
    start_fleet: FleetFactory,
) -> None:
    fleet = await start_fleet(2, "east", "west", timeout_s=2.0)
    await fleet.join("east", "west", timeout_s=5.0)
    tasks = await stop_in_the_middle(fleet, "west", signal.SIGSTOP)
    with pytest.raises(TransferFailed, match="bucket"):
        await tasks["east"]
    errors = [(await sender.hear())["error"] for sender in fleet.senders]
    assert all("receiver east" in error for error in errors)
    with pytest.raises(ReceiverUnreachable):
        await fleet.clients["west"].status(timeout_s=0.5)
    await finish_with(fleet, "east")
    fleet.signal_receiver("west", signal.SIGCONT)
    with pytest.raises(TransferFailed):
        await tasks["west"]
    with pytest.raises(ChecksumMismatch, match="ended after"):
        await finish(fleet, 1, "west")
    status = await fleet.clients["west"].status(timeout_s=CALL_S)
    assert (status.newest, status.complete, status.receiving) == (None, (), None)
    report = await fleet.clients["west"].catch_up(
        1, [fleet.clients["east"].url], fleet.layout, timeout_s=CALL_S
    )
    assert report.peer == fleet.clients["east"].url
    await assert_staged(fleet, 1, "west")


@pytest.mark.parametrize(
    ("base", "what"), [(None, "1 of 41 tensors differ"), (0, "tensors differ|damaged")]
)
async def test_flipped_bit_is_refused_and_the_version_before_it_stays(
    start_fleet: FleetFactory, base: int | None, what: str
) -> None:
    fleet = await start_fleet(1, "east")
    await fleet.join("east")
    await publish(fleet, 0, None, "east")
    fleet.send(1, base, flip_at=0)
    await fleet.receive(1, base)["east"]
    assert await fleet.senders[0].hear() == {}
    with pytest.raises(ChecksumMismatch, match=what):
        await finish(fleet, 1, "east")
    with pytest.raises(UnknownVersion):
        await fleet.clients["east"].release(1, timeout_s=CALL_S)
    await assert_staged(fleet, 0, "east")
    await publish(fleet, 1, base, "east")  # the same version again, as it should be
    await assert_staged(fleet, 1, "east")


async def test_buckets_that_are_here_already_are_passed_on_and_ignored(
    start_fleet: FleetFactory,
) -> None:
    fleet = await start_fleet(2, "east", "west")
    await fleet.join("east")
    fleet.send(1, None)
    total = await fleet.receive(1)["east"]
    assert [await sender.hear() for sender in fleet.senders] == [{}, {}]
    await fleet.join("east", "west")
    fleet.send(1, None)
    assert [await received for received in fleet.receive(1).values()] == [total, total]
    assert [await sender.hear() for sender in fleet.senders] == [{}, {}]
    await finish(fleet, 1, "east", "west")
    await assert_staged(fleet, 1, "east", "west")
    # Whole at both, which pass everything on.
    assert [await received for received in fleet.receive(1, first=total).values()] == [total] * 2


async def test_receiver_without_a_place_for_a_version_leaves_and_the_others_notice(
    start_fleet: FleetFactory,
) -> None:
    fleet = await start_fleet(1, "east", "west")
    east, west = fleet.clients["east"], fleet.clients["west"]
    await fleet.join("east", "west")
    await publish(fleet, 0, None, "east", "west")
    await publish(fleet, 1, None, "east", "west")
    await west.hold(0, "a-reader", 60.0, timeout_s=CALL_S)
    full = make_transfer(fleet.layout, 2)
    for refusal, transfer, first in (
        (UnknownVersion, replace(full, base_version=7), 0),
        (StoreBusyError, full, 0),
        (TransferFailed, full, 5),
    ):
        if refusal is TransferFailed:
            await west.let_go(0, "a-reader", timeout_s=CALL_S)
        fleet.send(2, None)
        receiving = asyncio.create_task(east.receive(full, fleet.epoch, 0, timeout_s=CALL_S))
        with pytest.raises(refusal):
            await west.receive(transfer, fleet.epoch, first, timeout_s=CALL_S)
        with pytest.raises(TransferFailed):
            await receiving
        assert "receiver east" in (await fleet.senders[0].hear())["error"]
        assert (await west.status(timeout_s=CALL_S)).epoch is None
        await fleet.join("east", "west")


async def test_sender_that_is_killed_leaves_no_version_and_no_wait(
    start_fleet: FleetFactory,
) -> None:
    fleet = await start_fleet(2, "east", "west")
    await fleet.join("east", "west")
    fleet.send(1, None, halt_at=20)
    tasks = fleet.receive(1)
    assert await fleet.senders[-1].hear() == {"at": 20}
    await fleet.senders[-1].stop()
    for name in ("east", "west"):
        with pytest.raises(TransferFailed):
            await tasks[name]
    assert "error" in await fleet.senders[0].hear()
    for name in ("east", "west"):
        assert (await fleet.clients[name].status(timeout_s=CALL_S)).complete == ()
        assert await fleet.clients[name].newest(-1, timeout_s=0.0) is None
