"""Which snapshot buffer the next publish may overwrite; rank 0 decides for all ranks.

                 take                captured              begin                   keep
    free, kept ────────► capturing ────────────► pending ────────► in flight ────────────► kept
                              ▲                  │    ▲                │
                              └── take: the newest    └─ give_back: ◄──┘
                                  version wins           nobody got it

What is kept is the base of the next delta and the source for receivers that join late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from weight_sync.types import WeightSyncError


class Phase(Enum):
    free = "free"
    capturing = "capturing"
    pending = "pending"
    in_flight = "in flight"
    kept = "kept"


@dataclass(kw_only=True, slots=True, frozen=True)
class Captured:
    """A version in a snapshot buffer, as rank 0 saw it come there."""

    slot: int
    version: int
    wait_s: float
    snapshot_s: float
    """Seconds that the training thread waited for the buffer, and then for the copy."""
    snapshot_at: float
    """Unix time at which the copy began."""


@dataclass(slots=True)
class _Slot:
    phase: Phase = Phase.free
    holds: Captured | None = None
    num_readers: int = 0
    """Uses of the bytes besides being in flight: a base of an encoding, a transfer to a joiner."""


class Slots:
    """The states of the snapshot buffers. Thread-safe; the trainer takes, the coordinator reads."""

    def __init__(self, num_slots: int, on_pending: Callable[[], None]) -> None:
        """`on_pending` is called, in the capturing thread, whenever a version waits to be sent."""
        self._slots = [_Slot() for _ in range(num_slots)]
        self._on_pending = on_pending
        self._skipped: list[Captured] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # guards all of the above

    def take(self, timeout_s: float) -> int:
        """The buffer to capture into; waits for one.

        A version that is still pending is given up for the newer one. Raises WeightSyncError at
        `timeout_s`, and at once after `fail`.
        """
        slots = self._slots
        with self._changed:
            if not self._changed.wait_for(self._can_take, timeout_s):
                raise WeightSyncError(
                    f"no snapshot buffer became free within {timeout_s:g} s: they hold "
                    + ", ".join(f"{s.holds and s.holds.version} ({s.phase.value})" for s in slots)
                )
            if self._error is not None:
                raise WeightSyncError(f"weights cannot be sent: {self._error}") from self._error
            slot = self._best()
            assert slot is not None
            self._skip_if_pending(slots[slot])
            slots[slot].phase, slots[slot].holds = Phase.capturing, None
            return slot

    def _skip_if_pending(self, slot: _Slot) -> None:
        if slot.phase is Phase.pending and slot.holds is not None:
            self._skipped.append(slot.holds)

    def drain_skipped(self) -> list[Captured]:
        """Versions that were given up for newer ones since the last call."""
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def _can_take(self) -> bool:
        return self._error is not None or self._best() is not None

    def _best(self) -> int | None:
        for index, slot in enumerate(self._slots):
            if slot.phase is Phase.pending:
                return index
        usable = [
            (-1 if slot.holds is None else slot.holds.version, index)
            for index, slot in enumerate(self._slots)
            if slot.phase in (Phase.free, Phase.kept) and not slot.num_readers
        ]
        return min(usable)[1] if usable else None

    def captured(self, captured: Captured) -> None:
        with self._changed:
            slot = self._slots[captured.slot]
            assert slot.phase is Phase.capturing
            slot.phase, slot.holds = Phase.pending, captured
        self._on_pending()

    def begin(self) -> Captured | None:
        """The pending version, from here on in flight: nothing overwrites it."""
        with self._changed:
            for slot in self._slots:
                if slot.phase is Phase.pending:
                    slot.phase = Phase.in_flight
                    return slot.holds
            return None

    def keep(self, captured: Captured) -> None:
        """It is published: the older one need not be kept any longer."""
        with self._changed:
            self._leave_flight(captured, Phase.kept)

    def give_back(self, captured: Captured) -> None:
        """Nobody got it: it is tried again, unless a newer one has come meanwhile."""
        with self._changed:
            is_outdated = any(s.phase in (Phase.capturing, Phase.pending) for s in self._slots)
            if is_outdated:
                self._skipped.append(captured)
            self._leave_flight(captured, Phase.free if is_outdated else Phase.pending)

    def _leave_flight(self, captured: Captured, phase: Phase) -> None:
        slot = self._slots[captured.slot]
        assert slot.phase is Phase.in_flight and slot.holds is captured
        slot.phase = phase
        self._changed.notify_all()

    @contextmanager
    def reading(self, version: int | None) -> Iterator[Captured | None]:
        """The kept `version`, safe from being overwritten inside the block; None if it is gone."""
        with self._changed:
            slot = next((s for s in self._slots if _keeps(s, version)), None)
            if slot is not None:
                slot.num_readers += 1
        try:
            yield None if slot is None else slot.holds
        finally:
            if slot is not None:
                with self._changed:
                    slot.num_readers -= 1
                    self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Sending has ended for good: whoever waits in `take`, or comes to it, is told."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


def _keeps(slot: _Slot, version: int | None) -> bool:
    return slot.phase is Phase.kept and slot.holds is not None and slot.holds.version == version
