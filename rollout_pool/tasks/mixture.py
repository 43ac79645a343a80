"""Several tasks as one, task.kind=mixture: each has its share of the prompts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from configs.rollout_schema import MixedTask, TaskConfig, TaskSource
from rollout_pool.episodes.env import Env, Message
from rollout_pool.tasks.agent import AgentTask, Answered, SessionHandle
from rollout_pool.tasks.task import MAX_SKIPS, Prompt, Task

_FAR = 1_000_003
"""A prime, so that in a task with few prompts this leads to another one."""
_REMEMBERED = 4096


@dataclass(kw_only=True, slots=True, frozen=True)
class MixtureMember:
    """One task of a mixture."""

    name: str
    """Its key in task.tasks."""
    config: TaskConfig
    """Its settings with those of the run."""
    task: Task


class Mixture:
    """The prompts of several tasks. Each is run and scored as its own task says.

    In each round of prompts every task has exactly its weight, in an order that the seed and the
    round decide, so that a prompt still is a number. With sums of weight 3 and spell of weight 1:

        prompt           0     1     2     3  |  4     5     6     7  | ...
        task           sums  sums  spell sums | spell sums  sums  sums
        its prompt       0     1     0     2  |  1     3     4     5

    A held-out prompt is not skipped, which would cost its task a part of its share: another one of
    the same task, far behind in its stream, takes its place.
    """

    name = "mixture"

    def __init__(self, config: TaskConfig, build_task: Callable[[TaskConfig], Task]) -> None:
        """`build_task` builds each of the tasks. Raises ValueError naming the setting, as
        task.tasks.sums.path, for a bad one."""
        self._config = config
        self.members: dict[str, MixtureMember] = {}
        for name, one in config.by_name.items():
            with self.named_in_errors(name):
                task = build_task(one)
            self.members[name] = MixtureMember(name=name, config=one, task=task)
        self._weights = {name: task.weight for name, task in config.tasks.items()}
        self._round = [name for name, weight in self._weights.items() for _ in range(weight)]
        self._held_out = [
            (member, prompt)
            for member in self.members.values()
            for prompt in member.task.eval_prompts()
        ]
        # Two tasks may draw from the same questions. Their own each task knows itself: it may tell
        # prompts of the same text apart.
        self._held_out_by_others = {
            name: {prompt.text for member, prompt in self._held_out if member.name != name}
            for name in self.members
        }
        self._find = lru_cache(maxsize=_REMEMBERED)(self._find_anew)

    @property
    def round_size(self) -> int:
        return len(self._round)

    def of(self, prompt: Prompt) -> tuple[MixtureMember, Prompt]:
        """The task of a prompt of the mixture, and the prompt as that task knows it."""
        if prompt.is_held_out:
            return self._held_out[prompt.index]
        member, index = self._find(prompt.index)
        return member, replace(prompt, index=index)

    def example(self, index: int) -> Prompt:
        member, place = self._find(index)
        return replace(member.task.example(place), index=index)

    def eval_prompts(self) -> Sequence[Prompt]:
        return [replace(prompt, index=i) for i, (_, prompt) in enumerate(self._held_out)]

    def is_held_out(self, prompt: Prompt) -> bool:
        return False  # `example` gives none

    def solution(self, prompt: Prompt) -> str:
        member, own = self.of(prompt)
        return member.task.solution(own)

    def score(self, prompt: Prompt, completion: str) -> float:
        member, own = self.of(prompt)
        return member.task.score(own, completion)

    def environment(self, prompt: Prompt) -> Env:
        member, own = self.of(prompt)
        return member.task.environment(own)

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        member, own = self.of(prompt)
        return member.task.demonstration(own)

    @contextlib.contextmanager
    def named_in_errors(self, name: str) -> Iterator[None]:
        """An error of this member that names task.path then names task.tasks.<name>.path."""
        try:
            yield
        except ValueError as error:
            words = _with_name(str(error), name, self._config.tasks[name])
            raise ValueError(words) from error

    def _find_anew(self, index: int) -> tuple[MixtureMember, int]:
        number, place = divmod(index, len(self._round))
        order = list(self._round)
        random.Random(f"{self._config.seed}/{number}").shuffle(order)
        name = order[place]
        member, first = self.members[name], number * self._weights[name] + order[:place].count(name)
        others = self._held_out_by_others[name]
        for own in range(first, first + MAX_SKIPS * _FAR, _FAR):
            prompt = member.task.example(own)
            if prompt.text not in others and not member.task.is_held_out(prompt):
                return member, own
        raise ValueError(
            f"task.tasks.{name}.eval_size: the held-out prompts of all tasks are all the prompts "
            f"that it has, such as {prompt.text!r:.100}; nothing is left to train on; hold fewer "
            "back (of a file, or others: eval_path)"
        )


class AgentMixture(Mixture):
    """A mixture of tasks that all bring their own agent."""

    async def run_agent(self, session: SessionHandle, prompt: Prompt) -> Answered:
        member, own = self.of(prompt)
        return await _agent_task(member).run_agent(session, own)

    async def start(self) -> None:
        await asyncio.gather(*(_agent_task(one).start() for one in self.members.values()))

    async def close(self) -> None:
        await asyncio.gather(*(_agent_task(one).close() for one in self.members.values()))


def _agent_task(member: MixtureMember) -> AgentTask:
    assert isinstance(member.task, AgentTask)
    return member.task


def task_name(task: Task, prompt: Prompt) -> str:
    """Name of the task that `prompt` is from: of a member of the mixture, or of `task`."""
    return task.of(prompt)[0].name if isinstance(task, Mixture) else task.name


def _with_name(text: str, name: str, task: MixedTask) -> str:
    own = [setting.name for setting in fields(TaskSource) if setting.name != "rewards"]
    own += [rf"rewards\.{re.escape(part)}" for part in task.rewards]
    return re.sub(rf"\btask\.({'|'.join(own)})\b", rf"task.tasks.{name}.\1", text)
