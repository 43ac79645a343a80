"""OpenAI's JSON of messages and tools, to and from ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.fields import Fields, check_whole
from rollout_pool.episodes.env import Message, ToolCall, ToolSpec

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_messages(fields: Fields, key: str = "messages") -> tuple[Message, ...]:
    """The conversation so far. Raises ApiError naming what is wrong with which message."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for one in fields.objects(key):
        message = _read_message(one, names)
        names.update({call.call_id: call.name for call in message.tool_calls})
        messages.append(message)
    if not messages:
        raise refuse(fields.name(key), "must be a list of at least one message")
    if messages[-1].role == "assistant":
        raise refuse(
            f"{fields.name(key)}[{len(messages) - 1}].role",
            "the last message is the model's own; what should it answer to?",
        )
    return tuple(messages)


def read_tools(fields: Fields, key: str = "tools") -> tuple[ToolSpec, ...]:
    """The tools that the model is told of."""
    return tuple(_read_tool(one) for one in fields.objects(key))


def message_json(message: Message) -> dict[str, Any]:
    """The model's answer as the API gives it."""
    return {
        "role": message.role,
        "content": message.content if message.content or not message.tool_calls else None,
        "refusal": None,
        **({"tool_calls": calls_json(message.tool_calls)} if message.tool_calls else {}),
    }


def calls_json(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]


def _read_message(fields: Fields, names: dict[str, str]) -> Message:
    """`names`: of the tools called so far, by the calls' ids."""
    role = _ROLES.get(fields.text("role"))
    if role is None:
        raise refuse(fields.name("role"), f"must be one of {', '.join(_ROLES)}")
    for key in ("function_call", "audio"):
        fields.must_be(key, [], "messages hold text and tool calls")
    calls = tuple(_read_call(one) for one in fields.objects("tool_calls"))
    if calls and role != "assistant":
        raise refuse(fields.name("tool_calls"), f"a message of {role} has none")
    content = _read_content(fields)
    if content is None and role != "assistant":
        raise refuse(fields.name("content"), "is missing: it must be a string")
    call_id = fields.text("tool_call_id") if role == "tool" else None
    return Message(
        role=role,
        content=content or "",
        tool_calls=calls,
        tool_call_id=call_id,
        name=(fields.text("name", "") or names.get(call_id)) if call_id is not None else None,
    )


def _read_content(fields: Fields) -> str | None:
    if not fields.has("content") or isinstance(fields.raw("content"), str):
        return fields.text("content", "") if fields.has("content") else None
    parts: list[str] = []
    for part in fields.objects("content"):
        kind = part.text("type", "text")
        if kind != "text":
            raise refuse(part.name("type"), f"{kind!r} is not supported: the model reads text")
        parts.append(part.text("text"))
    return "".join(parts)


def _read_call(fields: Fields) -> ToolCall:
    fields.must_be("type", ["function"], "a tool is a function here")
    function = fields.inner("function")
    if function is None:
        raise refuse(fields.name("function"), "is missing")
    text = function.text("arguments", "") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(function.name("arguments"), f"is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise refuse(function.name("arguments"), "must be the JSON of an object")
    check_whole(function.name("arguments"), arguments)
    return ToolCall(call_id=fields.text("id"), name=function.text("name"), arguments=arguments)


def _read_tool(fields: Fields) -> ToolSpec:
    fields.must_be("type", ["function"], "a tool is a function here")
    function = fields.inner("function")
    if function is None:
        raise refuse(fields.name("function"), "is missing")
    parameters = function.raw("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise refuse(function.name("parameters"), "must be a JSON schema of an object")
    return ToolSpec(
        name=function.text("name"),
        description=function.text("description", ""),
        parameters=parameters,
    )
