"""Whom to leave alone for a while, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")


class Backoff(Generic[K]):
    """The time to rest doubles with each failure in a row. Keeps nobody alive."""

    def __init__(
        self, first_s: float, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._failures: WeakKeyDictionary[K, tuple[int, float]] = WeakKeyDictionary()
        """How many in a row, and until when to rest."""

    def failed(self, who: K) -> float:
        """Returns the seconds of rest from now on."""
        number, _ = self._failures.get(who, (0, 0.0))
        rest_s = min(self._most_s, self._first_s * 2.0 ** min(number, 60))
        self._failures[who] = number + 1, self._clock() + rest_s
        return rest_s

    def worked(self, who: K) -> None:
        self._failures.pop(who, None)

    def has_failed(self, who: K) -> bool:
        """Since it last worked."""
        return who in self._failures

    def is_resting(self, who: K) -> bool:
        return who in self._failures and self._clock() < self._failures[who][1]
