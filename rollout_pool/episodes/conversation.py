"""A conversation: messages, tools, completions of the model, and the protocol that tokenizes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from host.pictures import read_picture


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
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
    """With `host.pictures.MARK` where each of `pictures` is shown."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call whose result a tool's message is."""
    name: str | None = None
    """Name of the tool in a tool's message."""
    pictures: tuple[str, ...] = ()
    """Absolute paths or data URLs of PNG or JPEG files, in the order of their marks."""
    files: tuple[bytes, ...] = field(default=(), repr=False)
    """Files that were at `pictures` when the message arrived in an episode; see `with_files`."""


Conversations = Mapping[int, tuple[Message, ...]]
"""The messages of a group's episodes, by their places in it."""


def with_files(messages: Sequence[Message]) -> list[Message]:
    """With the files of their pictures as they are now: an environment may replace or remove them
    while the episode runs. Raises UnreadablePicture."""
    return [
        replace(one, files=tuple(map(read_picture, one.pictures))) if one.pictures else one
        for one in messages
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """One parsed completion of the model."""

    text: str
    """Decoded without special tokens, tool calls included."""
    content: str
    """The text without its tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    bad_call: str | None = None
    """Why something like a tool call is invalid; environments may show it to the model."""
    finish_reason: str = "stop"
    """"stop", or "length" for one that was cut."""
    num_tokens: int = 0


class Chat(Protocol):
    """Converts messages to tokens and back while an episode runs.

    Implementations: ChatFormat (chat.py) by a template, RendererFormat (renderer.py) by a library.
    """

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]: ...
    def next_prompt(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]: ...
    def opens_thoughts(self, prompt: Sequence[int], grammar: str) -> bool: ...
    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion: ...


class TrainableChat(Chat, Protocol):
    """A Chat that also writes what a model should learn to say: see renderer.chat_format."""

    def demonstration(self, message: Message, tools: Sequence[ToolSpec] = ()) -> list[int]: ...


def opening(
    text: str, system_prompt: str | None, pictures: tuple[str, ...] = ()
) -> tuple[Message, ...]:
    """A conversation that begins with a user's `text`, which may show `pictures`."""
    question = Message(role="user", content=text, pictures=pictures)
    if system_prompt is None:
        return (question,)
    return Message(role="system", content=system_prompt), question
