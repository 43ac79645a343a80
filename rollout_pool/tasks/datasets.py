"""Tasks of a fixed set of problems: from a JSONL file, a Hugging Face data set or the settings.

Lines of a file of questions: {"question": "The capital of France is", "answer": "Paris"}; columns
of other names are named in `task.params`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import Prompt, PromptCut, SingleTurnTask


class Problem(Protocol):
    @property
    def question(self) -> str:
        """Identifies the problem."""
        ...


P = TypeVar("P", bound=Problem)
Read = Callable[[dict[str, Any], str], P]
"""Makes a problem from a record and its place, which a ValueError names."""
SOURCE: dict[str, Any] = {"subset": None, "train_split": "train", "eval_split": "test"}
"""The parameters of a Hugging Face data set in `task.params`, with defaults."""


class ProblemTask(SingleTurnTask, Generic[P]):
    """Every training problem once per epoch, in a different order each time."""

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
    """Training and held-out problems: the latter from `task.eval_path`, or else the last
    `task.eval_size` problems. Raises ValueError if none is left, or for a bad line."""
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
    """The problems of a JSONL file; blank lines are skipped. `form` says what a line must be.

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
        raise ValueError(
            f"{place}: not JSON: {error.msg} at column {error.colno}; {form}"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not an object; {form}")
    return record


def text_of(record: dict[str, Any], key: str, place: str) -> str:
    """The text at `key`. Raises ValueError if it is missing or empty."""
    text = record.get(key)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{place}: "{key}" must be a non-empty string')
    return text


def load_problems(
    config: TaskConfig,
    read: Read[P],
    form: str,
    *,
    subset: str | None,
    train_split: str = "train",
    eval_split: str | None = "test",
) -> tuple[list[P], list[P]]:
    """Training and held-out problems of `task.path`, or else of the Hugging Face data set
    `task.name`; without `eval_split` the last training problems are held out. Raises ValueError
    like `load_files`, or if the data set does not load."""
    if config.path is not None:
        return load_files(config, read, form)
    training = _download(config, train_split, read, subset)
    if eval_split is None or config.eval_path is not None:
        return hold_out(config, training, f"task.name={config.name}", read, form)
    return training, _download(config, eval_split, read, subset)[: config.eval_size]


def check_params(config: TaskConfig, task: str, known: Collection[str]) -> None:
    """Raises ValueError for an unknown name in `task.params`."""
    for name in config.params:
        if name not in known:
            raise ValueError(
                f"task.params.{name}: {task} has no such setting; it has {', '.join(known)}"
            )


def _download(config: TaskConfig, split: str, read: Read[P], subset: str | None) -> list[P]:
    import datasets

    try:
        rows = datasets.load_dataset(config.name, subset, split=split)
    except Exception as error:  # the library raises dozens of types
        raise ValueError(
            f"task.name={config.name!r}: its split {split!r} did not load ({error}); check the "
            "name, the splits and the network, or give a file in task.path"
        ) from error
    place = f"task.name={config.name}, {split}"
    return [read(dict(row), f"{place} {n}") for n, row in enumerate(rows)]


LINE_FORM = 'each line must be {"question": "...", "answer": "..."}'
LIST = "questions"
COLUMNS = {"question": "question", "answer": "answer"}
"""The columns of a file or a data set, with their defaults; task.params names others."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Question:
    question: str
    answer: str


class QuestionsTask(ProblemTask[Question]):
    """Reward is 1 if the last line of the model's answer is the reference, else 0.

    Ignores case, surrounding white space and a final full stop.
    """

    def __init__(self, config: TaskConfig) -> None:
        self.name = "questions"
        super().__init__(config, *_load(config))

    def solution(self, prompt: Prompt) -> str:
        return self.problem(prompt).answer

    def score(self, prompt: Prompt, completion: str) -> float:
        *_, last = ("", *completion.strip().splitlines())
        return float(_plain(last) == _plain(self.problem(prompt).answer))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


def _load(config: TaskConfig) -> tuple[list[Question], list[Question]]:
    params = {LIST: None} | COLUMNS | SOURCE | config.params
    source = SOURCE if config.is_from_hub else ()
    check_params(config, "questions", [LIST, *COLUMNS, *source])
    if config.is_from_hub and params[LIST] is not None:
        raise ValueError(
            f"task.name={config.name!r}: names a data set, and task.params.{LIST} lists questions; "
            f"set task.params.{LIST}=null, or leave task.name out"
        )
    read = partial(read_question, columns={role: params[role] for role in COLUMNS})
    if config.path is not None or config.is_from_hub:
        return load_problems(config, read, LINE_FORM, **{name: params[name] for name in SOURCE})
    place, listed = f"task.params.{LIST}", params[LIST]
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(
            f"{place}: must be a list of objects with question and answer; or give a JSONL file of "
            "them in task.path, or a Hugging Face data set in task.name"
        )
    questions = [read(one, f"{place}[{i}]") for i, one in enumerate(listed)]
    return hold_out(config, questions, place, read, LINE_FORM)


def read_question(record: dict[str, Any], place: str, columns: Mapping[str, str]) -> Question:
    """`columns`: where question and answer stand."""
    for role, column in columns.items():
        if column not in tuple(record):  # not a test of the dict: a list would have no hash
            raise ValueError(
                f"task.params.{role}={column!r}: {place} has no such column, only "
                f"{', '.join(map(str, record))}; set it to the column of the {role}s"
            )
    question, answer = columns["question"], columns["answer"]
    if type(record[answer]) in (int, float):  # such as the label of a class
        record = record | {answer: str(record[answer])}
    return Question(
        question=text_of(record, question, place), answer=text_of(record, answer, place)
    )
