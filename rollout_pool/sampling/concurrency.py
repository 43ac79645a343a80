"""Adaptive limit on the samples in flight at an engine. Pure; one step per load report.

Too few leave the engine idle; too many fill its KV cache, and then it preempts running samples and
recomputes them later. The best number depends on lengths that are unknown beforehand, so the limit
adapts like TCP's window:

    until it first falls   doubles while twice the tokens would still fit
    room again             half the way back to where it last fell; near that, and slightly
                           above, + 1 per step; beyond, a little more
    preemption, KV full    x 0.8
    a queue that stays     x 0.9

It grows only while all slots are taken. After a fall it does not fall again before enough samples
have ended to meet it.
"""

from __future__ import annotations

from dataclasses import dataclass

START = 16
"""The limit at the first load report, unless more samples are in flight."""
KV_FULL = 0.95
KV_ROOM = 0.85
"""KV usage below which there is room for more; running samples still grow."""
FACTOR_FULL = 0.8
FACTOR_QUEUE = 0.9
QUEUE_SHARE = 0.05
"""As a share of the running requests; a shorter queue is normal."""
QUEUE_PATIENCE = 3
"""Reports that a longer queue must last: a commit briefly requeues all requests."""
GROWTH_STEPS = 32
"""Number of steps from 0 to the maximum."""
CAREFUL_FROM = 0.9
CAREFUL_TO = 1.25
"""As shares of the limit from which it last fell: between them the next fall is near, unless the
lengths have changed."""
IN_USE = 0.9


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadSample:
    num_in_flight: int
    """Samples of this process."""
    peak_in_flight: int
    """The most in the time of the last two reports. Samples that are interrupted are not in flight
    any more when their preemptions are heard of."""
    num_running: int
    num_queued: int
    kv_usage: float
    expected_usage: float
    """Share of the KV cache that the samples in flight will hold at their expected lengths."""
    num_preempted: int = 0
    """Since the last report."""


class AdaptiveLimit:
    """A limit between 1 and `most`; `most` until the first load report."""

    def __init__(self, most: int) -> None:
        assert most >= 1
        self._most = most
        self._value = most
        self._has_begun = False
        self._fell_from: int | None = None
        self._is_settling = False
        """It has fallen, and more samples than allowed are still in flight."""
        self._queue_age = 0

    @property
    def value(self) -> int:
        return self._value

    def update(self, seen: LoadSample) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._value = min(self._most, max(START, seen.num_in_flight))
        has_queue = seen.num_queued > max(1, QUEUE_SHARE * seen.num_running)
        self._queue_age = self._queue_age + 1 if has_queue else 0
        if seen.num_in_flight <= self._value:
            self._is_settling = False
        if seen.num_preempted or seen.kv_usage >= KV_FULL:
            self._fall(seen, FACTOR_FULL)
        elif self._queue_age >= QUEUE_PATIENCE:
            self._fall(seen, FACTOR_QUEUE)
        elif not has_queue and seen.num_in_flight >= IN_USE * self._value:
            self._grow(max(seen.kv_usage, seen.expected_usage))

    def restart(self) -> None:
        """Call when the engine was restarted."""
        self._has_begun = self._is_settling = False
        self._fell_from = None
        self._queue_age = 0

    def _fall(self, seen: LoadSample, factor: float) -> None:
        if self._is_settling:
            return
        base = min(self._value, max(1, seen.peak_in_flight))
        self._value = max(1, int(base * factor))
        self._fell_from = base
        self._is_settling = seen.num_in_flight > self._value
        self._queue_age = 0

    def _grow(self, usage: float) -> None:
        if usage >= KV_ROOM:
            return
        self._value = min(self._most, self._value + self._step(usage))

    def _step(self, usage: float) -> int:
        value, mark = self._value, self._fell_from
        if mark is None:
            return value if 2 * usage < KV_ROOM else max(1, self._most // GROWTH_STEPS)
        if value < CAREFUL_FROM * mark:
            return max(1, (mark - value) // 2)
        return 1 if value <= CAREFUL_TO * mark else max(1, self._most // GROWTH_STEPS)
