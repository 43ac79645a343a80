"""Tasks of a fixed set of problems: from a file, a Hugging Face data set or the settings.

Lines of a file of questions: {"question": "The capital of France is", "answer": "Paris"}; columns
of other names are named in `task.params`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from configs.choices import RewardKind
from configs.rollout_schema import TaskConfig
from host.pictures import MARK, source_of
from rollout_pool.tasks.math_results import is_equal_result
from rollout_pool.tasks.task import Prompt, PromptCut, SingleTurnTask, check_params

log = logging.getLogger(__name__)

BYTE_ORDER_MARK = "\ufeff"
PARQUET = ".parquet"


class Problem(Protocol):
    @property
    def question(self) -> str: ...

    @property
    def right(self) -> Hashable:
        """Decides which completions are right. Two problems with the same question and the same
        `right` are the same problem, however their solutions are put."""
        ...

    @property
    def solution(self) -> str | None:
        """A right completion, for the warm start."""
        ...

    @property
    def row(self) -> Mapping[str, Any]:
        """The record that it was read from; empty where nothing asks for it (`keeping_rows`)."""
        ...


P = TypeVar("P", bound=Problem)
Read = Callable[[dict[str, Any], str], P]
"""Makes a problem from a record and its place, which a ValueError names."""
SOURCE: dict[str, Any] = {"subset": None, "train_split": "train", "eval_split": "test"}
"""The parameters of a Hugging Face data set in `task.params`, with defaults."""


class ProblemTask(SingleTurnTask, Generic[P]):
    """Every training problem once per epoch, in a different order each time.

    Example, of three training problems: example(0), example(1) and example(2) are q2, q0 and q1;
    with example(3) the next epoch begins, as q0, q2, q1. eval_prompts() are those held out.
    """

    name: str

    def __init__(self, config: TaskConfig, training: Sequence[P], held_out: Sequence[P]) -> None:
        super().__init__(config)
        self._kind = config.kind.name
        self._cut = PromptCut(config)
        self._seed = config.seed
        self._training = training
        self._held_out = held_out
        self._held_out_keys = frozenset(map(_key, held_out))
        num_both = sum(_key(problem) in self._held_out_keys for problem in training)
        if num_both:
            log.info(
                "%d of the %d training problems of %s are held out too and are passed over",
                *(num_both, len(training), self.name),
            )
        self._epoch = -1
        self._order: list[int] = []

    @property
    def data(self) -> str:
        """Names the problems: if one is added, is gone or has changed, it is another text."""
        return f"{_data(self._training)} to train on, {_data(self._held_out)} held out"

    def example(self, index: int) -> Prompt:
        return self._prompt(self._training[self._line(index)], index, is_held_out=False)

    def eval_prompts(self) -> Sequence[Prompt]:
        return [
            self._prompt(problem, place, is_held_out=True)
            for place, problem in enumerate(self._held_out)
        ]

    def _prompt(self, problem: P, index: int, *, is_held_out: bool) -> Prompt:
        return Prompt(index=index, is_held_out=is_held_out, text=self._cut(problem.question))

    def is_held_out(self, prompt: Prompt) -> bool:
        return _key(self.problem(prompt)) in self._held_out_keys

    def solution(self, prompt: Prompt) -> str:
        solution = self.problem(prompt).solution
        if solution is None:
            raise ValueError(
                f"task.kind={self._kind}: problem {prompt.text[:60]!r} has no solution to learn "
                "from; give each one, or set trainer.warm_start.num_steps=0"
            )
        return solution

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """The record of the file or data set that the prompt was made from, as it was read."""
        # A copy, as a user's function may change it and is called again for the same prompt.
        return copy.deepcopy(dict(self.problem(prompt).row))

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


def _data(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr(_key(problem)).encode())
    return f"{len(problems)} problems (sha256 {digest.hexdigest()[:16]})"


def _key(problem: Problem) -> tuple[str, Hashable]:
    return problem.question, problem.right


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


def keeping_rows(config: TaskConfig, read: Read[P]) -> Read[P]:
    """`read`, with the record kept in each problem if a user's function may ask for it: kept always
    they would take their memory in every process of a run."""
    functions = (one.kind is RewardKind.function for one in config.rewards.values())
    if config.env is None and not any(functions):
        return read
    return lambda record, place: replace(cast(Any, read(record, place)), row=record)


def read_file(path: Path, setting: str, read: Read[P], form: str) -> list[P]:
    """The problems of a JSONL file, whose blank lines are skipped, or of a Parquet file. `form`
    says what a line must be.

    Raises ValueError naming `setting`, the file and the first bad line's or row's number.
    """
    if path.suffix == PARQUET and path.is_file():
        return _parquet(path, setting, read)
    try:
        # Not splitlines: a string of JSON may hold other separators, such as U+2028, as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise ValueError(
            f"{setting}={path}: there is no such file; give the path of a JSONL file"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{setting}={path}: not a text file in UTF-8 ({error}); write it as JSONL in UTF-8"
        ) from error
    except OSError as error:
        raise ValueError(f"{setting}={path}: not a readable file: {error}") from error
    problems = []
    for number, marked in enumerate(lines, start=1):
        if (line := marked.removeprefix(BYTE_ORDER_MARK)).strip():
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


def text_of(record: dict[str, Any], key: str, place: str, *, may_be_empty: bool = False) -> str:
    """The text at `key`. Raises ValueError if it is missing, is empty or is no Unicode text."""
    text = record.get(key)
    if not isinstance(text, str) or not (may_be_empty or text.strip()):
        empty = "a string" if may_be_empty else "a non-empty string"
        raise ValueError(f'{place}: "{key}" must be {empty}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'{place}: "{key}" has half of a surrogate pair, {text[error.start]!r} at character '
            f"{error.start}, which no tokenizer takes; remove it, or write the whole character"
        ) from error
    return text


def load_problems(
    config: TaskConfig,
    read: Read[P],
    form: str,
    *,
    subset: str | None = None,
    train_split: str = "train",
    eval_split: str | None = "test",
) -> tuple[list[P], list[P]]:
    """Training and held-out problems of `task.path`, or else of the Hugging Face data set
    `task.name`; without `eval_split` the last training problems are held out. Raises ValueError
    naming the setting, the file and the first bad line, or if the data set does not load."""
    read = keeping_rows(config, read)
    if config.path is not None:
        problems = read_file(Path(config.path), "task.path", read, form)
        return hold_out(config, problems, f"task.path={config.path}", read, form)
    training = _download(config, train_split, read, subset)
    if eval_split is None or config.eval_path is not None:
        return hold_out(config, training, f"task.name={config.name}", read, form)
    return training, _download(config, eval_split, read, subset)[: config.eval_size]


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


def _parquet(path: Path, setting: str, read: Read[P]) -> list[P]:
    import datasets

    try:
        # Streaming, as else the library would write a copy below the home folder.
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        records = [dict(row) for row in rows]
    except Exception as error:  # the library raises dozens of types
        raise ValueError(
            f"{setting}={path}: not a Parquet file that can be read ({error}); write it anew, or "
            "give a JSONL file"
        ) from error
    if not records:
        raise ValueError(f"{setting}={path}: the file has no rows")
    return [read(record, f"{setting}={path}, row {n}") for n, record in enumerate(records)]


LINE_FORM = 'each line must be {"question": "...", "answer": "..."}'
LIST = "questions"
SCORE = "score"
COLUMNS = {"question": "question", "answer": "answer"}
"""The columns of a file or a data set, with their defaults; task.params names others."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Question:
    question: str
    answers: tuple[str, ...]
    """All that are right."""
    pictures: tuple[str, ...] = ()
    """Shown by the question; see `Message`."""
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def right(self) -> Hashable:
        return (self.answers, self.pictures) if self.pictures else self.answers

    @property
    def solution(self) -> str:
        return self.answers[0]


class QuestionsTask(ProblemTask[Question]):
    """Reward is 1 if the last line of the completion is a right answer, else 0: its last lines,
    for one of several lines.

    Ignores case, surrounding white space and a final full stop. With task.params.score=math the
    completion's result must be mathematically equal to that of an answer instead.
    """

    name = "questions"

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config, *_load(config))
        rules = {"text": _ends_with, "math": is_equal_result}
        rule = config.params.get(SCORE, "text")
        if not isinstance(rule, str) or rule not in rules:
            raise ValueError(f"task.params.{SCORE}={rule!r}: must be {' or '.join(rules)}")
        self._is_right = rules[rule]

    def _prompt(self, problem: Question, index: int, *, is_held_out: bool) -> Prompt:
        prompt = super()._prompt(problem, index, is_held_out=is_held_out)
        return replace(prompt, pictures=problem.pictures) if problem.pictures else prompt

    @property
    def shown(self) -> Prompt | None:
        """A training question with pictures, if there is one, as its first prompt."""
        found = (one for one in self._training if one.pictures)
        return next((self._prompt(one, 0, is_held_out=False) for one in found), None)

    def score(self, prompt: Prompt, completion: str) -> float:
        answers = self.problem(prompt).answers
        return float(any(self._is_right(answer, completion) for answer in answers))


def _ends_with(answer: str, completion: str) -> bool:
    lines = _plain_lines(answer)
    return _plain_lines(completion)[-len(lines) :] == lines


def _plain_lines(text: str) -> list[str]:
    lines = [" ".join(line.split()) for line in text.casefold().strip().splitlines()] or [""]
    return [*lines[:-1], lines[-1].removesuffix(".")]


def _load(config: TaskConfig) -> tuple[list[Question], list[Question]]:
    params = {LIST: None} | COLUMNS | SOURCE | config.params
    source = SOURCE if config.is_from_hub else ()
    check_params(config, "questions", [LIST, *COLUMNS, SCORE, *source])
    if config.is_from_hub and params[LIST] is not None:
        raise ValueError(
            f"task.name={config.name!r}: names a data set, and task.params.{LIST} lists questions; "
            f"set task.params.{LIST}=null, or leave task.name out"
        )
    columns = {role: params[role] for role in COLUMNS}
    folder = Path(config.path or config.eval_path or "x").parent.absolute()
    read = partial(
        read_question, columns=columns, system_prompt=config.system_prompt, folder=folder
    )
    if config.path is not None or config.is_from_hub:
        return load_problems(config, read, LINE_FORM, **{name: params[name] for name in SOURCE})
    place, listed = f"task.params.{LIST}", params[LIST]
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(
            f"{place}: must be a list of objects with question and answer; or give a JSONL file of "
            "them in task.path, or a Hugging Face data set in task.name"
        )
    read = keeping_rows(config, read)
    questions = [read(one, f"{place}[{i}]") for i, one in enumerate(listed)]
    return hold_out(config, questions, place, read, LINE_FORM)


def read_question(
    record: dict[str, Any],
    place: str,
    columns: Mapping[str, str],
    system_prompt: str | None,
    folder: Path = Path("/"),
) -> Question:
    """`columns`: where question and answer stand. `system_prompt`: that of the task, with which
    questions that are conversations may begin. `folder`: where their pictures are."""
    of_question, of_answer = columns["question"], columns["answer"]
    question = _at(record, of_question, "question", place)
    answer = _at(record, of_answer, "answer", place)
    texts = [_as_answer(one) for one in (answer if isinstance(answer, list) else [answer])]
    if not texts or not all(texts):
        raise ValueError(
            f'{place}: "{of_answer}" must be text, a finite number or a list of these, not '
            f"{answer!r:.100}; leave the row out, or give it its answer"
        )
    pictures: tuple[str, ...] = ()
    if isinstance(question, list):
        what = f'{place}: "{of_question}"'
        question = _asked(question, what, system_prompt)
        if isinstance(question, list):
            question, pictures = _shown(question, what, folder)
    return Question(
        question=text_of({of_question: question}, of_question, place),
        answers=tuple(text_of({of_answer: text}, of_answer, place) for text in texts),
        pictures=pictures,
    )


def _at(record: dict[str, Any], column: str, role: str, place: str) -> Any:
    """Reads a column, or a field within one, as reward_model.ground_truth."""
    if column in tuple(record):  # not a test of the dict: a list would have no hash
        return record[column]
    found: Any = record
    for part in str(column).split("."):
        if not isinstance(found, dict) or part not in found:
            inner = {name: value for name, value in record.items() if isinstance(value, dict)}
            fields = [f"{name}.{field}" for name, value in inner.items() for field in value]
            names = [*(str(name) for name in record if name not in inner), *fields]
            raise ValueError(
                f"task.params.{role}={column!r}: {place} has no such column, only "
                f"{', '.join(names)}; set it to the column of the {role}s"
            )
        found = found[part]
    return found


def _asked(messages: list[Any], what: str, system_prompt: str | None) -> object:
    """The user's message of a conversation that has no other but the system prompt."""
    given = [one if isinstance(one, dict) else {} for one in messages]
    roles = [one.get("role") for one in given]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"{what} must be text, or a conversation of one message of the user, which a system "
            f"message may precede, not of the roles {roles!r:.100}; other openings need a task of "
            "your own: docs/environments.md#your-own-task"
        )
    if len(given) == 2 and given[0].get("content") != system_prompt:
        raise ValueError(
            f"{what} begins with the system message {given[0].get('content')!r}; set "
            "task.system_prompt to it, which is that of all questions, or write a task of your "
            "own: docs/environments.md#your-own-task"
        )
    return given[-1].get("content")


def _shown(parts: list[Any], what: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """The text of a message's parts with a mark for each picture, and the pictures. Raises
    ValueError for one that is unusable."""
    text, pictures = "", list[str]()
    for part in parts:
        given = part if isinstance(part, dict) else {}
        if given.get("type") == "text" and isinstance(given.get("text"), str):
            text += given["text"].replace(MARK, " ")
        else:
            pictures.append(source_of(given, folder, what))
            text += MARK
    return text, tuple(pictures)


def _as_answer(given: object) -> str:
    """As a model would write it; "" if it is no answer."""
    if type(given) is float and math.isfinite(given):
        # A column of integers with one value missing is one of floats: 42.0 stands for 42.
        return np.format_float_positional(given + 0.0, trim="-")  # -0.0 + 0.0 is 0.0
    if type(given) is int:  # such as the label of a class
        return str(given)
    return given if isinstance(given, str) and given.strip() else ""
