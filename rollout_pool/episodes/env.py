"""Environments: one says something, the model answers, it says how that went.

    reset() ──► observation ──► model ──► completion ──► step() ──► observation, reward
                     ▲                                                   │
                     └─────────────────── until there is none ◄──────────┘

A question with one answer is the simplest: see SingleTurn. Text-only on purpose: how a conversation
becomes tokens is the business of `chat`, so an environment never tokenizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
    """A call that the model wrote."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolSpec:
    """A tool as the model sees it; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Message:
    """One message of a conversation, in the roles of OpenAI's chat format."""

    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    name: str | None = None
    """The name of the tool."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Observation:
    """What the model sees next."""

    messages: tuple[Message, ...]
    """Appended to the conversation, after the model's own last answer."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that may be called; given once, with the first observation."""
    replaces_history: bool = False
    """`messages` are the whole conversation from here on (edited, summarised): the episode goes on
    in a new trajectory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """One answer of the model."""

    text: str
    """Decoded without special tokens, tool calls included."""
    content: str
    """The text without its tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    bad_call: str | None = None
    """Why something that looks like a tool call is none; environments may pass it on."""
    finish_reason: str = "stop"
    """"stop", or "length" for an answer that was cut."""
    num_tokens: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """What an answer led to."""

    observation: Observation | None = None
    """What comes next; None ends the episode."""
    reward: float | None = None
    """For this answer; None says nothing of it. An episode's rewards are added up."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, kept as parts of the reward (the last of each name)."""


class Env(Protocol):
    """One episode. Made for it, used once, from one event loop; no method may block the loop."""

    async def reset(self) -> Observation:
        """The first observation."""
        ...

    async def step(self, completion: Completion) -> Step:
        """What the answer leads to. Bounded by task.turn_timeout_s."""
        ...

    async def close(self) -> None:
        """The episode is over, however it ended."""
        ...


class SingleTurn:
    """A question and one answer, which the reward functions score."""

    def __init__(self, text: str, system_prompt: str | None = None) -> None:
        self._text = text
        self._system_prompt = system_prompt

    async def reset(self) -> Observation:
        system = [] if self._system_prompt is None else [system_message(self._system_prompt)]
        return Observation(messages=(*system, Message(role="user", content=self._text)))

    async def step(self, completion: Completion) -> Step:
        return Step()

    async def close(self) -> None:
        return


def system_message(text: str) -> Message:
    return Message(role="system", content=text)
