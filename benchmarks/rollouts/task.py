"""The benchmark's prompts as a task of `task.kind=custom`; a score may take a while."""

from __future__ import annotations

import time
from collections.abc import Sequence

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import Prompt, SingleTurnTask


def text_of(index: int) -> str:
    return f"job number {index:05d}"


class JobTask(SingleTurnTask):
    """Prompt `index` is job `index`. `task.params.score_s`: seconds that a score takes."""

    name = "jobs"

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self._score_s = float(config.params.get("score_s", 0.0))

    def example(self, index: int) -> Prompt:
        return Prompt(index=index, is_held_out=False, text=text_of(index))

    def eval_prompts(self) -> Sequence[Prompt]:
        return [Prompt(index=0, is_held_out=True, text="held out")]

    def is_held_out(self, prompt: Prompt) -> bool:
        return False

    def solution(self, prompt: Prompt) -> str:
        return ""

    def score(self, prompt: Prompt, completion: str) -> float:
        time.sleep(self._score_s)  # as a verifier that computes elsewhere: it takes time, no core
        return float(len(completion) % 2)
