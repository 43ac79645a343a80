"""How many samples an engine is given at once; pure, one step for each look at the engine's load.

Too few leave the engine idle, too many fill its KV cache: then it takes running samples out again
and computes them anew later. The best number depends on lengths that are unknown beforehand, so it
is sought as TCP seeks its window:

    until it first falls   doubles while twice the tokens would still fit
    room again             half the way back to where it fell last; close to that, and somewhat
                           above, + 1 at each look; beyond, + a little more
    preemption, KV full    x 0.8
    a queue that stays     x 0.9

It grows only while all slots are taken, and falls once for one cause: not again before so many
samples have ended that it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

START = 16
"""Samples in flight when the first load is seen, unless more are."""
KV_FULL = 0.95
KV_ROOM = 0.85
"""Below it there is room for more: samples that are there still grow."""
FACTOR_FULL = 0.8
FACTOR_QUEUE = 0.9
QUEUE_SHARE = 0.05
"""Share of the running requests: a shorter queue only bridges the time until the next one comes."""
QUEUE_PATIENCE = 3
"""Looks that a longer queue must last: a commit puts all requests back for a moment."""
GROWTH_STEPS = 32
"""From nothing to the most in so many steps."""
CAREFUL_FROM = 0.9
CAREFUL_TO = 1.25
"""Shares of the limit from which it fell last: between them the next fall is near, if the lengths
are still what they were."""
IN_USE = 0.9


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadSample:
    """One look at an engine."""

    num_in_flight: int
    """Samples of the process whose limit it is."""
    num_running: int
    num_queued: int
    kv_usage: float
    expected_usage: float
    """Share of the KV cache that the samples in flight will hold if they become as long as others
    were."""
    num_preempted: int = 0
    """Since the last look."""


class AdaptiveLimit:
    """Between 1 and `most`; it is `most` until a load is seen."""

    def __init__(self, most: int) -> None:
        assert most >= 1
        self._most = most
        self._value = most
        self._has_begun = False
        self._fell_from: int | None = None
        self._is_settling = False
        """It has fallen, and more samples than it allows are still in flight."""
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
        """The engine is a new one."""
        self._has_begun = self._is_settling = False
        self._fell_from = None
        self._queue_age = 0

    def _fall(self, seen: LoadSample, factor: float) -> None:
        if self._is_settling:
            return
        base = min(self._value, max(1, seen.num_in_flight))
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
