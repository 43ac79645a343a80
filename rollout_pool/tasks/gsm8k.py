"""Word problems in the form of GSM8K, from the data set itself or a JSONL file, by math-verify.

One line of such a file: {"question": "...", "answer": "reasoning ... #### 42"}.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import Prompt, PromptCut

FINAL = "####"
"""GSM8K puts its final answer behind this mark."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WordProblem:
    question: str
    answer: str
    """Reasoning, the mark ####, and the final answer."""

    @property
    def final(self) -> str:
        return self.answer.rpartition(FINAL)[2].strip()


LINE_FORM = 'each line must be {"question": "...", "answer": "... #### 42"}'


class Gsm8kTask:
    """Every training problem once an epoch, in an order that changes with it; reward is 0 or 1."""

    def __init__(self, config: TaskConfig) -> None:
        self.name = "gsm8k"
        self._cut = PromptCut(config)
        self._seed = config.seed
        self._training, self._held_out = _load(config)
        self._eval_questions = frozenset(problem.question for problem in self._held_out)
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
        return self._problem(prompt).question in self._eval_questions

    def solution(self, prompt: Prompt) -> str:
        return self._problem(prompt).answer

    def score(self, prompt: Prompt, completion: str) -> float:
        return 1.0 if is_same_answer(self._problem(prompt).final, completion) else 0.0

    def _problem(self, prompt: Prompt) -> WordProblem:
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


def is_same_answer(final: str, completion: str) -> bool:
    """Whether the last answer in `completion` is mathematically equal to `final`.

    An answer behind the mark #### counts before any other number in the text.
    """
    from math_verify import parse, verify

    _, mark, behind = completion.rpartition(FINAL)
    given = parse(behind.strip().split("\n")[0] if mark else completion)
    return bool(given) and bool(verify(parse(final.replace(",", "")), given))


def _load(config: TaskConfig) -> tuple[list[WordProblem], list[WordProblem]]:
    if config.path is None:
        return _download(config.name, "train"), _download(config.name, "test")[: config.eval_size]
    problems = read_problems(Path(config.path), "task.path")
    if config.eval_path is not None:
        held_out = read_problems(Path(config.eval_path), "task.eval_path")[: config.eval_size]
        return problems, held_out
    if config.eval_size >= len(problems):
        raise ValueError(
            f"task.eval_size={config.eval_size}: task.path={config.path} has only {len(problems)} "
            "problems; hold fewer back, or name another file in task.eval_path"
        )
    return problems[: -config.eval_size], problems[-config.eval_size :]


def read_problems(path: Path, setting: str) -> list[WordProblem]:
    """The problems of a JSONL file; blank lines are passed over.

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
    problems = [
        _read_line(line, f"{setting}={path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not problems:
        raise ValueError(f"{setting}={path}: the file is empty; {LINE_FORM}")
    return problems


def _read_line(line: str, place: str) -> WordProblem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}; {LINE_FORM}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not an object; {LINE_FORM}")
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f'{place}: "{key}" must be a text that is not empty')
    problem = WordProblem(question=record["question"], answer=record["answer"])
    if FINAL not in problem.answer or not problem.final:
        raise ValueError(f'{place}: "answer" must end in "{FINAL} <the final answer>"')
    return problem


def _download(name: str, split: str) -> list[WordProblem]:
    import datasets

    try:
        rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # the library raises dozens of types for one and the same mistake
        raise ValueError(
            f"task.name={name!r}: the data set did not load ({error}); check the name and the "
            "network, or give a file in task.path"
        ) from error
    return [
        _read_line(
            json.dumps({"question": row["question"], "answer": row["answer"]}), f"{name} {n}"
        )
        for n, row in enumerate(rows)
    ]
