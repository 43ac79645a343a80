r"""Mathematical problems with a worked solution, scored by math-verify.

One line of a file of task.kind=gsm8k, and one of task.kind=math:

    {"question": "...", "answer": "reasoning ... #### 42"}
    {"problem": "...", "solution": "reasoning ... \\boxed{42}"}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.data.files import text_of
from rollout_pool.tasks.datasets import ORDER, SOURCE, Problem, ProblemTask, load_problems
from rollout_pool.tasks.math_results import FINAL, is_equal, is_same_number, last_box
from rollout_pool.tasks.task import Prompt, check_params

GSM8K_FORM = 'each line must be {"question": "...", "answer": "... #### 42"}'
MATH_FORM = r'each line must be {"problem": "...", "solution": "... \\boxed{42}"}'


@dataclass(kw_only=True, slots=True, frozen=True)
class MathProblem(Problem):
    solution: str = field()  # else the base's property would become its default
    right: str = field()
    """The final result."""


class Gsm8kTask(ProblemTask[MathProblem]):
    """Reward is 1 for the right final result, else 0."""

    name = "gsm8k"

    def __init__(self, config: TaskConfig) -> None:
        check_params(config, self.name, ORDER)
        subset = "main" if config.path is None else None  # of openai/gsm8k
        super().__init__(config, *load_problems(config, read_gsm8k, GSM8K_FORM, subset=subset))

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(is_same_number(self.problem(prompt).right, completion))


class MathTask(ProblemTask[MathProblem]):
    """Reward is 1 for a result mathematically equal to that in the solution's last box, else 0."""

    name = "math"

    def __init__(self, config: TaskConfig) -> None:
        check_params(config, self.name, [*SOURCE, *ORDER])
        source = {name: config.params.get(name, usual) for name, usual in SOURCE.items()}
        super().__init__(config, *load_problems(config, read_math, MATH_FORM, **source))

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(is_equal(self.problem(prompt).right, completion))


def read_gsm8k(record: dict[str, Any], place: str) -> MathProblem:
    question, solution = text_of(record, "question", place), text_of(record, "answer", place)
    _, mark, right = solution.rpartition(FINAL)
    if not mark or not right.strip():
        raise ValueError(f'{place}: "answer" must end in "{FINAL} <the final answer>"')
    return MathProblem(question=question, solution=solution, right=right.strip())


def read_math(record: dict[str, Any], place: str) -> MathProblem:
    solution = text_of(record, "solution", place)
    right = last_box(solution)
    if not right:
        raise ValueError(rf'{place}: "solution" must hold its final answer in \boxed{{...}}')
    return MathProblem(question=text_of(record, "problem", place), solution=solution, right=right)
