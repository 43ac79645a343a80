"""Keeps requests away from an engine that fails; pure, its clock is handed in.

closed ──3 failures in a row──► open ──delay over──► half open ──first tokens──► closed
                                 ▲                     │ one request on trial
                                 └─────it fails────────┘ twice the delay, up to 30 s
"""

from __future__ import annotations

from enum import Enum

THRESHOLD = 3
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class BreakerState(Enum):
    closed = "closed"
    open = "open"
    half_open = "half_open"


class Breaker:
    """Of one engine. All times are of one monotonic clock."""

    def __init__(self) -> None:
        self._state = BreakerState.closed
        self._num_failures = 0
        self._num_delays = 0
        self._last_failure = self._last_success = float("-inf")
        self._is_on_trial = False
        self.retry_at = float("-inf")
        """When an engine that has failed is worth another try."""

    @property
    def state(self) -> BreakerState:
        return self._state

    def admits(self, now: float) -> bool:
        """Whether a request may go there now."""
        if self._state is BreakerState.closed:
            return True
        return now >= self.retry_at and not self._is_on_trial

    def is_mended(self, failed_at: float, now: float) -> bool:
        """Whether one that failed there at `failed_at` may hope that it is better now."""
        return self._last_success > failed_at or now >= self.retry_at

    def begin(self) -> bool:
        """A request goes there, as `admits` allowed. Returns whether it is on trial."""
        if self._state is BreakerState.closed:
            return False
        self._state = BreakerState.half_open
        self._is_on_trial = True
        return True

    def succeed(self, now: float) -> None:
        """A request got tokens."""
        self._state = BreakerState.closed
        self._num_failures = self._num_delays = 0
        self._last_success = now
        self._is_on_trial = False

    def fail(self, begun: float, now: float) -> None:
        """A request that began at `begun` failed.

        All that were under way when the engine fell fail together: that is one delay, not many.
        """
        is_new = begun >= self._last_failure
        self._last_failure = now
        if not is_new and self._state is not BreakerState.closed:
            return
        self._num_failures += 1
        if is_new:
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**self._num_delays)
            self._num_delays = min(self._num_delays + 1, 16)
            self.retry_at = now + delay
        if self._num_failures >= THRESHOLD or self._state is not BreakerState.closed:
            self._state = BreakerState.open
        self._is_on_trial = False

    def withdraw(self) -> None:
        """The request on trial ended; if it told nothing of the engine, another may try."""
        self._is_on_trial = False

    def expect(self, now: float) -> None:
        """The engine is said to be back: no delay any more, but one request on trial first."""
        self.retry_at = now
        self._num_delays = 0
