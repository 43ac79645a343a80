"""Which snapshot buffer a publish may overwrite, state by state."""

from __future__ import annotations

import threading

import pytest

from weight_sync.sender.snapshot_buffers import Captured, Slots
from weight_sync.types import WeightSyncError


def capture(slots: Slots, version: int) -> Captured:
    captured = Captured(
        slot=slots.take(1.0), version=version, wait_s=0.0, snapshot_s=0.0, snapshot_at=0.0
    )
    slots.captured(captured)
    return captured


def begin(slots: Slots) -> Captured:
    captured = slots.begin()
    assert captured is not None
    return captured


def make_slots() -> Slots:
    return Slots(2, lambda: None)


def publish(slots: Slots, version: int) -> Captured:
    capture(slots, version)
    captured = begin(slots)
    slots.keep(captured)
    return captured


def test_a_pending_version_is_given_up_for_a_newer_one() -> None:
    slots = make_slots()
    first = capture(slots, 0)
    second = capture(slots, 1)
    assert second.slot == first.slot
    assert slots.begin() is second and slots.begin() is None
    assert slots.drain_skipped() == [first] and slots.drain_skipped() == []


def test_what_is_in_flight_is_not_overwritten_and_the_next_one_waits_its_turn() -> None:
    slots = make_slots()
    capture(slots, 0)
    flying = begin(slots)
    pending = [capture(slots, version) for version in (1, 2, 3)]
    assert {p.slot for p in pending} == {1 - flying.slot}
    slots.keep(flying)
    assert slots.begin() is pending[-1]


def test_the_older_of_two_published_versions_is_overwritten_first() -> None:
    slots = make_slots()
    publish(slots, 0)
    newer = publish(slots, 1)
    assert slots.take(1.0) != newer.slot


def test_a_base_that_is_being_read_is_safe_until_the_reader_is_done() -> None:
    slots = make_slots()
    publish(slots, 0)
    capture(slots, 1)
    begin(slots)
    done = threading.Event()
    with slots.reading(0) as base:
        assert base is not None and base.version == 0
        with pytest.raises(WeightSyncError, match=r"no snapshot buffer became free within 0\.05 s"):
            slots.take(0.05)
        taken: list[int] = []

        def take() -> None:
            taken.append(slots.take(10.0))
            done.set()

        waiter = threading.Thread(target=take)
        waiter.start()
        assert not done.is_set()
    assert done.wait(10.0)
    waiter.join()
    assert taken == [base.slot]


def test_only_a_published_version_can_be_read() -> None:
    slots = make_slots()
    capture(slots, 0)
    with slots.reading(0) as pending:
        assert pending is None
    begin(slots)
    with slots.reading(0) as flying, slots.reading(None) as nothing:
        assert flying is None and nothing is None


def test_a_version_that_nobody_got_is_tried_again() -> None:
    slots = make_slots()
    captured = capture(slots, 0)
    slots.give_back(begin(slots))
    assert slots.begin() is captured
    assert slots.drain_skipped() == []


def test_a_version_that_nobody_got_makes_room_for_a_newer_one() -> None:
    slots = make_slots()
    captured = capture(slots, 0)
    begin(slots)
    newer = capture(slots, 1)
    slots.give_back(captured)
    assert slots.begin() is newer and slots.begin() is None
    assert slots.drain_skipped() == [captured]


def test_whoever_waits_for_a_buffer_is_told_that_sending_has_ended() -> None:
    slots = make_slots()
    publish(slots, 0)
    capture(slots, 1)
    begin(slots)
    errors: list[WeightSyncError] = []

    def take() -> None:
        try:
            slots.take(10.0)
        except WeightSyncError as error:
            errors.append(error)

    with slots.reading(0):
        waiter = threading.Thread(target=take)
        waiter.start()
        slots.fail(ConnectionError("the board is gone"))
        waiter.join(10.0)
    assert [str(error) for error in errors] == ["weights cannot be sent: the board is gone"]
    with pytest.raises(WeightSyncError, match="the board is gone"):
        slots.take(0.0)


def test_the_reader_is_woken_for_each_capture() -> None:
    woken: list[None] = []
    slots = Slots(2, lambda: woken.append(None))
    capture(slots, 0)
    capture(slots, 1)
    assert len(woken) == 2
