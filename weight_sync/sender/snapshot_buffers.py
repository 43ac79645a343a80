"""Phases of the snapshot buffers: rank 0 decides which one the next version overwrites.

                      choose             captured           begin              delivered
    free, delivered ────────► capturing ──────────► pending ───────► in flight ──────────► delivered
                                  ▲                 │    ▲               │
                                  └ choose: the newest   └─ give_back: ◄─┘
                                    version wins            no receiver got it

A delivered version is the base of the next delta, and the source for receivers that join late.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from weight_sync.types import Captured, WeightSyncError


class Phase(Enum):
    free = "free"
    capturing = "capturing"
    pending = "pending"
    in_flight = "in flight"
    delivered = "delivered"


@dataclass(slots=True)
class _Buffer:
    phase: Phase = Phase.free
    captured: Captured | None = None
    num_readers: int = 0
    """Uses of a delivered version: as the base of an encoding, or for a receiver that is late."""


class SnapshotBuffers:
    """The states of the snapshot buffers. Thread-safe: trainer and coordinator share it."""

    def __init__(self, num_buffers: int) -> None:
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._skipped: list[Captured] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # guards all of the above

    def choose(self, timeout_s: float) -> int:
        """Wait for a buffer to capture into, and return its index.

        A version that is still pending is given up for the newer one. Raises WeightSyncError at
        `timeout_s`, and at once after `fail`.
        """
        buffers = self._buffers
        with self._changed:
            if not self._changed.wait_for(self._can_choose, timeout_s):
                raise WeightSyncError(
                    f"no snapshot buffer became free within {timeout_s:g} s: "
                    + ", ".join(
                        f"{b.captured and b.captured.version} {b.phase.value}" for b in buffers
                    )
                )
            if self._error is not None:
                raise WeightSyncError(f"weights cannot be sent: {self._error}") from self._error
            index = self._best()
            assert index is not None
            buffer = buffers[index]
            if buffer.phase is Phase.pending and buffer.captured is not None:
                self._skipped.append(buffer.captured)
            buffer.phase, buffer.captured = Phase.capturing, None
            return index

    def drain_skipped(self) -> list[Captured]:
        """Versions that were given up for newer ones since the last call."""
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def _can_choose(self) -> bool:
        return self._error is not None or self._best() is not None

    def _best(self) -> int | None:
        for index, buffer in enumerate(self._buffers):
            if buffer.phase is Phase.pending:
                return index
        usable = [
            (-1 if buffer.captured is None else buffer.captured.version, index)
            for index, buffer in enumerate(self._buffers)
            if buffer.phase in (Phase.free, Phase.delivered) and not buffer.num_readers
        ]
        return min(usable)[1] if usable else None

    def captured(self, captured: Captured) -> None:
        with self._changed:
            buffer = self._buffers[captured.buffer]
            assert buffer.phase is Phase.capturing
            buffer.phase, buffer.captured = Phase.pending, captured

    def begin(self) -> Captured | None:
        """The pending version, from here on in flight: nothing overwrites it."""
        with self._changed:
            for buffer in self._buffers:
                if buffer.phase is Phase.pending:
                    buffer.phase = Phase.in_flight
                    return buffer.captured
            return None

    def delivered(self, captured: Captured) -> None:
        """A receiver has it: the older version is no longer needed."""
        with self._changed:
            self._leave_flight(captured, Phase.delivered)

    def give_back(self, captured: Captured) -> None:
        """No receiver got it: it becomes pending again, unless a newer version exists."""
        with self._changed:
            is_outdated = any(b.phase in (Phase.capturing, Phase.pending) for b in self._buffers)
            if is_outdated:
                self._skipped.append(captured)
            self._leave_flight(captured, Phase.free if is_outdated else Phase.pending)

    def _leave_flight(self, captured: Captured, phase: Phase) -> None:
        buffer = self._buffers[captured.buffer]
        assert buffer.phase is Phase.in_flight and buffer.captured is captured
        buffer.phase = phase
        self._changed.notify_all()

    @contextmanager
    def reading(self, version: int | None) -> Iterator[Captured | None]:
        """The delivered `version`, not overwritten inside the block; None if it is gone."""
        with self._changed:
            delivered = (b for b in self._buffers if b.phase is Phase.delivered)
            buffer = next(
                (b for b in delivered if b.captured and b.captured.version == version), None
            )
            if buffer is not None:
                buffer.num_readers += 1
        try:
            yield None if buffer is None else buffer.captured
        finally:
            if buffer is not None:
                with self._changed:
                    buffer.num_readers -= 1
                    self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Sending has ended for good: current and later calls of `choose` raise."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
