"""Ends the wait of samples that no engine does anything for.

A sample may hope as long as an engine that may serve it does something for anyone. One timer
watches over all who wait, and those with the same needs hope together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_pool.waiting import Needs, Waiter


@dataclass(kw_only=True, slots=True)
class _Hopeful:
    """Who waits with the same needs, the first to come first."""

    progress_at: float = float("-inf")
    """When an engine that may serve them last did anything for anyone, as far as was looked."""
    waiters: dict[Waiter, None] = field(default_factory=dict)


class Hope:
    """Calls `give_up` with each waiter that has waited `timeout_s` in vain, which must leave."""

    def __init__(
        self,
        timeout_s: float,
        *,
        last_progress: Callable[[Needs], float],
        give_up: Callable[[Waiter], None],
    ) -> None:
        """`last_progress`: at the engines that may serve such needs now."""
        self._timeout_s = timeout_s
        self._last_progress = last_progress
        self._give_up = give_up
        self._hopeful: dict[Needs, _Hopeful] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def join(self, waiter: Waiter) -> None:
        """`waiter` must have come after all others that are here."""
        self._hopeful.setdefault(waiter.key.needs, _Hopeful()).waiters[waiter] = None
        if self._alarm is None:
            self._set_alarm(waiter.joined_at + self._timeout_s)

    def leave(self, waiter: Waiter) -> None:
        """Nothing happens if it has left before."""
        hopeful = self._hopeful.get(waiter.key.needs)
        if hopeful is None:
            return
        hopeful.waiters.pop(waiter, None)
        if not hopeful.waiters:
            del self._hopeful[waiter.key.needs]
        if not self._hopeful and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def look(self) -> None:
        """Takes note of progress; to be called before an engine changes in what it may serve."""
        for needs, hopeful in self._hopeful.items():
            hopeful.progress_at = max(hopeful.progress_at, self._last_progress(needs))

    def _ring(self) -> None:
        self._alarm = None
        self.look()
        now = time.monotonic()
        for hopeful in list(self._hopeful.values()):
            while (first := next(iter(hopeful.waiters), None)) is not None:
                if self._deadline(hopeful, first) > now:
                    break
                self.leave(first)
                self._give_up(first)
        deadlines = [
            self._deadline(hopeful, next(iter(hopeful.waiters)))
            for hopeful in self._hopeful.values()
        ]
        if deadlines:
            self._set_alarm(min(deadlines))

    def _deadline(self, hopeful: _Hopeful, first: Waiter) -> float:
        return max(first.joined_at, hopeful.progress_at) + self._timeout_s

    def _set_alarm(self, at: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(at, self._ring)
