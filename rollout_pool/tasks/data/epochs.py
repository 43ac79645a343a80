"""The order of a task's problems, epoch by epoch."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

UNIT = 100
"""Weights count in hundredths."""


class Epochs:
    """Which problem comes at an index: a pure function of the weights, the seed and the index.

    A problem comes as often in an epoch as its weight says; one of 2.5 twice and thrice in turn.

    Example, not shuffled, of problems 0, 1 and 2 with weights 1, 2 and 0.5:

        index     0  1  2  |  3  4  5  6  |  7  8  9  | ...
        problem   0  1  1  |  0  1  1  2  |  0  1  1  | ...
    """

    def __init__(self, weights: Sequence[float], seed: int, *, shuffles: bool) -> None:
        self._seed, self._shuffles = seed, shuffles
        self._units = np.rint(np.asarray(weights) * UNIT).astype(np.int64)
        # Else all problems of weight 0.5 would come in the same epochs.
        self._phases = (np.cumsum(self._units) - self._units) % UNIT
        # So many epochs repeat, but for their order.
        self._period = UNIT // math.gcd(UNIT, *map(int, np.unique(self._units)))
        self._starts = [int(self._num_before(epoch).sum()) for epoch in range(self._period + 1)]
        # Two, as prompts of the last epoch run again and are scored while the next one begins.
        self._order = lru_cache(maxsize=2)(self._order_anew)

    def find(self, index: int) -> tuple[int, int]:
        """The epoch of a prompt, from 0, and its problem."""
        num_periods, place = divmod(index, self._starts[-1])
        within = bisect_right(self._starts, place) - 1
        epoch = num_periods * self._period + within
        return epoch, self._order(epoch)[place - self._starts[within]]

    def _num_before(self, epoch: int) -> NDArray[np.int64]:
        """How often each problem comes before an epoch of the first period."""
        number: NDArray[np.int64] = (epoch * self._units + self._phases) // UNIT
        return number

    def _order_anew(self, epoch: int) -> list[int]:
        within = epoch % self._period
        times = self._num_before(within + 1) - self._num_before(within)
        order: list[int] = np.repeat(np.arange(len(times)), times).tolist()
        if self._shuffles:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
