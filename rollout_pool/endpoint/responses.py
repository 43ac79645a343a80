"""OpenAI's Responses API: its requests, and items in its responses. `ResponsesTurn` serves it.

instructions, items, tools  ──►  Messages, ToolSpecs, and the rest as a ChatRequest
thoughts, content, calls    ──►  items, whole or as events of a stream
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.schema import (
    Bookkeeping,
    ChatRequest,
    Function,
    FunctionTool,
    JsonSchema,
    Positive,
    ResponseFormat,
    SharedRequest,
    Text,
    ToolChoice,
    read_arguments,
)
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.episodes.thoughts import join_thoughts


class ItemPart(Struct, kw_only=True):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class _Item(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    id: Bookkeeping = None
    status: Bookkeeping = None


class MessageItem(_Item, kw_only=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]


class ReasoningItem(_Item, kw_only=True, tag="reasoning"):
    role: ClassVar = "assistant"
    summary: list[ItemPart] = []
    content: list[ItemPart] | None = None
    encrypted_content: Bookkeeping = None


class CallItem(_Item, kw_only=True, tag="function_call"):
    role: ClassVar = "assistant"
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class ResultItem(_Item, kw_only=True, tag="function_call_output"):
    role: ClassVar = "tool"
    call_id: str
    output: str | list[ItemPart]


Item = MessageItem | ReasoningItem | CallItem | ResultItem


class FlatFunction(Function, kw_only=True, tag_field="type", tag="function"):
    """One whose fields stand beside its type."""


class Namespace(Struct, kw_only=True, tag_field="type", tag="namespace"):
    """Functions under one name, such as those of an MCP server; the model reads NAMESPACE.NAME."""

    name: Text
    description: str = ""
    tools: tuple[FlatFunction, ...]


class Reasoning(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    summary: Bookkeeping = None
    """Thoughts are sent as they are."""


class TextFormat(Struct, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] = {}


class TextConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: TextFormat = TextFormat()


class ResponsesRequest(SharedRequest, kw_only=True):
    CHOICES: ClassVar = {
        "input.type": "message, reasoning, function_call or function_call_output",
        "input.role": "user, assistant, system or developer",
        "input.content.type": "input_text and output_text: the model reads nothing else",
        "input.output.type": "input_text: the model reads nothing else",
        "tools.type": "function or a namespace of functions: no tool runs at the server, and all "
        "have arguments in JSON",
        "tools.tools.type": "function",
        "tool_choice.type": "function, or the text auto, none or required",
        "text.format.type": "text, json_object or json_schema",
        "truncation": "disabled: no part of a conversation is left out unseen",
        "include": "reasoning.encrypted_content",
    }

    input: Text | Annotated[list[Item], Meta(min_length=1)]
    instructions: str = ""
    previous_response_id: Text | None = None
    tools: tuple[FlatFunction | Namespace, ...] = ()
    tool_choice: str | FlatFunction = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Positive | None = None
    text: TextConfig = TextConfig()
    truncation: Literal["disabled"] = "disabled"
    include: tuple[Literal["reasoning.encrypted_content"], ...] = ()
    store: bool = True
    reasoning: Reasoning = Reasoning()
    client_metadata: Bookkeeping = None

    @property
    def functions(self) -> Iterator[Function]:
        for tool in self.tools:
            if isinstance(tool, FlatFunction):
                yield tool
                continue
            for one in tool.tools:
                about = f"{tool.description}\n{one.description or ''}".strip()
                name = f"{tool.name}.{one.name}"
                yield Function(name=name, description=about, parameters=one.parameters)

    def as_chat(self) -> ChatRequest:
        """The rest of it, without messages."""
        form, choice = self.text.format, self.tool_choice
        asked = ResponseFormat(type=form.type, json_schema=JsonSchema(schema=form.schema))
        return ChatRequest(
            **{name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p")},
            messages=[],
            max_tokens=self.max_output_tokens,
            response_format=None if form.type == "text" else asked,
            tools=[FunctionTool(function=one) for one in self.functions],
            tool_choice=choice if isinstance(choice, str) else ToolChoice(function=choice),
            parallel_tool_calls=self.parallel_tool_calls or choice in ("auto", "none"),
        )


def read_items(items: Sequence[Item], before: Sequence[Message] = ()) -> Iterator[Message]:
    """The messages behind those `before`. The items of an answer are one message."""
    names = {call.call_id: call.name for message in before for call in message.tool_calls}
    names |= {item.call_id: _name_of(item) for item in items if isinstance(item, CallItem)}
    for role, group in itertools.groupby(enumerate(items), lambda one: one[1].role):
        if role == "assistant":
            yield _own_message(group)
            continue
        for _, item in group:
            if isinstance(item, ResultItem):
                call_id, text = item.call_id, _text_of(item.output)
                name = names.get(call_id)
                yield Message(role="tool", content=text, tool_call_id=call_id, name=name)
            elif isinstance(item, MessageItem):
                named = "system" if role == "developer" else role
                yield Message(role=named, content=_text_of(item.content))


def _own_message(items: Iterable[tuple[int, Item]]) -> Message:
    thoughts, said, calls = "", "", list[ToolCall]()
    for place, item in items:
        if isinstance(item, MessageItem):
            said += _text_of(item.content)
        elif isinstance(item, CallItem):
            arguments = read_arguments(item.arguments or "{}", f"input[{place}].arguments")
            name = _name_of(item)
            calls.append(ToolCall(call_id=item.call_id, name=name, arguments=arguments))
        elif isinstance(item, ReasoningItem):
            if said or calls:
                raise refuse(f"input[{place}].type", "thoughts come before the rest of an answer")
            thoughts += _text_of(item.content or item.summary)
    return Message(role="assistant", content=join_thoughts(thoughts, said), tool_calls=tuple(calls))


def _name_of(item: CallItem) -> str:
    return item.name if item.namespace is None else f"{item.namespace}.{item.name}"


def _text_of(content: str | Sequence[ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ItemStream:
    """The events of a growing answer's items, one item after the other."""

    def __init__(self, sample_id: str, tools: Sequence[FlatFunction | Namespace]) -> None:
        self.done: list[dict[str, Any]] = []
        self._sample_id = sample_id
        self._named = {
            f"{tool.name}.{one.name}": {"namespace": tool.name, "name": one.name}
            for tool in tools
            if isinstance(tool, Namespace)
            for one in tool.tools
        }
        self._item: dict[str, Any] = {}
        """The open one's fields beside its content, which is one part."""
        self._part: dict[str, Any] = {}

    def grow(self, thoughts: str, content: str) -> Iterator[dict[str, Any]]:
        for kind, text in (("reasoning", thoughts), ("message", content)):
            if text and self._item.get("type") != kind:
                yield from [*self.close(), *self.open(kind)]
            if text:
                self._part = {**self._part, "text": self._part["text"] + text}
                yield self._in_part(f"{self._part['type']}.delta", delta=text, logprobs=[])

    def open(self, kind: str) -> Iterator[dict[str, Any]]:
        is_said = kind == "message"
        head: dict[str, Any] = {"role": "assistant"} if is_said else {"summary": []}
        self._item = {"type": kind, "id": f"{kind}_{self._sample_id}", **head}
        shape = "output_text" if is_said else "reasoning_text"
        noted: dict[str, Any] = {"annotations": []} if is_said else {}
        self._part = {"type": shape, "text": "", **noted}
        opened = {**self._item, "status": "in_progress", "content": []}
        yield self._event("output_item.added", item=opened)
        yield self._in_part("content_part.added", part=self._part)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if part := self._part:
            yield self._in_part(f"{part['type']}.done", text=part["text"], logprobs=[])
            yield self._in_part("content_part.done", part=part)
            item = {**self._item, "status": status, "content": [part]}
            yield self._event("output_item.done", item=item)
            self.done.append(item)
            self._item, self._part = {}, {}

    def call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        name, said, own_id = call.name, json.dumps(call.arguments), f"fc_{call.call_id}"
        named = self._named.get(name, {"name": name})
        head = {"type": "function_call", "id": own_id, "call_id": call.call_id, **named}
        opened = {**head, "arguments": "", "status": "in_progress"}
        item = {**head, "arguments": said, "status": "completed"}
        yield self._event("output_item.added", item=opened)
        yield self._event("function_call_arguments.delta", item_id=own_id, delta=said)
        yield self._event("function_call_arguments.done", item_id=own_id, **named, arguments=said)
        yield self._event("output_item.done", item=item)
        self.done.append(item)

    def _in_part(self, name: str, **more: Any) -> dict[str, Any]:
        return self._event(name, item_id=self._item["id"], content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "output_index": len(self.done), **more}
