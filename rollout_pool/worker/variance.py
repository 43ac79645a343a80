"""Groups whose rewards are all equal teach nothing: they are left out, and prompts of tasks that
give many of them are passed over."""

from __future__ import annotations

import random
from collections import deque
from enum import Enum

MAX_SAVED_GROUPS = 32
"""Limit of the filter's budget, in kept groups: a long run of useful groups must not let it starve
the trainer afterwards."""


class Verdict(Enum):
    """The decision of the variance filter."""

    keep = "keep"
    leave_out = "leave_out"
    keep_all_equal = "keep_all_equal"
    """The rewards are all equal, but the budget is used up."""


class VarianceFilter:
    """Dynamic sampling: groups whose rewards are all equal have no gradient and may be left out.

    Judges one worker's groups in order (pure). Each kept group adds `max_ratio`
    (rollout.max_filtered_ratio) to a budget; each one left out costs 1.
    """

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._budget = max_ratio

    def judge(self, *, teaches: bool) -> Verdict:
        """`teaches`: whether the next group's rewards differ."""
        if not teaches and self._budget >= 1:
            self._budget -= 1
            return Verdict.leave_out
        self._budget = min(self._budget + self._max_ratio, self._max_ratio * MAX_SAVED_GROUPS)
        return Verdict.keep if teaches else Verdict.keep_all_equal


WINDOW = 64
"""Last groups of a task that are counted."""
FEWEST = 8
"""Before so many groups have ended, a task passes for one that teaches most."""


class Curriculum:
    """Passes over prompts of a mixture whose tasks teach little.

    A group teaches if its rewards differ: if the policy solves all of it or nothing of it, every
    advantage is 0. A task's teaching fraction is that of its last groups that taught. Its prompts
    are taken with probability fraction / best task's fraction, but at least `floor`, so that a task
    is noticed when the policy has become ready for it. Each worker decides by its own groups.

    Example, with floor 0.08: 40 of the last 64 groups of sums taught something, and 4 of the last
    64 of spell. All prompts of sums are taken, and a tenth (4 / 40) of those of spell.
    """

    def __init__(self, floor: float, seed: int) -> None:
        self._floor = floor
        self._draw = random.Random(seed)
        self._taught: dict[str, deque[bool]] = {}

    def takes(self, task: str) -> bool:
        return self._draw.random() < self.probability(task)

    def probability(self, task: str) -> float:
        """Probability that a prompt of the task is taken."""
        best = max((self._teaching(name) for name in self._taught), default=1.0)
        return max(self._floor, self._teaching(task) / best) if best else 1.0

    def note(self, task: str, *, teaches: bool) -> None:
        """A group of the task has ended; `teaches`: whether its rewards differ."""
        self._taught.setdefault(task, deque(maxlen=WINDOW)).append(teaches)

    def _teaching(self, task: str) -> float:
        taught = self._taught.get(task, ())
        return sum(taught) / len(taught) if len(taught) >= FEWEST else 1.0
