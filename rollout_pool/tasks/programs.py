"""Programming exercises from a JSONL file, each with tests.

One line of such a file, with tests of input and output:

    {"prompt": "Print twice the number given.", "tests": [{"input": "2", "output": "4"}]}

or with statements that run after it, and with a program that passes, for the warm start:

    {"prompt": "Write f(x) = 2x.", "tests": {"assert": "assert f(2) == 4"},
     "solution": "def f(x): return 2 * x"}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.data.files import text_of
from rollout_pool.tasks.datasets import ORDER, Problem, ProblemTask, load_problems
from rollout_pool.tasks.task import Prompt, check_params

LINE_FORM = (
    'each line must be {"prompt": "...", "tests": [{"input": "2", "output": "4"}]}, or have '
    '"tests": {"assert": "..."}'
)
FENCE = "```"


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramTest:
    """The expected output for an input, or statements to run after the program."""

    input: str = ""
    output: str = ""
    """Whole standard output; trailing white space is ignored."""
    statements: str | None = None
    """Run after the program instead, and must not raise."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Exercise(Problem):
    tests: tuple[ProgramTest, ...]
    solution: str | None = field()  # else the base's property would become its default

    @property
    def right(self) -> tuple[ProgramTest, ...]:
        return self.tests


class CodeTask(ProblemTask[Exercise]):
    """A reward of kind code_tests runs the tests in the sandbox."""

    name = "code"

    def __init__(self, config: TaskConfig) -> None:
        if config.path is None:
            raise ValueError("task.path=None: task.kind=code needs a JSONL file of exercises")
        check_params(config, self.name, ORDER)
        super().__init__(config, *load_problems(config, read_exercise, LINE_FORM))

    def tests(self, prompt: Prompt) -> tuple[ProgramTest, ...]:
        return self.problem(prompt).tests

    def check_inputs_only(self, setting: str) -> None:
        """Raises ValueError naming `setting` for an exercise whose tests are statements."""
        for exercise in (*self._training, *self._held_out):
            if any(test.statements is not None for test in exercise.tests):
                raise ValueError(
                    f"{setting}: the tests of exercise {exercise.question[:60]!r} are statements "
                    "of Python, which cannot call a program of another language; give it "
                    '"tests": [{"input": ..., "output": ...}]'
                )

    def solution(self, prompt: Prompt) -> str:
        solution = super().solution(prompt)
        return solution if FENCE in solution else f"{FENCE}python\n{solution}\n{FENCE}"

    def score(self, prompt: Prompt, completion: str) -> float:
        raise ValueError(
            "task.rewards: a completion of task.kind=code is scored by running its tests; set "
            "task.rewards={tests: {kind: code_tests}}"
        )


def read_exercise(record: dict[str, Any], place: str) -> Exercise:
    solution = None
    if record.get("solution") is not None:
        solution = text_of(record, "solution", place, may_be_empty=True)
    return Exercise(
        question=text_of(record, "prompt", place),
        tests=_read_tests(record.get("tests"), place),
        solution=solution,
    )


def _read_tests(tests: object, place: str) -> tuple[ProgramTest, ...]:
    if isinstance(tests, dict):
        return (ProgramTest(statements=text_of(tests, "assert", f'{place}, "tests"')),)
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f'{place}: "tests" must not be missing or empty; {LINE_FORM}')
    return tuple(_read_test(test, f"{place}, test {n}") for n, test in enumerate(tests, start=1))


def _read_test(test: object, place: str) -> ProgramTest:
    if not isinstance(test, dict):
        raise ValueError(f"{place}: not an object; {LINE_FORM}")
    if "assert" in test:
        return ProgramTest(statements=text_of(test, "assert", place))
    given, printed = (text_of(test, key, place, may_be_empty=True) for key in ("input", "output"))
    return ProgramTest(input=given, output=printed)
