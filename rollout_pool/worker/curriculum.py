"""Passes over prompts of tasks that teach little now (task.curriculum)."""

from __future__ import annotations

import random
from collections import deque

WINDOW = 64
"""Last groups of a task that are counted."""
FEWEST = 8
"""Before so many groups have ended, a task passes for one that teaches most."""


class Curriculum:
    """Chooses between the prompts of a mixture by what the last groups of their tasks taught.

    A group teaches if its rewards differ: if the policy solves all of it or nothing of it, every
    advantage is 0. A prompt is taken with the probability that its task's share of such groups has
    of the best task's, but at least `floor`, so that a task is noticed when the policy has become
    ready for it. Each worker decides by its own groups.

    Example, with floor 0.1: of the last groups of sums 40 in 64 taught something, of spell 4. All
    prompts of sums are taken, and of those of spell a tenth (4 in 40).
    """

    def __init__(self, floor: float, seed: int) -> None:
        self._floor = floor
        self._draw = random.Random(seed)
        self._taught: dict[str, deque[bool]] = {}

    def takes(self, task: str) -> bool:
        """Whether a prompt of the task is taken."""
        return self._draw.random() < self.share(task)

    def share(self, task: str) -> float:
        """Share of the task's prompts that are taken."""
        best = max((self._teaching(name) for name in self._taught), default=1.0)
        return max(self._floor, self._teaching(task) / best) if best else 1.0

    def note(self, task: str, *, teaches: bool) -> None:
        """A group of the task has ended; `teaches`: whether its rewards differ."""
        self._taught.setdefault(task, deque(maxlen=WINDOW)).append(teaches)

    def _teaching(self, task: str) -> float:
        taught = self._taught.get(task, ())
        return sum(taught) / len(taught) if len(taught) >= FEWEST else 1.0
