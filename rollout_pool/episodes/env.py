"""Environments: each gives an observation, the model answers, and it rewards the answer.

    reset() ──► observation ──► model ──► completion ──► step() ──► observation, reward
                     ▲                                                   │
                     └─────────────────── until there is none ◄──────────┘

The simplest is a question with one answer: see SingleTurn. Environments only handle text; `chat`
tokenizes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
    """A tool call of the model."""

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
class Tool:
    """A tool's description for the model, and its function."""

    spec: ToolSpec
    run: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Maps the arguments to the text of the result. The model sees what it raises."""


class ToolError(Exception):
    """The model sees only this message."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Message:
    """One message of a conversation, in the roles of OpenAI's chat format."""

    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""
    name: str | None = None
    """Of a tool's message: the tool's name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Observation:
    """What the model sees next."""

    messages: tuple[Message, ...]
    """Appended to the conversation, after the model's last answer."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that may be called; given once, with the first observation."""
    replaces_history: bool = False
    """`messages` replace the whole conversation (edited, summarised): the episode continues in a
    new trajectory."""

    @classmethod
    def user(cls, text: str, system_prompt: str | None = None) -> Observation:
        """What a user says; with a `system_prompt` it opens a conversation."""
        return cls(messages=opening(text, system_prompt))


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """One answer of the model."""

    text: str
    """Decoded without special tokens, tool calls included."""
    content: str
    """The text without its tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    bad_call: str | None = None
    """Why something like a tool call is invalid; environments may show it to the model."""
    finish_reason: str = "stop"
    """"stop", or "length" for an answer that was cut."""
    num_tokens: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """What an answer led to."""

    observation: Observation | None = None
    """What comes next; None ends the episode."""
    reward: float | None = None
    """Of this answer, or None. An episode's rewards are summed."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, recorded as parts of the reward (the last value of each name)."""


class Env(Protocol):
    """The environment of one episode, used in one event loop; no method may block it. A class
    derived from this one needs no `close`."""

    async def reset(self) -> Observation:
        """The first observation."""
        ...

    async def step(self, completion: Completion) -> Step:
        """Reacts to an answer, within task.turn_timeout_s."""
        ...

    async def close(self) -> None:
        """Called once when the episode is over, however it ended."""
        return


class Chat(Protocol):
    """Converts messages to tokens and back while an episode runs: see ChatFormat."""

    def first(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]: ...
    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]: ...
    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion: ...


class SingleTurn(Env):
    """A question and one answer, which the reward functions score."""

    def __init__(self, text: str, system_prompt: str | None = None) -> None:
        self._text = text
        self._system_prompt = system_prompt

    async def reset(self) -> Observation:
        return Observation.user(self._text, self._system_prompt)

    async def step(self, completion: Completion) -> Step:
        return Step()


def opening(text: str, system_prompt: str | None) -> tuple[Message, ...]:
    """A conversation that begins with a user's `text`."""
    question = Message(role="user", content=text)
    if system_prompt is None:
        return (question,)
    return Message(role="system", content=system_prompt), question
