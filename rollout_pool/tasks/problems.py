"""A fixed set of problems, from a JSONL file or a Hugging Face data set, asked epoch by epoch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.single_turn import SingleTurnTask
from rollout_pool.tasks.task import Prompt, PromptCut


class Problem(Protocol):
    @property
    def question(self) -> str:
        """Names the problem: two of the same question are the same problem."""
        ...


P = TypeVar("P", bound=Problem)
Read = Callable[[dict[str, Any], str], P]
"""Makes a problem of one record; raises ValueError that begins with the place it is given."""


class ProblemTask(SingleTurnTask, Generic[P]):
    """Every training problem once an epoch, in an order that changes with it."""

    def __init__(self, config: TaskConfig, training: Sequence[P], held_out: Sequence[P]) -> None:
        super().__init__(config)
        self._cut = PromptCut(config)
        self._seed = config.seed
        self._training = training
        self._held_out = held_out
        self._eval_questions = frozenset(problem.question for problem in held_out)
        self._epoch = -1
        self._order: list[int] = []

    def example(self, index: int) -> Prompt:
        problem = self._training[self._line(index)]
        return Prompt(index=index, is_held_out=False, text=self._cut(problem.question))

    def eval_prompts(self) -> Sequence[Prompt]:
        return [
            Prompt(index=place, is_held_out=True, text=self._cut(problem.question))
            for place, problem in enumerate(self._held_out)
        ]

    def is_held_out(self, prompt: Prompt) -> bool:
        return self.problem(prompt).question in self._eval_questions

    def problem(self, prompt: Prompt) -> P:
        if prompt.is_held_out:
            return self._held_out[prompt.index]
        return self._training[self._line(prompt.index)]

    def _line(self, index: int) -> int:
        epoch, place = divmod(index, len(self._training))
        if epoch != self._epoch:
            self._order = list(range(len(self._training)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]


def load_files(config: TaskConfig, read: Read[P], form: str) -> tuple[list[P], list[P]]:
    """Training and held-out problems of `task.path` and `task.eval_path`.

    Raises ValueError naming the setting, the file and the first bad line's number.
    """
    assert config.path is not None
    problems = read_file(Path(config.path), "task.path", read, form)
    return hold_out(config, problems, f"task.path={config.path}", read, form)


def hold_out(
    config: TaskConfig, problems: list[P], source: str, read: Read[P], form: str
) -> tuple[list[P], list[P]]:
    """Training and held-out problems: all and those of `task.eval_path`, or all but the last
    `task.eval_size` and those. Raises ValueError if none is left, or for a bad line."""
    if config.eval_path is not None:
        held_out = read_file(Path(config.eval_path), "task.eval_path", read, form)
        return problems, held_out[: config.eval_size]
    if config.eval_size >= len(problems):
        raise ValueError(
            f"task.eval_size={config.eval_size}: {source} has only {len(problems)} "
            "problems; hold fewer back, or name another file in task.eval_path"
        )
    return problems[: -config.eval_size], problems[-config.eval_size :]


def read_file(path: Path, setting: str, read: Read[P], form: str) -> list[P]:
    """The problems of a JSONL file; blank lines are passed over. `form` tells what a line must be.

    Raises ValueError naming `setting`, the file and the first bad line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ValueError(
            f"{setting}={path}: there is no such file; give the path of a JSONL file"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}={path}: not a readable text file: {error}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{setting}={path}, line {number}"
            problems.append(read(_record(line, place, form), place))
    if not problems:
        raise ValueError(f"{setting}={path}: the file is empty; {form}")
    return problems


def _record(line: str, place: str, form: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}; {form}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not an object; {form}")
    return record


def text_of(record: dict[str, Any], key: str, place: str) -> str:
    """The text under `key`. Raises ValueError if there is none, or an empty one."""
    text = record.get(key)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{place}: "{key}" must be a text that is not empty')
    return text


def download(config: TaskConfig, split: str, read: Read[P], subset: str | None = None) -> list[P]:
    """The problems of one split of the Hugging Face data set `task.name`.

    Raises ValueError for a data set that does not load, and for a row that is no problem.
    """
    import datasets

    try:
        rows = datasets.load_dataset(config.name, subset, split=split)
    except Exception as error:  # the library raises dozens of types for one and the same mistake
        raise ValueError(
            f"task.name={config.name!r}: the data set did not load ({error}); check the name and "
            "the network, or give a file in task.path"
        ) from error
    return [read(dict(row), f"{config.name}, {split} {n}") for n, row in enumerate(rows)]
