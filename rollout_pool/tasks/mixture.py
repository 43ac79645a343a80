"""Several tasks as one: those of task.kind=mixture, each of which gives prompts by its weight, and
further held-out sets, which give none."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import TypeVar

from configs.rollout_schema import TaskConfig, TaskSource
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.environment import Env
from rollout_pool.tasks.agent import AgentReward, AgentTask, SessionHandle
from rollout_pool.tasks.task import MAX_SKIPS, Prompt, Task

_FAR = 1_000_003
"""A prime, so that in a task with few prompts this leads to another one."""
_REMEMBERED = 4096

T = TypeVar("T")


class Mixture:
    """The prompts of several tasks. Each is run and scored as its own task says. Without a mixture
    its only task has the name "", and there are further held-out sets.

    In each round of prompts every task has exactly its weight, in an order that the seed and the
    round decide, so that a prompt still is a number. With sums of weight 3 and spell of weight 1:

        prompt           0     1     2     3  |  4     5     6     7  | ...
        task           sums  sums  spell sums | spell sums  sums  sums
        its prompt       0     1     0     2  |  1     3     4     5

    A held-out prompt is not skipped, which would cost its task a part of its weight: another one of
    the same task, far behind in its stream, takes its place.
    """

    def __init__(self, config: TaskConfig, build_task: Callable[[TaskConfig], Task]) -> None:
        """`build_task` builds each of the tasks. Raises ValueError naming the setting, as
        task.tasks.sums.path, for a bad one."""
        self._seed = config.seed
        self._section_of = config.section_of
        self.members: dict[str, Task] = {}
        for name, one in config.by_name.items():
            with _named_in_errors(name, config):
                self.members[name] = member = build_task(one)
                if isinstance(member, AgentTask) and not isinstance(self, AgentTask):
                    raise ValueError(
                        f"task.kind={one.kind.name}: its agent leads the episodes, and those of "
                        "several tasks or held-out sets are led by the run; leave it out"
                    )
        self._weights = {name: task.weight for name, task in config.tasks.items()} or {"": 1}
        self.name = "mixture" if config.tasks else self.members[""].name
        self._round = [name for name, weight in self._weights.items() for _ in range(weight)]
        self._held_out = [
            (name, prompt)
            for name, member in self.members.items()
            for prompt in member.eval_prompts()
        ]
        # Two tasks may draw from the same questions. Their own each task knows itself: it may tell
        # prompts of the same text apart.
        self._held_out_by_others = {
            name: {_shown(prompt) for other, prompt in self._held_out if other != name}
            for name in self.members
        }
        self._find = lru_cache(maxsize=_REMEMBERED)(self._find_anew)

    def of(self, prompt: Prompt) -> tuple[str, Prompt]:
        """The name of a prompt's task, and the prompt as that task knows it."""
        if prompt.is_held_out:
            return self._held_out[prompt.index]
        name, index = self._find(prompt.index)
        return name, replace(prompt, index=index, task="")

    def example(self, index: int) -> Prompt:
        name, place = self._find(index)
        return replace(self.members[name].example(place), index=index, task=name)

    def eval_prompts(self) -> Sequence[Prompt]:
        return [
            replace(prompt, index=i, task=name) for i, (name, prompt) in enumerate(self._held_out)
        ]

    def is_held_out(self, prompt: Prompt) -> bool:
        return False  # `example` gives none

    def solution(self, prompt: Prompt) -> str:
        name, own = self.of(prompt)
        return self.members[name].solution(own)

    def score(self, prompt: Prompt, completion: str) -> float:
        name, own = self.of(prompt)
        return self.members[name].score(own, completion)

    def environment(self, prompt: Prompt) -> Env:
        name, own = self.of(prompt)
        return self.members[name].environment(own)

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        name, own = self.of(prompt)
        return self.members[name].demonstration(own)

    def turn(self, index: int) -> tuple[str, int]:
        """The task whose turn it is at `index`, and the number of turns that it had before."""
        number, place = divmod(index, len(self._round))
        order = list(self._round)
        random.Random(f"{self._seed}/{number}").shuffle(order)
        name = order[place]
        return name, number * self._weights[name] + order[:place].count(name)

    def _find_anew(self, index: int) -> tuple[str, int]:
        name, first = self.turn(index)
        member, others = self.members[name], self._held_out_by_others[name]
        for own in range(first, first + MAX_SKIPS * _FAR, _FAR):
            prompt = member.example(own)
            if _shown(prompt) not in others and not member.is_held_out(prompt):
                return name, own
        raise ValueError(
            f"{self._section_of(name)}.eval_size: the held-out prompts of all tasks are all the "
            f"prompts that it has, such as {prompt.text!r:.100}; nothing is left to train on; hold "
            "fewer back (of a file, or others: eval_path)"
        )


def _shown(prompt: Prompt) -> tuple[object, ...]:
    # As text: calls of tools have no hash.
    return prompt.text, prompt.pictures, repr(prompt.conversation)


class AgentMixture(Mixture):
    """A mixture of tasks that all bring their own agent."""

    async def run_agent(self, session: SessionHandle, prompt: Prompt) -> AgentReward:
        name, own = self.of(prompt)
        return await _agent_task(self.members[name]).run_agent(session, own)

    async def start(self) -> None:
        await asyncio.gather(*(_agent_task(one).start() for one in self.members.values()))

    async def close(self) -> None:
        await asyncio.gather(*(_agent_task(one).close() for one in self.members.values()))


def _agent_task(member: Task) -> AgentTask:
    assert isinstance(member, AgentTask)
    return member


# Any task as a mixture, of itself alone if need be ------------------------------------------------


def members_of(task: Task) -> dict[str, Task]:
    """The tasks of a mixture by name. Any other task is its only member, under the name "": the
    names are those of `TaskConfig.by_name`."""
    return task.members if isinstance(task, Mixture) else {"": task}


def member_of(task: Task, prompt: Prompt) -> tuple[str, Prompt]:
    """The name of the member that `prompt` is from, and the prompt as that member knows it."""
    return task.of(prompt) if isinstance(task, Mixture) else ("", prompt)


def for_each_member(
    config: TaskConfig, task: Task, make: Callable[[str, TaskConfig, Task], T]
) -> dict[str, T]:
    """Calls `make` with the name, the settings and the task of each member. A ValueError that names
    task.path then names task.tasks.<name>.path.

    Example: for_each_member(config, mixture, lambda name, config, task: config.kind.name) is
    {"sums": "reasoning_gym", "spell": "questions"}; of a task alone {"": "reasoning_gym"}.
    """
    made = {}
    configs = config.by_name
    for name, member in members_of(task).items():
        with _named_in_errors(name, config):
            made[name] = make(name, configs[name], member)
    return made


@contextlib.contextmanager
def _named_in_errors(name: str, config: TaskConfig) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ValueError(_with_name(str(error), name, config)) from error


def _with_name(text: str, name: str, config: TaskConfig) -> str:
    own = [setting.name for setting in fields(TaskSource) if setting.name != "rewards"]
    rewards = {**config.tasks, **config.eval_sets}[name].rewards
    own += [rf"rewards\.{re.escape(part)}" for part in rewards]
    return re.sub(rf"\btask\.({'|'.join(own)})\b", rf"{config.section_of(name)}.\1", text)
