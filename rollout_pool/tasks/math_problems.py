r"""Problems in the format of the MATH data set, from a file or the hub, scored by math-verify.

One line of such a file: {"problem": "...", "solution": "... \\boxed{42}"}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.datasets import SOURCE, ProblemTask, check_params, load_problems, text_of
from rollout_pool.tasks.task import Prompt

BOX = "\\boxed{"
LINE_FORM = r'each line must be {"problem": "...", "solution": "... \\boxed{42}"}'


@dataclass(kw_only=True, slots=True, frozen=True)
class MathProblem:
    question: str
    solution: str
    right: str
    """The content of its last box."""


class MathTask(ProblemTask[MathProblem]):
    """Reward is 1 for an answer that is mathematically equal to the solution's box, else 0."""

    def __init__(self, config: TaskConfig) -> None:
        self.name = "math"
        check_params(config, self.name, SOURCE)
        source = SOURCE | config.params
        super().__init__(config, *load_problems(config, read_problem, LINE_FORM, **source))

    def solution(self, prompt: Prompt) -> str:
        return self.problem(prompt).solution

    def score(self, prompt: Prompt, completion: str) -> float:
        return 1.0 if is_equal(self.problem(prompt).right, completion) else 0.0


def is_equal(final: str, completion: str) -> bool:
    """Whether the last box in `completion`, or else its last answer, equals `final`."""
    from math_verify import parse, verify

    given = last_box(completion)
    if given is not None and "".join(given.split()) == "".join(final.split()):
        return True  # also for answers such as a name
    answer = parse(completion if given is None else f"{BOX}{given}}}")
    return bool(answer) and bool(verify(parse(f"{BOX}{final}}}"), answer))


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


def read_problem(record: dict[str, Any], place: str) -> MathProblem:
    solution = text_of(record, "solution", place)
    right = last_box(solution)
    if not right:
        raise ValueError(rf'{place}: "solution" must hold its final answer in \boxed{{...}}')
    return MathProblem(question=text_of(record, "problem", place), solution=solution, right=right)
