"""Reads a question that is a conversation, in OpenAI's chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from host.pictures import MARK, source_of
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.episodes.template import call_id
from rollout_pool.tasks.data.files import text_of

FIELDS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls"),
    "tool": ("role", "content", "tool_call_id", "name"),
}
"""By role, the fields that a message may have; null stands for none, as tables fill it in."""


def read_messages(given: list[Any], what: str, folder: Path) -> tuple[Message, ...]:
    """The messages of a conversation that goes on with the model's. `what`: its place, which a
    ValueError names; `folder`: where its pictures are."""
    return _opening(_messages(given, what, folder), what)


def read_episode(
    given: list[Any], what: str, folder: Path
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The same of a whole conversation: its messages before the assistant's first, and the rest,
    which is a model's part in it."""
    messages = _messages(given, what, folder)
    if not messages or messages[-1].role != "assistant" or not messages[-1].content:
        raise ValueError(
            f"{what}: the question and the answer are this one column, so its conversation must "
            "end with a text of the assistant, the answer; name the columns of both in task.params"
        )
    first = [message.role for message in messages].index("assistant")
    return _opening(messages[:first], what), tuple(messages[first:])


def _messages(given: list[Any], what: str, folder: Path) -> list[Message]:
    messages: list[Message] = []
    called: dict[str, str] = {}
    for number, one in enumerate(given, start=1):
        message = _message(one, f"{what}, message {number}", folder, called)
        called |= {call.call_id: call.name for call in message.tool_calls}
        messages.append(message)
    return messages


def _opening(messages: list[Message], what: str) -> tuple[Message, ...]:
    """Raises ValueError unless the model may answer them."""
    roles = [message.role for message in messages]
    if "user" not in roles or roles[-1] not in ("user", "tool"):
        raise ValueError(
            f"{what}: the roles {', '.join(roles) or 'none'} leave the model nothing to answer; "
            "a conversation has a message of the user, and ends with one or with that of a tool"
        )
    return tuple(messages)


def _message(given: Any, place: str, folder: Path, called: dict[str, str]) -> Message:
    """`called`: names of the tools called before, by the ids of the calls."""
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in FIELDS:
        raise ValueError(
            f'{place}: {given!r:.100} must be an object with a "role", which is one of '
            f"{', '.join(FIELDS)}, and a content"
        )
    fields = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in fields if name not in FIELDS[role]]:
        raise ValueError(
            f'{place}: "{unknown[0]}" is no field of a message of the {role}, which has '
            f"{', '.join(FIELDS[role])}; leave it out"
        )
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f'{place}: "tool_calls" must be a list, not {calls!r:.100}')
    content, pictures = fields.get("content", ""), tuple[str, ...]()
    if isinstance(content, list):
        content, pictures = _shown(content, place, folder)
    may_be_empty = role == "tool" or bool(calls)
    for name in ("tool_call_id", "name"):
        if name in fields:
            text_of(fields, name, place)
    answered = fields.get("tool_call_id")
    return Message(
        role=role,
        content=text_of({"content": content}, "content", place, may_be_empty=may_be_empty),
        tool_calls=tuple(_call(one, f"{place}, call {n}", n) for n, one in enumerate(calls, 1)),
        tool_call_id=answered,
        name=fields.get("name", called.get(answered or "")),
        pictures=pictures,
    )


def _call(given: Any, place: str, number: int) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise ValueError(
            f'{place}: {given!r:.100} must be {{"id": ..., "type": "function", "function": '
            '{"name": ..., "arguments": ...}}'
        )
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError as error:
        raise ValueError(f'{place}: "arguments" must be JSON: {error}') from error
    if not isinstance(arguments, dict):
        raise ValueError(f'{place}: "arguments" must be a JSON object, not {arguments!r:.100}')
    own_id = text_of(given, "id", place) if given.get("id") is not None else call_id(number)
    return ToolCall(call_id=own_id, name=text_of(function, "name", place), arguments=arguments)


def _shown(parts: list[Any], place: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """The text of a message's parts with a mark for each picture, and the pictures. Raises
    ValueError for one that is unusable."""
    text, pictures = "", list[str]()
    for part in parts:
        given = part if isinstance(part, dict) else {}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("type") == "text" and isinstance(given.get("text"), str):
            text += given["text"].replace(MARK, " ")
        else:
            pictures.append(source_of(given, folder, place))
            text += MARK
    return text, tuple(pictures)
