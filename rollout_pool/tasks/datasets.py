"""Tasks of a fixed set of problems: from a file, a Hugging Face data set or the settings.

Lines of a file of questions: {"question": "The capital of France is", "answer": "Paris"}; columns
of other names are named in `task.params`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from configs.choices import RewardKind
from configs.rollout_schema import FILE_KINDS, TaskConfig
from rollout_pool.episodes.conversation import Message, opening
from rollout_pool.tasks.data.epochs import Epochs
from rollout_pool.tasks.data.files import has_no_splits, records_of, split_of, text_of
from rollout_pool.tasks.data.messages import read_episode, read_messages
from rollout_pool.tasks.math_results import is_equal_result, result_of
from rollout_pool.tasks.task import Prompt, PromptCut, SingleTurnTask, check_params

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem(ABC):
    question: str
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The record that it was read from; empty where nothing asks for it (`keeping_rows`)."""
    weight: float = 1.0
    """How often it comes in an epoch."""

    @property
    @abstractmethod
    def right(self) -> Hashable:
        """Decides which completions are right. Two problems with the same question and the same
        `right` are the same problem, however their solutions are put."""

    @property
    @abstractmethod
    def solution(self) -> str | None:
        """A right completion, for the warm start."""


P = TypeVar("P", bound=Problem)
Read = Callable[[dict[str, Any], str], P]
"""Makes a problem from a record and its place, which a ValueError names."""
SOURCE: dict[str, Any] = {"subset": None, "train_split": "train", "eval_split": "test"}
"""The parameters of a Hugging Face data set in `task.params`, with defaults."""
ORDER = ("shuffle", "weight")
"""In `task.params` of every kind in FILE_KINDS: whether each epoch has an order of its own, instead
of the file's, and the column of the weights, which are 1 without."""
MAX_WEIGHT = 100


class ProblemTask(SingleTurnTask, Generic[P]):
    """Every training problem once per epoch, or as often as its weight says, in a different order
    each time (`Epochs`).

    Example, of three training problems: example(0), example(1) and example(2) are q2, q0 and q1;
    with example(3) the next epoch begins, as q0, q2, q1. eval_prompts() are those held out.
    """

    name: str

    def __init__(self, config: TaskConfig, training: Sequence[P], held_out: Sequence[P]) -> None:
        super().__init__(config)
        self._kind = config.kind.name
        self._cut = PromptCut(config)
        for problem in (*training, *held_out) if config.prompt_pattern else ():
            if problem.weight:
                self._cut(problem.question)  # raises now, and not when its turn comes
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
        # Parameters of others are their environment's.
        self._shuffles = config.kind not in FILE_KINDS or config.params.get("shuffle", True)
        if not isinstance(self._shuffles, bool):
            raise ValueError(f"task.params.shuffle={self._shuffles!r}: must be true or false")
        weights = [problem.weight for problem in training]
        if not training:
            raise ValueError(
                f"task.kind={self._kind}: no row is left to train on; give more data, or lower "
                "task.eval_size"
            )
        if not any(weights):
            raise ValueError(
                f"task.params.weight={config.params.get('weight')!r}: no row to train on has a "
                "weight above 0; name another column, or correct the weights"
            )
        self.epochs = Epochs(weights, config.seed, shuffles=self._shuffles)

    @property
    def data(self) -> str:
        """Names the problems and their order: if one is added, is gone, has changed or comes more
        often, it is another text."""
        order = "" if self._shuffles else ", in the order of the file"
        return f"{_data(self._training)} to train on{order}, {_data(self._held_out)} held out"

    def example(self, index: int) -> Prompt:
        return self._prompt(self._training[self.epochs.find(index)[1]], index, is_held_out=False)

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
                f"task.kind={self._kind}: problem {prompt.text[:60]!r} has no solution; "
                "give each one, or set trainer.warm_start.num_steps=0 and no reward that reads it"
            )
        return solution

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """The record of the file or data set that the prompt was made from, as it was read."""
        # A copy, as a user's function may change it and is called again for the same prompt.
        return copy.deepcopy(dict(self.problem(prompt).row))

    def problem(self, prompt: Prompt) -> P:
        if prompt.is_held_out:
            return self._held_out[prompt.index]
        return self._training[self.epochs.find(prompt.index)[1]]


def _data(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        weight = () if problem.weight == 1 else (problem.weight,)  # as in data of earlier runs
        episode = getattr(problem, "episode", ())
        digest.update(repr((*_key(problem), *episode, *weight)).encode())
    return f"{len(problems)} problems (sha256 {digest.hexdigest()[:16]})"


def _key(problem: Problem) -> tuple[str, Hashable]:
    return problem.question, problem.right


def hold_out(
    config: TaskConfig, problems: list[P], source: str, read: Read[P], form: str
) -> tuple[list[P], list[P]]:
    """Training and held-out problems: the latter from `task.eval_path`, or else the last
    `task.eval_size` problems. Raises ValueError if none is left, or for a bad line."""
    if config.eval_path is not None and config.eval_path == config.path:
        return problems, problems[: config.eval_size]
    if config.eval_path is not None:
        records = records_of(Path(config.eval_path), "task.eval_path", form)
        return problems, [read(*one) for one in records][: config.eval_size]
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
    return lambda record, place: replace(read(record, place), row=record)


def weighing(config: TaskConfig, read: Read[P]) -> Read[P]:
    """`read`, with each problem's weight from the column that `task.params.weight` names."""
    column = config.params.get("weight")
    if column is None:
        return read

    def weighed(record: dict[str, Any], place: str) -> P:
        given, weight = _at(record, column, "weight", place), math.nan
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            weight = float(given)  # in CSV it is text
        if weight != 0 and not 0.01 <= weight <= MAX_WEIGHT:
            raise ValueError(
                f'{place}: "{column}" must be a weight from 0.01 to {MAX_WEIGHT}, or 0 for a row '
                f"that never comes, not {given!r:.100}; correct it, or leave the row out"
            )
        return replace(read(record, place), weight=round(weight, 2))

    return weighed


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
    weighed = weighing(config, read)
    setting = "task.name" if config.path is None else "task.path"
    source = config.path or config.name
    if config.path is None or Path(source).is_dir():
        split = partial(split_of, source, setting, subset=subset)
        training = [weighed(*one) for one in split(train_split)]
        is_split = eval_split is not None and config.eval_path in (None, config.path)
        if eval_split is not None and is_split and not has_no_splits(Path(source)):
            return training, [read(*one) for one in split(eval_split)][: config.eval_size]
    else:
        training = [weighed(*one) for one in records_of(Path(source), setting, form)]
    return hold_out(config, training, f"{setting}={source}", read, form)


LINE_FORM = 'each line must be {"question": "...", "answer": "..."}'
LIST = "questions"
SCORE = "score"
COLUMNS = {"question": "question", "answer": "answer"}
"""The columns of a file or a data set, with their defaults; task.params names others. Without
answers (null) the rewards are the user's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Question(Problem):
    answers: tuple[str, ...]
    """All that are right; none if the data have no answers."""
    pictures: tuple[str, ...] = ()
    """Shown by the question; see `Message`."""
    conversation: tuple[Message, ...] = ()
    """See `Prompt.conversation`; the last message of the user is the question."""
    episode: tuple[Message, ...] = ()
    """A model's part of the conversation, if the row has the whole of it."""

    @property
    def right(self) -> Hashable:
        # As text: calls of tools have no hash. Without any, as in data of earlier runs.
        more = (self.pictures, *map(repr, self.conversation))
        # A model's answer decides nothing: its question may have several, in as many rows.
        answers = () if self.episode else self.answers
        return (answers, *more) if any(more) else answers

    @property
    def solution(self) -> str | None:
        return self.answers[0] if self.answers else None


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
        if not problem.pictures and not problem.conversation:
            return prompt
        messages = list(problem.conversation)
        asked = [place for place, one in enumerate(messages) if one.role == "user"]
        for place in asked[-1:]:
            messages[place] = replace(messages[place], content=prompt.text)
        return replace(prompt, pictures=problem.pictures, conversation=tuple(messages))

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        if episode := self.problem(prompt).episode:
            return (*prompt.opening(self._system_prompt), *episode)
        return super().demonstration(prompt)

    @property
    def shapes(self) -> list[Prompt]:
        """A question of each sequence of roles, texts, calls and pictures that there is."""
        found = {
            tuple(
                (m.role, bool(m.content), len(m.tool_calls), len(m.pictures))
                for m in one.conversation
            )
            or bool(one.pictures): one
            for one in (*self._held_out, *self._training)
        }
        return [self._prompt(one, 0, is_held_out=False) for one in found.values()]

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
    is_folder = config.path is not None and Path(config.path).is_dir()
    source = SOURCE if config.is_from_hub or is_folder else ()
    check_params(config, "questions", [LIST, *COLUMNS, SCORE, *ORDER, *source])
    if config.is_from_hub and params[LIST] is not None:
        raise ValueError(
            f"task.name={config.name!r}: names a data set, and task.params.{LIST} lists questions; "
            f"set task.params.{LIST}=null, or leave task.name out"
        )
    columns = {role: params[role] for role in COLUMNS}
    kinds = {reward.kind for reward in config.rewards.values()}
    is_scored = config.env or config.agent or kinds
    if columns["answer"] is None and (not is_scored or RewardKind.task in kinds):
        raise ValueError(
            "task.params.answer=null: the task cannot score answers without right ones; name their "
            "column, or give task.rewards of other kinds than task"
        )
    path = Path(config.path or config.eval_path or "x").absolute()
    folder = path if path.is_dir() else path.parent
    read: Read[Question] = partial(read_question, columns=columns, config=config, folder=folder)
    if config.path is not None or config.is_from_hub:
        return load_problems(config, read, LINE_FORM, **{name: params[name] for name in SOURCE})
    place, listed = f"task.params.{LIST}", params[LIST]
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(
            f"{place}: must be a list of objects with question and answer; or give a JSONL file of "
            "them in task.path, or a Hugging Face data set in task.name"
        )
    read = keeping_rows(config, read)
    weighed = weighing(config, read)
    questions = [weighed(one, f"{place}[{i}]") for i, one in enumerate(listed)]
    return hold_out(config, questions, place, read, LINE_FORM)


def read_question(
    record: dict[str, Any],
    place: str,
    columns: Mapping[str, Any],
    config: TaskConfig,
    folder: Path = Path("/"),
) -> Question:
    """`columns`: where question and answer stand; None for no answer. `folder`: where pictures of
    questions that are conversations are."""
    of_question, of_answer = columns["question"], columns["answer"]
    question = _at(record, of_question, "question", place)
    answer = [] if of_answer is None else _at(record, of_answer, "answer", place)
    what, episode = f'{place}: "{of_question}"', tuple[Message, ...]()
    conversation: tuple[Message, ...] = ()
    if isinstance(question, list) and of_question == of_answer:
        conversation, episode = read_episode(question, what, folder)
        answer = episode[-1].content
    elif isinstance(question, list):
        conversation = read_messages(question, what, folder)
    texts = [_as_answer(one) for one in (answer if isinstance(answer, list) else [answer])]
    if (not texts and of_answer is not None) or not all(texts):
        raise ValueError(
            f'{place}: "{of_answer}" must be text, a finite number or a list of these, not '
            f"{answer!r:.100}; leave the row out, or give it its answer"
        )
    if config.params.get(SCORE) == "math" and not all(map(result_of, texts)):
        raise ValueError(
            f'{place}: "{of_answer}" has no result in its last box or behind ####: '
            f"{answer!r:.100}; leave the row out, or give it its result"
        )
    if conversation:
        conversation = _with_system(conversation, what, config)
        question = next(one.content for one in reversed(conversation) if one.role == "user")
    pictures = tuple(picture for one in conversation for picture in one.pictures)
    is_usual = conversation == opening(str(question), config.system_prompt, pictures)
    return Question(
        question=text_of({of_question: question}, of_question, place),
        answers=tuple(text_of({of_answer: text}, of_answer, place) for text in texts),
        pictures=pictures,
        conversation=() if is_usual else conversation,
        episode=episode,
    )


def _with_system(
    messages: tuple[Message, ...], what: str, config: TaskConfig
) -> tuple[Message, ...]:
    """The conversation with the task's system prompt, unless it brings its own."""
    first, ours = messages[0], config.system_prompt
    if first.role != "system":
        messages = messages if ours is None else (Message(role="system", content=ours), *messages)
    elif ours is not None and first.content != ours:
        raise ValueError(
            f"{what} begins with the system message {first.content!r:.100}, and "
            f"task.system_prompt is {ours!r:.100}; leave one of them out"
        )
    if not config.chat_template and sum(one.role != "system" for one in messages) > 1:
        roles = ", ".join(one.role for one in messages)
        raise ValueError(
            f"task.chat_template=false: {what} is a conversation of {roles}, whose turns only a "
            "template sets apart; set task.chat_template=true"
        )
    return messages


def _at(record: dict[str, Any], column: str, role: str, place: str) -> Any:
    """Reads a column, or a field within one, as reward_model.ground_truth."""
    if column in tuple(record):  # not a test of the dict: a list would have no hash
        return record[column]
    found: Any = record
    for part in str(column).split("."):
        if not isinstance(found, dict) or part not in found:
            inner = {name: value for name, value in record.items() if isinstance(value, dict)}
            fields = [f"{name}.{field}" for name, value in inner.items() for field in value]
            or_null = ", or to null if there are none" if role == "answer" else ""
            names = [*(str(name) for name in record if name not in inner), *fields]
            raise ValueError(
                f"task.params.{role}={column!r}: {place} has no such column, only "
                f"{', '.join(names)}; set it to the column of the {role}s{or_null}"
            )
        found = found[part]
    return found


def _as_answer(given: object) -> str:
    """As a model would write it; "" if it is no answer."""
    if type(given) is float and math.isfinite(given):
        # A column of integers with one value missing is one of floats: 42.0 stands for 42.
        return np.format_float_positional(given + 0.0, trim="-")  # -0.0 + 0.0 is 0.0
    if type(given) is int:  # such as the label of a class
        return str(given)
    return given if isinstance(given, str) and given.strip() else ""
