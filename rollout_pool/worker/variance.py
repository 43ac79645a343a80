"""Groups whose rewards are all equal teach nothing: they are left out, and prompts of tasks that
give many of them, or of pools that come too often, are passed over."""

from __future__ import annotations

import random
from collections import Counter, deque
from enum import Enum

from configs.rollout_schema import PoolsConfig, TaskConfig
from rollout_pool.tasks.task import Prompt

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
MET = 1024
"""Last prompts whose pools say what part of the stream each pool is."""


class Curriculum:
    """Passes over prompts of a mixture whose tasks teach little.

    A group teaches if its rewards differ: if the policy solves all of it or nothing of it, every
    advantage is 0. A task is worth the fraction of its last groups that taught. Its prompts are
    taken with probability worth / best task's worth, but at least `floor`, so that it is noticed
    when the policy has become ready for it. Each worker decides by its own groups.

    Example, with floor 0.08: 40 of the last 64 groups of sums taught something, and 4 of the last
    64 of spell. All prompts of sums are taken, and a tenth (4 / 40) of those of spell.
    """

    def __init__(self, floor: float, seed: int) -> None:
        self._floor = floor
        self._draw = random.Random(seed)
        self._taught: dict[str, deque[bool]] = {}

    def meet(self, prompt: Prompt) -> str:
        """The kind of the stream's next prompt."""
        return prompt.task

    def takes(self, kind: str) -> bool:
        return self._draw.random() < self.probability(kind)

    def probability(self, kind: str) -> float:
        """Probability that a prompt of the kind is taken."""
        worths = self._worths()
        best = max(worths.values(), default=0.0)
        return max(self._floor, worths[kind] / best) if best and kind in worths else 1.0

    def note(self, prompt: Prompt, reward: float, *, teaches: bool) -> None:
        """A group has ended with this mean reward; `teaches`: whether its rewards differ."""
        self._taught.setdefault(prompt.task, deque(maxlen=WINDOW)).append(teaches)

    def _worths(self) -> dict[str, float]:
        return {
            task: sum(taught) / len(taught) if len(taught) >= FEWEST else 1.0
            for task, taught in self._taught.items()
        }


class PoolCurriculum(Curriculum):
    """The same for pools, into which prompts fall by the mean reward of their last group.

    A pool is worth its weight / its part of the stream, so that the prompts taken of all pools are
    as the weights. A prompt without a group so far is in none, and always taken.

    Example, with weights of 1: of the last 100 prompts with a pool 80 were easy and 20 hard. All
    hard ones are taken, and a quarter of the easy ones.
    """

    def __init__(self, pools: PoolsConfig, seed: int) -> None:
        super().__init__(pools.floor, seed)
        self._pools = pools
        self._pool_of: dict[int, str] = {}
        self._met: deque[str] = deque(maxlen=MET)

    def meet(self, prompt: Prompt) -> str:
        if pool := self._pool_of.get(_key(prompt), ""):
            self._met.append(pool)
        return pool

    def note(self, prompt: Prompt, reward: float, *, teaches: bool) -> None:
        self._pool_of[_key(prompt)] = self._pools.pool_of(reward)

    def _worths(self) -> dict[str, float]:
        met = Counter(self._met)
        return {pool: getattr(self._pools, pool) / number for pool, number in met.items()}


def curriculum_of(task: TaskConfig, seed: int) -> Curriculum | None:
    if task.pools is not None:
        return PoolCurriculum(task.pools, seed)
    return None if task.curriculum is None else Curriculum(task.curriculum, seed)


def _key(prompt: Prompt) -> int:
    # As text: calls of tools have no hash.
    return hash((prompt.task, prompt.text, prompt.pictures, repr(prompt.conversation)))
