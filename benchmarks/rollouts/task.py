"""The benchmark's prompts as a task of `task.kind=custom`; a score may take a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion
from rollout_pool.episodes.environment import Env, Observation, Step
from rollout_pool.tasks.task import Prompt, SingleTurnTask


def text_of(index: int) -> str:
    return f"job number {index:05d}"


class JobTask(SingleTurnTask):
    """Prompt `index` is job `index`. `task.params.score_s`: seconds that a score takes; `turns`,
    `turn_s`, `reward_s`: see Pauses."""

    name = "jobs"

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self._score_s = float(config.params.get("score_s", 0.0))
        self._turns = int(config.params.get("turns", 1))
        self._turn_s, self._reward_s = (
            float(config.params.get(name, 0.0)) for name in ("turn_s", "reward_s")
        )

    def example(self, index: int) -> Prompt:
        return Prompt(index=index, is_held_out=False, text=text_of(index))

    def eval_prompts(self) -> Sequence[Prompt]:
        return [Prompt(index=0, is_held_out=True, text="held out")]

    def is_held_out(self, prompt: Prompt) -> bool:
        return False

    def solution(self, prompt: Prompt) -> str:
        return ""

    def environment(self, prompt: Prompt) -> Env:
        return JobEnv(prompt.text, self._turns, self._turn_s, self._reward_s)

    def score(self, prompt: Prompt, completion: str) -> float:
        time.sleep(self._score_s)  # as a verifier that computes elsewhere: it takes time, no core
        return float(len(completion) % 2)


class JobEnv(Env):
    """An environment that takes its time after each turn, and after the last one for the reward."""

    def __init__(self, text: str, turns: int, turn_s: float, reward_s: float) -> None:
        self._text, self._left, self._turn_s, self._reward_s = text, turns, turn_s, reward_s

    async def reset(self) -> Observation:
        return Observation.user(self._text)

    async def step(self, completion: Completion) -> Step:
        self._left -= 1
        await asyncio.sleep(self._turn_s if self._left else self._reward_s)
        return Step(observation=Observation.user("+") if self._left else None)
