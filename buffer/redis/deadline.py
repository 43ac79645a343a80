"""The end of a call's patience."""

from __future__ import annotations

import time


class Deadline:
    """A point in time on this process's monotonic clock."""

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())
