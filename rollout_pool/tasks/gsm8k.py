"""GSM8K word problems, from the data set or a JSONL file, scored by math-verify.

One line of such a file: {"question": "...", "answer": "reasoning ... #### 42"}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.datasets import ProblemTask, load_problems, text_of
from rollout_pool.tasks.task import Prompt

FINAL = "####"
"""Precedes GSM8K's final answers."""
LINE_FORM = 'each line must be {"question": "...", "answer": "... #### 42"}'


@dataclass(kw_only=True, slots=True, frozen=True)
class WordProblem:
    question: str
    answer: str
    """Reasoning, the mark ####, and the final answer."""

    @property
    def right(self) -> str:
        return self.answer.rpartition(FINAL)[2].strip()


class Gsm8kTask(ProblemTask[WordProblem]):
    """Reward is 1 for the correct final answer, else 0."""

    def __init__(self, config: TaskConfig) -> None:
        self.name = "gsm8k"
        super().__init__(config, *load_problems(config, read_problem, LINE_FORM, subset="main"))

    def solution(self, prompt: Prompt) -> str:
        return self.problem(prompt).answer

    def score(self, prompt: Prompt, completion: str) -> float:
        return 1.0 if is_same_answer(self.problem(prompt).right, completion) else 0.0


def is_same_answer(final: str, completion: str) -> bool:
    """Whether the last answer in `completion` is mathematically equal to `final`.

    An answer after the mark #### takes precedence over other numbers.
    """
    from math_verify import parse, verify

    _, mark, behind = completion.rpartition(FINAL)
    given = parse(behind.strip().split("\n")[0] if mark else completion)
    return bool(given) and bool(verify(parse(final.replace(",", "")), given))


def read_problem(record: dict[str, Any], place: str) -> WordProblem:
    problem = WordProblem(
        question=text_of(record, "question", place), answer=text_of(record, "answer", place)
    )
    if FINAL not in problem.answer or not problem.right:
        raise ValueError(f'{place}: "answer" must end in "{FINAL} <the final answer>"')
    return problem
