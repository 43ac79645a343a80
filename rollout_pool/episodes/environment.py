"""Environments: each gives an observation, the model completes it, and it rewards the completion.

    reset() ──► observation ──► model ──► completion ──► step() ──► observation, reward
                     ▲                                                   │
                     └─────────────────── until there is none ◄──────────┘

The simplest is a question with one completion: see SingleTurn. Environments only handle text; a
`Chat` (conversation.py) tokenizes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollout_pool.episodes.conversation import Completion, Message, ToolSpec, opening


@dataclass(kw_only=True, slots=True, frozen=True)
class Observation:
    """The messages that the model sees next."""

    messages: tuple[Message, ...]
    """Appended to the conversation, after the model's last completion."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that may be called; given once, with the first observation."""
    replaces_history: bool = False
    """`messages` replace the whole conversation (edited, summarised): the episode continues in a
    new trajectory."""
    role: str | None = None
    """The role that answers: each has a conversation and trajectories of its own, which `messages`
    begin or extend. None is the one that answered last, at first the only one."""

    @classmethod
    def user(
        cls,
        text: str,
        system_prompt: str | None = None,
        pictures: tuple[str, ...] = (),
        *,
        role: str | None = None,
    ) -> Observation:
        """A user's message; with a `system_prompt` it opens a conversation. `pictures`: see
        `Message`."""
        return cls(messages=opening(text, system_prompt, pictures), role=role)


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """An environment's reaction to a completion."""

    observation: Observation | None = None
    """The next observation; None ends the episode."""
    reward: float | None = None
    """Reward of this completion, or None. An episode's rewards are summed."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, recorded as parts of the reward (the last value of each name)."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """In place of `reward`, that of each role, summed over the episode; None for a role that cannot
    be judged, whose trajectories are left out of the group."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """In place of `rewards`, the finished advantage of each role (the last one): no baseline is
    subtracted. `reward` is then for the log alone."""


class Env(Protocol):
    """The environment of one episode, used in one event loop; no method may block it. A class
    derived from this one needs no `close`."""

    async def reset(self) -> Observation:
        """The first observation."""
        ...

    async def step(self, completion: Completion) -> Step:
        """Reacts to a completion, within task.turn_timeout_s."""
        ...

    async def close(self) -> None:
        """Called once when the episode is over, however it ended."""
        return


class SingleTurn(Env):
    """A question and one completion, which the reward functions score."""

    def __init__(
        self,
        text: str,
        system_prompt: str | None = None,
        pictures: tuple[str, ...] = (),
        *,
        messages: tuple[Message, ...] = (),
    ) -> None:
        """`messages`: the whole opening, if it is not just the others."""
        self._messages = messages or opening(text, system_prompt, pictures)

    async def reset(self) -> Observation:
        return Observation(messages=self._messages)

    async def step(self, completion: Completion) -> Step:
        return Step()
