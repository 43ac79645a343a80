"""Anthropic's Messages API: its requests, and blocks in its responses. `MessagesTurn` serves it.

system, messages of blocks, tools  ──►  Messages, ToolSpecs, and the rest as a ChatRequest
thoughts, content, calls           ──►  blocks, whole or as events of a stream
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.schema import (
    Bookkeeping,
    ChatRequest,
    ChosenFunction,
    JsonSchema,
    Positive,
    ResponseFormat,
    StopText,
    Text,
    ToolChoice,
    shown,
)
from rollout_pool.episodes.conversation import Message, ToolCall, ToolSpec
from rollout_pool.episodes.thoughts import join_thoughts

SIGNATURE = "leash"
"""Clients send no thoughts back that have none. It is not checked: sessions know their answers."""
BETWEEN_BLOCKS = "\n\n"


class _Block(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: Bookkeeping = None


class TextBlock(_Block, kw_only=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(_Block, kw_only=True, tag="thinking"):
    thinking: str
    signature: Bookkeeping = None


class ToolUseBlock(_Block, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: None = None
    toolset_name: None = None


class ToolResultBlock(_Block, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class BlockMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["custom"] | None = None
    name: Text
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Bookkeeping = None
    """As in OpenAI's requests: a forced call keeps to the schema anyway, and no other one."""
    cache_control: Bookkeeping = None
    eager_input_streaming: Bookkeeping = None


class ChosenTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class OutputForm(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    effort: Literal["high"] | None = None
    format: OutputForm | None = None


class Edit(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    edits: tuple[Edit, ...] = ()


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    CHOICES: ClassVar = {
        "messages.role": "user, assistant or system",
        "messages.content.type": "text, thinking, tool_use or tool_result",
        "messages.content.content.type": "text: the model reads nothing else",
        "system.type": "text",
        "tools.type": "custom: there are no tools that a server of Anthropic's runs",
        "tool_choice.type": "auto, any, tool or none",
        "thinking.type": "adaptive: how much the model thinks is the run's to say",
        "thinking.display": "summarized: thoughts are sent as they are",
        "output_config.effort": "high, as without it: how much the model thinks is the run's",
        "output_config.format.type": "json_schema",
        "context_management.edits.type": "clear_thinking_20251015: nothing else is left out unseen",
        "context_management.edits.keep": "all: which thoughts stay is the run's (task.thoughts)",
    }

    model: str
    messages: Annotated[list[BlockMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    system: str | list[TextBlock] = ""
    tools: list[ClientTool] = []
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    metadata: Bookkeeping = None
    service_tier: Bookkeeping = None
    cache_control: Bookkeeping = None
    inference_geo: Bookkeeping = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement = ContextManagement()

    def as_chat(self) -> ChatRequest:
        """The rest of it, without messages and tools."""
        chosen = self.tool_choice or ChosenTool(type="auto")
        choice: str | ToolChoice = "required" if chosen.type == "any" else chosen.type
        if chosen.type == "tool":
            if chosen.name not in [tool.name for tool in self.tools]:
                raise refuse("tool_choice.name", f"there is no tool {shown(chosen.name)}")
            choice = ToolChoice(function=ChosenFunction(name=chosen.name or ""))
        elif chosen.disable_parallel_tool_use and chosen.type != "any":
            why = "without a forced call the model chooses"
            raise refuse("tool_choice.disable_parallel_tool_use", why)
        asked = None
        if form := self.output_config.format:
            asked = ResponseFormat(type=form.type, json_schema=JsonSchema(schema=form.schema))
        same = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
        return ChatRequest(
            **{name: getattr(self, name) for name in same},
            messages=[],
            response_format=asked,
            stop=self.stop_sequences,
            tool_choice=choice,
            parallel_tool_calls=not chosen.disable_parallel_tool_use,
        )


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Positive


def read_tools(tools: Sequence[ClientTool]) -> Iterator[ToolSpec]:
    for place, tool in enumerate(tools):
        if tool.input_schema.get("type", "object") != "object":
            raise refuse(f"tools[{place}].input_schema", "must be a JSON schema of an object")
        about = tool.description or ""
        yield ToolSpec(name=tool.name, description=about, parameters=tool.input_schema)


def read_blocks(request: CountRequest) -> Iterator[Message]:
    """The conversation, which must not end with the model's own message."""
    names: dict[str, str] = {}
    if request.system:
        yield Message(role="system", content=_text_of(request.system))
    for place, one in enumerate(request.messages):
        path = f"messages[{place}]"
        content = [TextBlock(text=one.content)] if isinstance(one.content, str) else one.content
        if one.role == "assistant":
            message = _own_message(content, path)
            names |= {call.call_id: call.name for call in message.tool_calls}
            yield message
        else:
            yield from _given_messages(one.role, content, path, names)
    if one.role == "assistant":
        raise refuse(f"{path}.role", "the last message is the model's own; end with another role")


def _own_message(blocks: Sequence[_Block], path: str) -> Message:
    thoughts, texts, calls = list[str](), list[str](), list[ToolCall]()
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            calls.append(ToolCall(call_id=block.id, name=block.name, arguments=block.input))
        elif not isinstance(block, ThinkingBlock):
            raise refuse(f"{path}.content[{place}].type", "an assistant message has no such block")
        elif texts or calls:
            raise refuse(f"{path}.content[{place}].type", "thoughts come before all other blocks")
        else:
            thoughts.append(block.thinking)
    content = join_thoughts(BETWEEN_BLOCKS.join(thoughts), BETWEEN_BLOCKS.join(texts))
    return Message(role="assistant", content=content, tool_calls=tuple(calls))


def _given_messages(
    role: str, blocks: Sequence[_Block], path: str, names: dict[str, str]
) -> Iterator[Message]:
    """A user's results of tools are messages of their own. `names`: those of tools by call id."""
    texts: list[TextBlock] = []
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if not isinstance(block, ToolResultBlock) or role != "user":
            raise refuse(f"{path}.content[{place}].type", f"a {role} message has no such block")
        if texts:
            yield Message(role=role, content=_text_of(texts))
            texts = []
        result = _text_of(block.content or "")
        yield Message(
            role="tool",
            content=f"Error: {result}" if block.is_error else result,
            tool_call_id=block.tool_use_id,
            name=names.get(block.tool_use_id),
        )
    if texts or not blocks:
        yield Message(role=role, content=_text_of(texts))


def _text_of(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return BETWEEN_BLOCKS.join(block.text for block in content)


# The response -------------------------------------------------------------------------------------


def blocks_of(thoughts: str, content: str, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """A whole message."""
    signed = {"type": "thinking", "thinking": thoughts, "signature": SIGNATURE}
    return [
        *([signed] if thoughts else []),
        *([{"type": "text", "text": content}] if content else []),
        *({**_opening_of(call), "input": dict(call.arguments)} for call in calls),
    ]


class BlockStream:
    """The events of a growing message's blocks, one block after the other."""

    def __init__(self) -> None:
        self._index = 0
        self._type: str | None = None
        """The open block's."""

    def grow(self, thoughts: str, content: str) -> Iterator[dict[str, Any]]:
        for block, text in (("thinking", thoughts), ("text", content)):
            if text and self._type != block:
                signed = {"signature": ""} if block == "thinking" else {}
                yield from self.close()
                yield self._open({"type": block, block: "", **signed})
            if text:
                yield self._delta({"type": f"{block}_delta", block: text})

    def call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        yield self._open(_opening_of(call))
        arguments = json.dumps(call.arguments)
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield from self.close()

    def close(self) -> Iterator[dict[str, Any]]:
        if self._type == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._type is not None:
            yield {"type": "content_block_stop", "index": self._index}
            self._index, self._type = self._index + 1, None

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._type = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _opening_of(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
