"""Phases of the snapshot buffers, one after the other."""

from __future__ import annotations

import threading

import pytest

from weight_sync.sender.snapshot_buffers import SnapshotBuffers
from weight_sync.types import Captured, WeightSyncError


def capture(buffers: SnapshotBuffers, version: int) -> Captured:
    captured = Captured(
        buffer=buffers.choose(1.0), version=version, wait_s=0.0, snapshot_s=0.0, snapshot_at=0.0
    )
    buffers.captured(captured)
    return captured


def begin(buffers: SnapshotBuffers) -> Captured:
    captured = buffers.begin()
    assert captured is not None
    return captured


def deliver(buffers: SnapshotBuffers, version: int) -> Captured:
    capture(buffers, version)
    captured = begin(buffers)
    buffers.delivered(captured)
    return captured


def test_pending_version_is_given_up_for_a_newer_one() -> None:
    buffers = SnapshotBuffers(2)
    first = capture(buffers, 0)
    second = capture(buffers, 1)
    assert second.buffer == first.buffer
    assert buffers.begin() is second and buffers.begin() is None
    assert buffers.drain_skipped() == [first] and buffers.drain_skipped() == []


def test_version_in_flight_is_not_overwritten_and_the_next_one_waits() -> None:
    buffers = SnapshotBuffers(2)
    capture(buffers, 0)
    flying = begin(buffers)
    pending = [capture(buffers, version) for version in (1, 2, 3)]
    assert {p.buffer for p in pending} == {1 - flying.buffer}
    buffers.delivered(flying)
    assert buffers.begin() is pending[-1]


def test_older_of_two_delivered_versions_is_overwritten_first() -> None:
    buffers = SnapshotBuffers(2)
    deliver(buffers, 0)
    newer = deliver(buffers, 1)
    assert buffers.choose(1.0) != newer.buffer


def test_base_that_is_being_read_is_safe_until_the_reader_is_done() -> None:
    buffers = SnapshotBuffers(2)
    deliver(buffers, 0)
    capture(buffers, 1)
    begin(buffers)
    done = threading.Event()
    with buffers.reading(0) as base:
        assert base is not None and base.version == 0
        with pytest.raises(WeightSyncError, match=r"no snapshot buffer became free within 0\.05 s"):
            buffers.choose(0.05)
        taken: list[int] = []

        def choose() -> None:
            taken.append(buffers.choose(10.0))
            done.set()

        waiter = threading.Thread(target=choose)
        waiter.start()
        assert not done.is_set()
    assert done.wait(60)
    waiter.join()
    assert taken == [base.buffer]


def test_reading_needs_a_delivered_version() -> None:
    buffers = SnapshotBuffers(2)
    capture(buffers, 0)
    with buffers.reading(0) as pending:
        assert pending is None
    begin(buffers)
    with buffers.reading(0) as flying, buffers.reading(None) as nothing:
        assert flying is None and nothing is None


def test_version_that_no_receiver_got_is_tried_again() -> None:
    buffers = SnapshotBuffers(2)
    captured = capture(buffers, 0)
    buffers.give_back(begin(buffers))
    assert buffers.begin() is captured
    assert buffers.drain_skipped() == []


def test_version_that_no_receiver_got_makes_room_for_a_newer_one() -> None:
    buffers = SnapshotBuffers(2)
    captured = capture(buffers, 0)
    begin(buffers)
    newer = capture(buffers, 1)
    buffers.give_back(captured)
    assert buffers.begin() is newer and buffers.begin() is None
    assert buffers.drain_skipped() == [captured]


def test_waits_for_a_buffer_end_when_sending_has_ended() -> None:
    buffers = SnapshotBuffers(2)
    deliver(buffers, 0)
    capture(buffers, 1)
    begin(buffers)
    errors: list[WeightSyncError] = []

    def choose() -> None:
        try:
            buffers.choose(10.0)
        except WeightSyncError as error:
            errors.append(error)

    with buffers.reading(0):
        waiter = threading.Thread(target=choose)
        waiter.start()
        buffers.fail(ConnectionError("the board is gone"))
        waiter.join(60.0)
    assert [str(error) for error in errors] == ["weights cannot be sent: the board is gone"]
    with pytest.raises(WeightSyncError, match="the board is gone"):
        buffers.choose(0.0)
