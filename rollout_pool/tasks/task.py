"""What the policy practises on: prompts by index, their reference solutions and their scores.

A task is a pure function of its config and an index, so a prompt is named by a number: a stream's
position is one integer, a stale prompt can be run again, and another process can score an answer
without being sent more than the number.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.env import Env, Message, SingleTurn, system_message

MAX_SKIPS = 100_000
"""So many held-out prompts in a row mean that nothing else is left to train on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One question as the policy sees it.

    Example: Prompt(index=7, is_held_out=False, text="3 + 4 =")
    """

    index: int
    """Place in the training stream, or in `eval_prompts()` if it is held out."""
    is_held_out: bool
    text: str


class Task(Protocol):
    """Every method is deterministic; none keeps state that another process would need."""

    @property
    def name(self) -> str: ...

    def example(self, index: int) -> Prompt:
        """The training prompt at `index`, any number from 0."""
        ...

    def eval_prompts(self) -> Sequence[Prompt]:
        """The held-out prompts."""
        ...

    def is_held_out(self, prompt: Prompt) -> bool:
        """Whether a training prompt asks the same as a held-out one, and must be left out."""
        ...

    def solution(self, prompt: Prompt) -> str:
        """A right answer as the policy should write it, for supervised warm-up."""
        ...

    def score(self, prompt: Prompt, completion: str) -> float:
        """Reward of the policy's last answer; higher is better."""
        ...

    def environment(self, prompt: Prompt) -> Env:
        """A fresh environment for one episode of this prompt."""
        ...

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        """The episode as it should go, from the first message to the last answer: the warm start
        learns what the assistant says in it."""
        ...


class TaskStream:
    """The training prompts of one worker: every `num_workers`-th of the task, from `position` on.

    Prompts that are held out are passed over. The next position is all there is to remember.
    """

    def __init__(self, task: Task, worker: int, num_workers: int, position: int = 0) -> None:
        assert 0 <= worker < num_workers and position >= 0
        self._task = task
        self._worker = worker
        self._num_workers = num_workers
        self.position = position
        """How many places of this worker's stream have been passed."""

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        for _ in range(MAX_SKIPS):
            prompt = self._task.example(self.position * self._num_workers + self._worker)
            self.position += 1
            if not self._task.is_held_out(prompt):
                return prompt
        raise ValueError(
            f"task.eval_size: the held-out prompts of {self._task.name} are all the prompts that "
            "there are, nothing is left to train on; hold fewer back"
        )


class PromptCut:
    """Makes a prompt from a task's question: `prompt_pattern` first, then `instruction`."""

    def __init__(self, config: TaskConfig) -> None:
        try:
            self._pattern = re.compile(config.prompt_pattern) if config.prompt_pattern else None
        except re.error as error:
            raise ValueError(
                f"task.prompt_pattern={config.prompt_pattern!r}: not a regular expression: {error}"
            ) from error
        self._instruction = config.instruction

    def __call__(self, question: str) -> str:
        if self._pattern is not None:
            match = self._pattern.search(question)
            if match is None:
                raise ValueError(
                    f"task.prompt_pattern={self._pattern.pattern!r}: matches nothing in the "
                    f"question {question!r}"
                )
            question = match.group(1 if self._pattern.groups else 0)
        return question + self._instruction


def demonstrations(task: Task, num_examples: int) -> list[tuple[Message, ...]]:
    """Conversations of the first training prompts as they should go, for the warm start."""
    stream = TaskStream(task, 0, 1)
    return [task.demonstration(next(stream)) for _ in range(num_examples)]


class SingleTurnTask(ABC):
    """The part of a `Task` that follows from its prompts and its solutions."""

    def __init__(self, config: TaskConfig) -> None:
        self._system_prompt = config.system_prompt

    @abstractmethod
    def solution(self, prompt: Prompt) -> str: ...

    def environment(self, prompt: Prompt) -> Env:
        return SingleTurn(prompt.text, self._system_prompt)

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        system = [] if self._system_prompt is None else [system_message(self._system_prompt)]
        question = Message(role="user", content=prompt.text)
        answer = Message(role="assistant", content=self.solution(prompt))
        return (*system, question, answer)
