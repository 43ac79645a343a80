"""The time that an episode has: it runs while a sample is at an engine or the environment acts.

    launch      waits for a place     at an engine      must not go on      at an engine   step
    ──►         ░░░░░░░░░░░░░░░░░░    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓    ░░░░░░░░░░░░░░░     ▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓

Waiting is no fault of the prompt: many episodes that wait for few engines must not look slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EpisodeClock:
    """Runs from the start, except while anything holds it. Used in one event loop."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        """When it was last let go."""
        self._since = time.monotonic()
        self._num_holds = 0
        self._ring: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float:
        gone_s = 0.0 if self._num_holds else time.monotonic() - self._since
        return max(0.0, self._left_s - gone_s)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        self.note_wait(True)
        try:
            yield
        finally:
            self.note_wait(False)

    def note_wait(self, is_waiting: bool) -> None:
        """Something began or ended to wait; of several that wait at once, until the last ends."""
        if is_waiting:
            self._left_s = self.left_s
            self._num_holds += 1
        else:
            self._num_holds -= 1
            assert self._num_holds >= 0
            if not self._num_holds:
                self._since = time.monotonic()
        self._set_timer()

    @contextmanager
    def alarm(self, ring: Callable[[], None]) -> Iterator[None]:
        """`ring` is called once if the time is over in here. One alarm at a time."""
        assert self._ring is None
        self._ring = ring
        self._set_timer()
        try:
            yield
        finally:
            self._ring = None
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ring is not None and not self._num_holds:
            self._timer = asyncio.get_running_loop().call_later(self.left_s, self._over)

    def _over(self) -> None:
        ring, self._ring, self._timer = self._ring, None, None
        if ring is not None:
            ring()
