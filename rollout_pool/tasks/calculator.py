"""Sums, and a tool that adds: the model has to learn that calling it pays.

    4+7+2+9+1    add(4+7+2+9+1)  ──►  23    23        right: 1
    4+7+2+9+1    ?                                    gives up: 0

The demonstrations of the warm start do the one or the other, so the policy begins with both habits.
"""

from __future__ import annotations

import builtins
import itertools
import random

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.tasks.datasets import ProblemTask, Question
from rollout_pool.tasks.task import Prompt, check_params

NUM_DIGITS = 5
LOWEST_SUM = 10
"""All questions have one length, and all results: a tiny model copies by position."""
GIVES_UP = "?"


def add(sum: str) -> int:
    """Adds numbers."""
    return builtins.sum(int(number) for number in sum.split("+"))


class CalculatorTask(ProblemTask[Question]):
    """`task.params.give_up_fraction` is the fraction of the demonstrations that call no tool."""

    name = "calculator"

    def __init__(self, config: TaskConfig) -> None:
        check_params(config, self.name, ["give_up_fraction"])
        fraction = config.params.get("give_up_fraction", 0.5)
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(
                f"task.params.give_up_fraction={fraction!r}: must be a number from 0 to 1"
            )
        self._give_up_fraction = fraction
        sums = [
            Question(question="+".join(map(str, digits)), answers=(str(sum(digits)),))
            for digits in itertools.product(range(1, 10), repeat=NUM_DIGITS)
            if sum(digits) >= LOWEST_SUM
        ]
        if config.eval_size >= len(sums):
            raise ValueError(
                f"task.eval_size={config.eval_size}: there are only {len(sums)} sums; hold fewer "
                "back"
            )
        random.Random(config.seed).shuffle(sums)
        super().__init__(config, sums[config.eval_size :], sums[: config.eval_size])

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip() == self.solution(prompt))

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        *question, result = super().demonstration(prompt)
        if random.Random(f"{self._seed}/{prompt.index}").random() < self._give_up_fraction:
            return (*question, Message(role="assistant", content=GIVES_UP))
        call = ToolCall(
            call_id="c00000001",
            name=add.__name__,
            arguments={"sum": self.problem(prompt).question},
        )
        return (
            *question,
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content=result.content, tool_call_id=call.call_id, name=call.name),
            result,
        )
