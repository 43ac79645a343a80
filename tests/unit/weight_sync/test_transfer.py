"""Versions on the wire: senders and receivers as threads, real gloo groups, whole files.

Processes that are killed and stopped: test_coordinator.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.schema import WeightSyncConfig
from tests.support.weights.receiver_specs import CALL_S, receiver_spec
from tests.support.weights.wire_model import (
    file_data,
    make_manifest,
    make_transfer,
    model_layout,
    wire_stream,
)
from weight_sync.buckets import plan_buckets
from weight_sync.group import open_store
from weight_sync.group_thread import Staging
from weight_sync.receiver.receiver import Receiver, device_of
from weight_sync.sender.rank import Sender
from weight_sync.types import (
    ChecksumMismatch,
    GroupSpec,
    StoreBusyError,
    TransferFailed,
    UnknownVersion,
    WeightSyncError,
)

CPU = torch.device("cpu")


class TamperedStaging(Staging):
    """Holds up one bucket, flips a bit of one, or fails at one."""

    def __init__(self, halt_at: int = -1, flip_at: int = -1, fail_at: int = -1) -> None:
        super().__init__(WeightSyncConfig().num_buffers, CPU)
        self._halt_at, self._flip_at, self._fail_at = halt_at, flip_at, fail_at
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def upload(self, turn: int, part: Tensor) -> Tensor:
        if turn == self._halt_at:
            self.is_there.set()
            assert self.go_on.wait(CALL_S)
        if turn == self._fail_at:
            raise RuntimeError("the GPU is gone")
        if turn == self._flip_at:
            part = part.clone()
            part[part.numel() // 2] ^= 4
        return super().upload(turn, part)


class Fleet:
    """Drives epochs and transfers by hand, in place of the coordinator."""

    def __init__(
        self, folder: Path, pool: ThreadPoolExecutor, num_senders: int, num_chains: int
    ) -> None:
        self._pool = pool
        self._num_chains = num_chains
        self._store = open_store("127.0.0.1", CALL_S)
        self._members: list[Receiver] = []
        self.layout = model_layout(num_senders)
        self.senders = [Sender(rank, WeightSyncConfig(), CPU) for rank in range(num_senders)]
        self.epoch = 0
        self.east, self.west = (Receiver(receiver_spec(n, folder)) for n in ("east", "west"))
        for receiver in (self.east, self.west):
            receiver.set_layout(self.layout)

    def join(self, *receivers: Receiver) -> None:
        self.epoch += 1
        self._members = list(receivers)
        spec = GroupSpec(
            epoch=self.epoch,
            host="127.0.0.1",
            port=self._store.port,
            name="leash-test",
            num_senders=len(self.senders),
            receivers=tuple(receiver.spec.name for receiver in receivers),
            backend="gloo",
            timeout_s=CALL_S,
            num_chains=self._num_chains,
        )
        joins: list[Future[None]] = [
            *(self._pool.submit(sender.join, spec) for sender in self.senders),
            *(self._pool.submit(receiver.join, spec) for receiver in receivers),
        ]
        for join in joins:
            join.result(CALL_S)

    def send(self, version: int, base: int | None = None, first: int = 0) -> list[Future[None]]:
        buckets = plan_buckets(self.layout, make_transfer(self.layout, version, base))
        streams = [wire_stream(self.layout, s._rank, version, base) for s in self.senders]
        return [
            self._pool.submit(sender.send, buckets, stream, first)
            for sender, stream in zip(self.senders, streams, strict=True)
        ]

    def receive(self, version: int, base: int | None = None, first: int = 0) -> list[Future[int]]:
        transfer = make_transfer(self.layout, version, base)
        return [
            self._pool.submit(receiver.receive, transfer, self.epoch, first)
            for receiver in self._members
        ]

    def transmit(self, version: int, base: int | None = None, first: int = 0) -> None:
        sends, receives = self.send(version, base, first), self.receive(version, base, first)
        total = len(plan_buckets(self.layout, make_transfer(self.layout, version, base)))
        assert [receive.result(CALL_S) for receive in receives] == [total] * len(receives)
        assert [send.result(CALL_S) for send in sends] == [None] * len(sends)

    def finish(self, version: int, receiver: Receiver) -> None:
        """Then the file is the version, byte by byte."""
        receiver.verify(make_manifest(self.layout, version))
        receiver.store.release(version)
        self.check(version, receiver)

    def check(self, version: int, receiver: Receiver) -> None:
        staged = receiver.newest()
        assert staged is not None and staged.version == version
        file = Path(staged.path) / "model.safetensors"
        expected = self.layout.file_header + file_data(self.layout, version).numpy().tobytes()
        assert file.read_bytes() == expected
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
        assert shapes == {spec.name: spec.shape for spec in self.layout.tensors}

    def tamper(self, sender: int = -1, **at: int) -> TamperedStaging:
        """Tamper with the buckets of the last sender, unless the test names another."""
        staging = self.senders[sender].group_thread.staging = TamperedStaging(**at)
        return staging

    def close(self) -> None:
        for sender in self.senders:
            sender.group_thread.leave()
        for receiver in (self.east, self.west):
            receiver.close(should_remove=True)


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Two senders in one chain, unless the test asks for other numbers."""
    with ThreadPoolExecutor(8) as pool:
        num_senders, num_chains = getattr(request, "param", (2, 1))
        fleet = Fleet(tmp_path, pool, num_senders, num_chains)
        yield fleet
        fleet.close()


def test_chains_take_turns_with_the_gpus_that_a_receiver_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    first = torch.device("cuda:1")
    assert [device_of(chain, first).index for chain in range(4)] == [1, 2, 0, 1]
    assert device_of(3, CPU) == CPU


@pytest.mark.parametrize("victim", ["east", "west"])
def test_next_epoch_goes_on_from_the_first_bucket_that_did_not_arrive(
    fleet: Fleet, victim: str
) -> None:
    fleet.join(fleet.east, fleet.west)
    lost, survivor = fleet.east, fleet.west
    if victim == "west":
        lost, survivor = survivor, lost
    staging = fleet.tamper(halt_at=20)
    sends, receives = fleet.send(1), fleet.receive(1)
    assert staging.is_there.wait(CALL_S)
    lost._leave()
    staging.go_on.set()
    named = rf"receiver {survivor.spec.name} .*receiver {victim}"
    with pytest.raises(TransferFailed, match=named):
        receives[victim == "east"].result(CALL_S)
    for send in sends:
        with pytest.raises(WeightSyncError, match=r"bucket .* receiver east"):
            send.result(CALL_S)
    with pytest.raises(TransferFailed):
        receives[victim == "west"].result(CALL_S)
    with pytest.raises(ChecksumMismatch, match="ended after"):
        lost.verify(make_manifest(fleet.layout, 1))
    status = lost.status()
    assert (status.newest, status.complete, status.receiving) == (None, (), None)
    status = survivor.status()
    assert status.received > 10 and status.receiving == make_transfer(fleet.layout, 1)
    fleet.join(survivor)
    fleet.transmit(1, first=status.received)
    fleet.finish(1, survivor)


@pytest.mark.parametrize("fleet", [(1, 1)], indirect=True)
@pytest.mark.parametrize(
    ("base", "what"), [(None, "1 of 41 tensors differ"), (0, "tensors differ|damaged")]
)
def test_flipped_bit_is_refused_and_the_version_before_it_stays(
    fleet: Fleet, base: int | None, what: str
) -> None:
    fleet.join(fleet.east)
    fleet.transmit(0)
    fleet.finish(0, fleet.east)
    fleet.tamper(flip_at=0)
    fleet.transmit(1, base)
    with pytest.raises(ChecksumMismatch, match=what):
        fleet.finish(1, fleet.east)
    with pytest.raises(UnknownVersion):
        fleet.east.store.release(1)
    fleet.check(0, fleet.east)
    fleet.tamper()
    fleet.transmit(1, base)  # the same version again, as it should be
    fleet.finish(1, fleet.east)


@pytest.mark.parametrize("fleet", [(2, 1), (3, 2)], indirect=True)
def test_buckets_that_are_here_already_are_passed_on_and_ignored(fleet: Fleet) -> None:
    fleet.join(fleet.east)
    fleet.transmit(1)
    fleet.join(fleet.east, fleet.west)
    fleet.transmit(1)
    fleet.finish(1, fleet.east)
    fleet.finish(1, fleet.west)
    fleet.transmit(1)  # whole at both, which pass everything on


@pytest.mark.parametrize("fleet", [(1, 1)], indirect=True)
def test_receiver_without_a_place_for_a_version_leaves_and_the_others_notice(fleet: Fleet) -> None:
    east, west = fleet.east, fleet.west
    fleet.join(east, west)
    for version in (0, 1):
        fleet.transmit(version)
        fleet.finish(version, east)
        fleet.finish(version, west)
    west.store.hold(0, "a-reader", 60.0)
    full = make_transfer(fleet.layout, 2)
    refusals: list[tuple[type[WeightSyncError], Any, int]] = [
        (UnknownVersion, replace(full, base_version=7), 0),
        (StoreBusyError, full, 0),
        (TransferFailed, full, 5),
    ]
    for refusal, transfer, first in refusals:
        if refusal is TransferFailed:
            west.store.let_go(0, "a-reader")
        (send,) = fleet.send(2)
        receiving = fleet._pool.submit(east.receive, full, fleet.epoch, 0)
        with pytest.raises(refusal):
            west.receive(transfer, fleet.epoch, first)
        with pytest.raises(TransferFailed):
            receiving.result(CALL_S)
        with pytest.raises(WeightSyncError, match="receiver east"):
            send.result(CALL_S)
        assert west.status().epoch is None
        fleet.join(east, west)


@pytest.mark.parametrize("fleet", [(1, 1)], indirect=True)
def test_receiver_that_fails_in_an_epoch_stays_in_the_next(fleet: Fleet) -> None:
    fleet.join(fleet.east)
    fleet.join(fleet.east)
    with pytest.raises(TransferFailed, match="not a member of epoch 1"):
        fleet.east.receive(make_transfer(fleet.layout, 1), 1, 0)  # it was late
    fleet.transmit(1)
    fleet.finish(1, fleet.east)


@pytest.mark.parametrize("fleet", [(3, 2)], indirect=True)
def test_version_waits_for_its_slowest_chain_alone(fleet: Fleet) -> None:
    fleet.join(fleet.east, fleet.west)
    slow = fleet.tamper(halt_at=5)
    sends, receives = fleet.send(1), fleet.receive(1)
    assert slow.is_there.wait(CALL_S)
    assert sends[1].result(CALL_S) is None  # it has chain 1 for itself
    assert not any(future.done() for future in (sends[2], *receives))
    assert fleet.east.status().complete == fleet.west.status().complete == ()
    slow.go_on.set()
    for future in (*sends, *receives):
        future.result(CALL_S)
    for receiver in (fleet.east, fleet.west):
        fleet.finish(1, receiver)


@pytest.mark.parametrize("fleet", [(3, 2)], indirect=True)
def test_chain_that_fails_ends_the_others_and_all_go_on_in_the_next_epoch(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers, have_left = (fleet.east, fleet.west), [threading.Event(), threading.Event()]
    fleet.join(*receivers)
    fleet.transmit(0)
    for receiver, left in zip(receivers, have_left, strict=True):
        fleet.finish(0, receiver)
        leave = receiver._chains[1].leave
        monkeypatch.setattr(
            receiver._chains[1],
            "leave",
            lambda epoch=None, leave=leave, left=left: (leave(epoch), left.set()),
        )
    halted = fleet.tamper(1, halt_at=0)
    failing = fleet.tamper(2, halt_at=3, fail_at=3)
    sends, receives = fleet.send(1), fleet.receive(1)
    assert halted.is_there.wait(CALL_S) and failing.is_there.wait(CALL_S)
    failing.go_on.set()
    assert all(left.wait(CALL_S) for left in have_left)
    monkeypatch.undo()
    halted.go_on.set()
    for receive in receives:
        with pytest.raises(TransferFailed, match="chain 0 of epoch 1"):
            receive.result(CALL_S)
    for number, error in {1: "bucket .* chain 1 of epoch 1", 2: "the GPU is gone"}.items():
        with pytest.raises(WeightSyncError, match=error):
            sends[number].result(CALL_S)
    sends[0].exception(CALL_S)
    status = [receiver.status() for receiver in receivers]
    assert [each.complete for each in status] == [(0,), (0,)]
    for sender in (1, 2):
        fleet.tamper(sender)
    fleet.join(*receivers)
    fleet.transmit(1, first=min(each.received for each in status))
    for receiver in receivers:
        fleet.finish(1, receiver)


def test_sender_that_fails_leaves_no_version_and_no_wait(fleet: Fleet) -> None:
    fleet.join(fleet.east, fleet.west)
    fleet.tamper(fail_at=20)
    sends, receives = fleet.send(1), fleet.receive(1)
    for receive in receives:
        with pytest.raises(TransferFailed):
            receive.result(CALL_S)
    for send, error in zip(sends, ("bucket", "the GPU is gone"), strict=True):
        with pytest.raises(WeightSyncError, match=error):
            send.result(CALL_S)
    for receiver in (fleet.east, fleet.west):
        assert receiver.status().complete == () and receiver.newest() is None
