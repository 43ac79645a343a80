"""Prompts of which short answers are right, as a task of `task.kind=custom`."""

from __future__ import annotations

from collections.abc import Sequence

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import Prompt, SingleTurnTask

_FORMAT = "prompt {:06d}"


class LengthTask(SingleTurnTask):
    """`task.params.right_below`: the length in tokens from which on an answer is wrong."""

    name = "lengths"

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self._right_below = int(config.params["right_below"])

    def example(self, index: int) -> Prompt:
        return Prompt(index=index, is_held_out=False, text=_FORMAT.format(index))

    def eval_prompts(self) -> Sequence[Prompt]:
        return [Prompt(index=0, is_held_out=True, text="held out")]

    def is_held_out(self, prompt: Prompt) -> bool:
        return False

    def solution(self, prompt: Prompt) -> str:
        return ""

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion) < self._right_below)


def index_of(tokens: Sequence[int]) -> int:
    """Returns the index of the prompt with these tokens, one a byte."""
    return int(bytes(tokens).split()[-1])
