"""What is left of an episode when it is over: its tokens and its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer.types import VersionSpan
from rollout_pool.envs.env import Message


@dataclass(kw_only=True, slots=True, eq=False)
class Branch:
    """Tokens in one piece: a prompt, and turns that each extend what was there before.

    Lists of the same length T but for the spans; positions count from the first prompt token.
    """

    tokens: list[int]
    loss_mask: list[int]
    """1 where the model wrote the token."""
    logprobs: list[float]
    """0 where it did not."""
    version_spans: list[VersionSpan]
    prompt_length: int
    finish_reason: str
    """Of its last turn."""


@dataclass(kw_only=True, slots=True, eq=False)
class Episode:
    """A finished episode."""

    branches: list[Branch]
    """One, or several where the history was rewritten; each has a token that the model wrote."""
    messages: tuple[Message, ...]
    """The whole conversation as it was at the end of the last branch."""
    end: str
    """"done", "max_turns", "length" (no room for another turn), "turn_timeout", "episode_timeout",
    "env_error"."""
    num_turns: int
    env_reward: float | None = None
    """Sum of what the environment gave; None if it gave nothing."""
    env_parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """What the environment raised, in words."""

    @property
    def answer(self) -> str:
        """The model's last words."""
        mine = [message for message in self.messages if message.role == "assistant"]
        return mine[-1].content if mine else ""
