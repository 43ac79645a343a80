"""Tasks: prompts by index, their reference solutions and their scores.

A task is a pure function of its config and an index, so a prompt is identified by a number: the
position in a stream is one integer, a stale prompt can run again, and another process needs only
the number to score a completion.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from configs.rollout_schema import TaskConfig
from host.user_code import load_callable
from rollout_pool.episodes.conversation import Message, opening
from rollout_pool.episodes.environment import Env, SingleTurn

K = TypeVar("K")
MAX_SKIPS = 100_000
"""After so many held-out prompts in a row nothing is left to train on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One question as the policy sees it.

    Example: Prompt(index=7, is_held_out=False, text="3 + 4 =")
    """

    index: int
    """In the training stream, or in `eval_prompts()` if held out."""
    is_held_out: bool
    text: str
    task: str = ""
    """Name of the mixture's task that it is from; empty without a mixture."""
    pictures: tuple[str, ...] = ()
    """Absolute paths or data URLs of what `text` shows; see `Message`."""
    conversation: tuple[Message, ...] = ()
    """All that the model is shown, where that is more than `task.system_prompt` and `text`, the
    last message of the user."""

    def opening(self, system_prompt: str | None) -> tuple[Message, ...]:
        """The messages that an episode begins with."""
        return self.conversation or opening(self.text, system_prompt, self.pictures)


class Task(Protocol):
    """All methods are deterministic and keep no state that another process would need."""

    @property
    def name(self) -> str: ...

    def example(self, index: int) -> Prompt:
        """The training prompt at `index` >= 0."""
        ...

    def eval_prompts(self) -> Sequence[Prompt]:
        """The held-out prompts."""
        ...

    def is_held_out(self, prompt: Prompt) -> bool:
        """Returns whether a training prompt equals a held-out one and must be skipped."""
        ...

    def solution(self, prompt: Prompt) -> str:
        """A right completion as the policy should write it, for the supervised warm start."""
        ...

    def score(self, prompt: Prompt, completion: str) -> float:
        """Reward of the policy's last message; higher is better."""
        ...

    def environment(self, prompt: Prompt) -> Env:
        """A new environment for one episode of this prompt."""
        ...

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        """All messages of a model episode; the warm start trains on the assistant's."""
        ...


class TaskStream:
    """The training prompts of one worker: every `num_workers`-th of the task, from `position` on.

    Held-out prompts are skipped. `position` is the only state.

    Example: TaskStream(task, worker=1, num_workers=3) gives example(1), example(4), example(7), ...
    """

    def __init__(self, task: Task, worker: int, num_workers: int, position: int = 0) -> None:
        assert 0 <= worker < num_workers and position >= 0
        self._task = task
        self._worker = worker
        self._num_workers = num_workers
        self.position = position
        """Number of prompts of this worker's stream that were passed."""

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
            f"there are, such as {prompt.text!r:.100}; nothing is left to train on; hold fewer "
            "back (of a file, or others: task.eval_path)"
        )


EVAL_SEED_OFFSET = 2**30
"""Added to the seed of held-out prompts, which keeps them disjoint from the training stream."""
EVAL_DRAWS = 200
"""Draws per held-out prompt before a task has too few different ones."""


def draw_held_out(name: str, eval_size: int, draw: Callable[[int], K]) -> dict[K, int]:
    """Draws at 0, 1, ... until `eval_size` are different: each with its index.

    Raises ValueError naming task.eval_size if the task `name` has too few.
    """
    drawn: dict[K, int] = {}
    for index in range(eval_size * EVAL_DRAWS):
        drawn.setdefault(draw(index), index)
        if len(drawn) == eval_size:
            return drawn
    raise ValueError(
        f"task.eval_size={eval_size}: {name} with task.params gave only {len(drawn)} different "
        f"prompts in {eval_size * EVAL_DRAWS} draws; lower task.eval_size to less than "
        f"{len(drawn)}, so that prompts remain to train on"
    )


class PromptCut:
    """Makes a prompt from a question: applies `prompt_pattern`, then adds `instruction`."""

    def __init__(self, config: TaskConfig) -> None:
        try:
            self._pattern = re.compile(config.prompt_pattern) if config.prompt_pattern else None
        except re.error as error:
            raise ValueError(
                f"task.prompt_pattern={config.prompt_pattern!r}: must be a regular expression: "
                f"{error}"
            ) from error
        self._instruction = config.instruction

    def __call__(self, question: str) -> str:
        if self._pattern is not None:
            match = self._pattern.search(question)
            found = match and match[1 if self._pattern.groups else 0]
            if not found:
                raise ValueError(
                    f"task.prompt_pattern={self._pattern.pattern!r}: matches nothing in the "
                    f"question {question!r}"
                )
            question = found
        return question + self._instruction


def demonstrations(task: Task, num_examples: int) -> list[tuple[Prompt, tuple[Message, ...]]]:
    """The first training prompts and their demonstrations, for the warm start."""
    prompts = islice(TaskStream(task, 0, 1), num_examples)
    return [(prompt, task.demonstration(prompt)) for prompt in prompts]


class SingleTurnTask(ABC):
    """The methods of a `Task` that follow from its prompts and solutions."""

    def __init__(self, config: TaskConfig) -> None:
        self._system_prompt = config.system_prompt

    @abstractmethod
    def solution(self, prompt: Prompt) -> str: ...

    def environment(self, prompt: Prompt) -> Env:
        return SingleTurn(
            prompt.text, self._system_prompt, prompt.pictures, messages=prompt.conversation
        )

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        message = Message(role="assistant", content=self.solution(prompt))
        return (*prompt.opening(self._system_prompt), message)


def check_params(config: TaskConfig, task: str, known: Collection[str]) -> None:
    """Raises ValueError for an unknown name in `task.params`."""
    for name in config.params:
        if name not in known:
            raise ValueError(
                f"task.params.{name}: {task} has no such setting; it has {', '.join(known)}"
            )


ABOUT_PROMPT = ("solution", "row")
"""Methods of a task, of a prompt: a user's function with a parameter of that name gets its result.
"""
UserFunction = Callable[[Any, Any, Prompt], Any]
"""Called with its two arguments and the prompt whose solution or row it may want."""


def load_user_function(name: str, setting: str, arguments: str, task: Task) -> UserFunction:
    """The user's function that `name` stands for, with two arguments, described by `arguments`. One
    that has a parameter named `solution` or `row` gets that of the prompt too.

    Raises ValueError naming the setting if it does not exist or takes other arguments.
    """
    function = load_callable(name, setting)
    what = f"{setting}={name!r}"
    signature = signature_of(function)
    wanted = [one for one in ABOUT_PROMPT if one in signature.parameters]
    try:
        signature.bind(None, None, **dict.fromkeys(wanted))
    except TypeError as error:
        raise ValueError(
            f"{what}: is called with {arguments}, and with solution or row if it has a parameter "
            f"of that name, but takes {signature}; change its parameters"
        ) from error
    for one in wanted:
        if not hasattr(task, one):
            raise ValueError(
                f"{what}: wants a {one}, but the task {task.name} has none; give it a "
                f"method of that name, or leave the parameter out"
            )
    if "solution" in wanted:
        _check_solution(task, what)
    return lambda first, second, prompt: function(
        first, second, **{one: getattr(task, one)(prompt) for one in wanted}
    )


def _check_solution(task: Task, what: str) -> None:
    """Raises ValueError if a prompt has no solution: each call would fail, and score 0."""
    held_out = task.eval_prompts()
    prompt = held_out[0] if held_out else task.example(0)
    try:
        task.solution(prompt)
    except Exception as error:
        raise ValueError(
            f"{what}: wants a solution, but the prompt {prompt.text!r:.60} has none ({error}); "
            "name where right answers are (of questions: their column in task.params.answer), or "
            "leave the parameter out"
        ) from error


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a built-in one, of which Python knows none
        return inspect.signature(lambda *arguments: None)
