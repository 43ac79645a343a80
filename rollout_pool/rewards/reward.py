"""The interface of a kind of reward, and the kinds that a task has.

    before the start           check, probe    the controller refuses what cannot score
    in a scoring process       load            code of a user, programs: they may hang or crash
    in the worker's event loop score           the environment's sum, and services

`class_of` finds the class of a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from configs.choices import RewardKind, TaskKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.rewards.types import PartRequest, PartScore
from rollout_pool.tasks.task import Prompt, Task

PartScorer = Callable[[PartRequest], float | list[float | None] | None]
"""Scores one part in a scoring process; None if the completion cannot be judged. A list of these is
for the episodes of a group."""


class Reward:
    """One part of a task's reward. The class of a kind is `KIND` in the module of its name here.

    Example, the whole of rewards/brevity.py:

        class Brevity(Reward):
            async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
                return PartScore(value=1 / (1 + len(episode.answer)))

        KIND = Brevity
    """

    reads_messages: ClassVar[bool] = False
    """True if its scoring process needs the whole conversation, not only the last message."""

    def __init__(self, part: str, config: RewardConfig, task: Task | None) -> None:
        """`part`: its name in task.rewards; `task`: None in `probe`. Raises ValueError naming the
        setting at fault."""
        self.part = part
        self.config = config
        self.task = task

    @classmethod
    def is_in_process(cls, config: RewardConfig) -> bool:
        """Returns whether `load` scores, in a scoring process, and not `score` in the worker."""
        return False

    @classmethod
    def check(cls, part: str, config: TaskConfig, task: Task) -> None:
        """Raises ValueError naming the setting if the part cannot score `task`. Asks no service."""

    @classmethod
    async def probe(cls, part: str, config: RewardConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError naming the setting if the service at `config.url` cannot score."""

    def load(self, timeout_s: float) -> PartScorer:
        """A process whose call takes `timeout_s` is killed. Raises ValueError with the setting."""
        raise NotImplementedError

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """`key` identifies the call, for a service. Raises RemoteFailure."""
        raise NotImplementedError

    async def close(self) -> None:
        return


def class_of(config: RewardConfig) -> type[Reward]:
    """`KIND` of the module beside this one that is named as the kind."""
    kind: type[Reward] = import_module(f"rollout_pool.rewards.{config.kind.name}").KIND
    return kind


def parts_of(config: TaskConfig) -> dict[str, RewardConfig]:
    """The parts of a task's reward, by name.

    An episode of a task whose settings name none is scored by the environment's reward or, where
    that gives none, by the task's own score.
    """
    if config.rewards:
        return config.rewards
    env = {RewardKind.env.name: RewardConfig(kind=RewardKind.env)}
    if config.kind is TaskKind.verifiers:  # its environments always give one
        return env
    return env | {RewardKind.task.name: RewardConfig(kind=RewardKind.task)}


def needs_processes(config: TaskConfig) -> bool:
    """Returns whether any part of any task is scored in a scoring process."""
    rewards = [reward for one in config.by_name.values() for reward in parts_of(one).values()]
    return any(class_of(reward).is_in_process(reward) for reward in rewards)
