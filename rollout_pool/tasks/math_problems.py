r"""Mathematical problems with a worked solution, scored by math-verify.

One line of a file of task.kind=gsm8k, and one of task.kind=math:

    {"question": "...", "answer": "reasoning ... #### 42"}
    {"problem": "...", "solution": "reasoning ... \\boxed{42}"}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.datasets import SOURCE, ProblemTask, load_problems, text_of
from rollout_pool.tasks.task import Prompt, check_params

FINAL = "####"
"""Precedes GSM8K's final results."""
GSM8K_FORM = 'each line must be {"question": "...", "answer": "... #### 42"}'
BOX = "\\boxed{"
MATH_FORM = r'each line must be {"problem": "...", "solution": "... \\boxed{42}"}'


@dataclass(kw_only=True, slots=True, frozen=True)
class MathProblem:
    question: str
    solution: str
    right: str
    """The final result."""


class Gsm8kTask(ProblemTask[MathProblem]):
    """Reward is 1 for the right final result, else 0."""

    name = "gsm8k"

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config, *load_problems(config, read_gsm8k, GSM8K_FORM, subset="main"))

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(is_same_number(self.problem(prompt).right, completion))


class MathTask(ProblemTask[MathProblem]):
    """Reward is 1 for a result mathematically equal to that in the solution's last box, else 0."""

    name = "math"

    def __init__(self, config: TaskConfig) -> None:
        check_params(config, self.name, SOURCE)
        source = SOURCE | config.params
        super().__init__(config, *load_problems(config, read_math, MATH_FORM, **source))

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(is_equal(self.problem(prompt).right, completion))


def is_same_number(final: str, completion: str) -> bool:
    """Returns whether the last result in `completion` is mathematically equal to `final`.

    A result after the mark #### takes precedence over other numbers.
    """
    from math_verify import parse, verify

    _, mark, behind = completion.rpartition(FINAL)
    given = parse(behind.strip().split("\n")[0] if mark else completion)
    return bool(given) and bool(verify(parse(final.replace(",", "")), given))


def is_equal(final: str, completion: str) -> bool:
    """Returns whether the last box in `completion`, or else its last result, equals `final`."""
    from math_verify import parse, verify

    boxed = last_box(completion)
    if boxed is not None and "".join(boxed.split()) == "".join(final.split()):
        return True  # also for words, such as a name
    given = parse(completion if boxed is None else f"{BOX}{boxed}}}")
    return bool(given) and bool(verify(parse(f"{BOX}{final}}}"), given))


def last_box(text: str) -> str | None:
    """The content of the last complete box of `text`, with nested braces; None without one."""
    start = text.rfind(BOX)
    while start >= 0:
        depth = 1
        for place in range(start + len(BOX), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len(BOX) : place].strip()
        start = text.rfind(BOX, 0, start)
    return None


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
