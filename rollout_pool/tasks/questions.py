"""Questions with one right answer each, listed in the settings or in a JSONL file.

One line of such a file: {"question": "The capital of France is", "answer": "Paris"}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.problems import ProblemTask, hold_out, load_files, text_of
from rollout_pool.tasks.task import Prompt

LINE_FORM = 'each line must be {"question": "...", "answer": "..."}'
LIST = "questions"


@dataclass(kw_only=True, slots=True, frozen=True)
class Question:
    question: str
    answer: str


class QuestionsTask(ProblemTask[Question]):
    """Reward is 1 if the last line of what the model says is the answer, else 0.

    Case, white space around it and a full stop behind it make no difference.
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
    for name in config.params:
        if name != LIST:
            raise ValueError(f"task.params.{name}: questions has no such setting; it has {LIST}")
    if config.path is not None:
        return load_files(config, read_question, LINE_FORM)
    place = f"task.params.{LIST}"
    listed = config.params.get(LIST)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(
            f"{place}: must be a list of objects with question and answer; or give a JSONL file of "
            "them in task.path"
        )
    questions = [read_question(one, f"{place}[{i}]") for i, one in enumerate(listed)]
    return hold_out(config, questions, place, read_question, LINE_FORM)


def read_question(record: dict[str, Any], place: str) -> Question:
    return Question(
        question=text_of(record, "question", place), answer=text_of(record, "answer", place)
    )
