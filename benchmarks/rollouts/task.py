"""The benchmark's prompts as a task of `task.kind=custom`; a score may take a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion
from rollout_pool.episodes.environment import Env, Observation, Step
from rollout_pool.tasks.task import Prompt, SingleTurnTask


def text_of(index: int) -> str:
    return f"job number {index:05d}"


class Pauses(NamedTuple):
    """When an answer is not at an engine."""

    turns: int = 1
    """Equal parts of its tokens."""
    turn_s: float = 0.0
    """The environment's, between two of them."""
    reward_s: float = 0.0

    def ends(self, length: int) -> list[int]:
        """The number of its tokens at the end of each turn, of at least one token."""
        return [max(turn, length * turn // self.turns) for turn in range(1, self.turns + 1)]


class JobTask(SingleTurnTask):
    """Prompt `index` is job `index`. Its parameters: `score_s`, the seconds that a score takes, and
    those of Pauses."""

    name = "jobs"

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        pauses = dict(config.params)
        self._score_s = float(pauses.pop("score_s"))
        self._pauses = Pauses(**pauses)

    def example(self, index: int) -> Prompt:
        return Prompt(index=index, is_held_out=False, text=text_of(index))

    def eval_prompts(self) -> Sequence[Prompt]:
        return [Prompt(index=0, is_held_out=True, text="held out")]

    def is_held_out(self, prompt: Prompt) -> bool:
        return False

    def solution(self, prompt: Prompt) -> str:
        return ""

    def environment(self, prompt: Prompt) -> Env:
        # Without pauses it is that of all questions, whose cost is measured.
        has_any = self._pauses != Pauses()
        return JobEnv(prompt.text, self._pauses) if has_any else super().environment(prompt)

    def score(self, prompt: Prompt, completion: str) -> float:
        time.sleep(self._score_s)  # as a verifier that computes elsewhere: it takes time, no core
        return float(len(completion) % 2)


class JobEnv(Env):
    """An environment that takes its time after each turn, and after the last one for the reward."""

    def __init__(self, text: str, pauses: Pauses) -> None:
        self._text, self._pauses, self._left = text, pauses, pauses.turns

    async def reset(self) -> Observation:
        return Observation.user(self._text)

    async def step(self, completion: Completion) -> Step:
        self._left -= 1
        await asyncio.sleep(self._pauses.turn_s if self._left else self._pauses.reward_s)
        return Step(observation=Observation.user("+") if self._left else None)
