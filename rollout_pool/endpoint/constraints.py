"""The form that a request wants: a grammar, forced calls, a least length, banned tokens.

Grammars are written in Lark, as llguidance reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from configs.choices import ToolParser
from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.schema import (
    ChatRequest,
    ModelRequest,
    ResponseFormat,
    ToolChoice,
    only,
    shown,
)
from rollout_pool.episodes.conversation import ToolSpec
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.episodes.tool_calls import CLOSE, OPEN
from rollout_pool.sampling.sample import Constraint

FORM_FIELDS = ("response_format", "logit_bias", "min_tokens", "ignore_eos", "tool_choice")
MAX_BANNED = 1024


def read_constraint(
    request: ModelRequest, grammar: str, usual: Constraint, num_embeddings: int, longest: int
) -> Constraint:
    """The constraint of a request whose completion must follow `grammar` ("": that of `usual`, the
    run's).

    `longest`: no completion has more tokens.
    """
    min_tokens = request.min_tokens
    if min_tokens is None:
        min_tokens = 0 if grammar else usual.min_tokens
    min_tokens = longest if request.ignore_eos else min(longest, min_tokens)
    form = grammar or usual.grammar
    if form and min_tokens:
        name = "ignore_eos" if request.min_tokens is None else "min_tokens"
        whose = "a form" if grammar else "task.grammar"
        raise refuse(name, f"does not go with {whose}, which says itself where a completion ends")
    banned = _read_banned(request.logit_bias, num_embeddings)
    return Constraint(grammar=form, min_tokens=min_tokens, banned=banned)


def _read_banned(biases: Mapping[str, Any], num_embeddings: int) -> tuple[int, ...]:
    if len(biases) > MAX_BANNED:
        problem = f"must be an object of at most {MAX_BANNED} tokens, not {shown(biases)}"
        raise refuse("logit_bias", problem)
    for token, bias in biases.items():
        if not (token.isdecimal() and len(token) < 10 and int(token) < num_embeddings):
            problem = f"there is no token {shown(token)}: the model has 0 to {num_embeddings - 1}"
            raise refuse("logit_bias", problem)
        if bias != -100:
            raise refuse(
                f"logit_bias.{token}",
                f"{shown(bias)} is not supported, only -100, which bans a token: another bias "
                "would have to be known to the trainer",
            )
    return tuple(sorted({int(token) for token in biases}))


def read_form(
    request: ChatRequest,
    tools: Sequence[ToolSpec],
    parser: ToolParser | None,
    tokenizer: Tokenizer,
) -> str:
    """The grammar that response_format and tool_choice ask for; "" if they ask for none. `parser`:
    None with task.renderer."""
    chosen = _forced_tools(request.tool_choice, tools)
    form = response_form(request.response_format)
    may_call = bool(chosen) or (bool(tools) and request.tool_choice != "none")
    if not chosen:
        why = "without a forced call the model chooses"
        only("parallel_tool_calls", request.parallel_tool_calls, True, why)
    if not chosen and not (form and may_call):
        return form
    if parser is None:
        raise refuse(
            "tool_choice" if chosen else "response_format",
            "the grammars of calls are those of task.tool_parser's formats, and this run has a "
            "task.renderer; " + ("let the model choose" if chosen else "leave tools out"),
        )
    calls = _calls(chosen or tools, request.parallel_tool_calls, parser, tokenizer)
    if not form:
        return f"start: calls\n{calls}"
    if chosen:
        raise refuse("response_format", "does not go with a forced call; leave one out")
    if not form.startswith(_JSON_FORM):
        raise refuse("response_format", "a grammar does not go with tools that may be called")
    return form.replace("start: form", "start: form | calls", 1) + calls


def _forced_tools(choice: str | ToolChoice | None, tools: Sequence[ToolSpec]) -> Sequence[ToolSpec]:
    """The tools of which one must be called; empty if the model may choose."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise refuse("tool_choice", "'required' needs tools, and there are none")
        return tools
    if isinstance(choice, str):
        problem = f"must be auto, none, required or a function, not {shown(choice)}"
        raise refuse("tool_choice", problem)
    name = choice.function.name
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise refuse("tool_choice.function.name", f"there is no tool {shown(name)} in tools")
    return found


_JSON_FORM = "start: form\nform: %json "
_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""An untrained model that may write any white space between values often writes nothing else."""


def response_form(asked: ResponseFormat | None) -> str:
    """The grammar of a response_format; "" for text. Raises ApiError."""
    if asked is None or asked.type == "text":
        return ""
    if asked.type == "grammar":
        if not (lark := asked.grammar or "").strip():
            raise refuse("response_format.grammar", "is empty")
        return lark
    schema: Mapping[str, Any] = {"type": "object"}
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise refuse("response_format.json_schema", "is missing: it must be an object")
        schema = asked.json_schema.schema
    return f"{_JSON_FORM}{_json(schema)}\n"


def _calls(
    tools: Sequence[ToolSpec], may_be_several: bool, parser: ToolParser, tokenizer: Tokenizer
) -> str:
    """Rules of one or more calls, in the format that `parser` reads."""
    before, key, after, between = "", "parameters", "", "; "
    if parser is ToolParser.hermes:
        newline = _text("\n")
        before, after = (_literal(mark, tokenizer) for mark in (OPEN, CLOSE))
        before, after = f"{before} {newline}", f"{newline} {after}"
        key, between = "arguments", "\n"
    rules = [f"calls: call{f' ({_text(between)} call)*' if may_be_several else ''}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        name = json.dumps(tool.name, ensure_ascii=False)  # as templates write it
        opening = _text(f'{{"name": {name}, "{key}": ')
        rules.append(f"call_{i}: {before} {opening} arguments_{i} {_text('}')} {after}")
        # In a rule of its own, so that "#" in its references stands for the tool's schema.
        schema = _json({"type": "object", **tool.parameters})
        rules.append(f"arguments_{i}: %json {schema}")
    return "\n".join(rules) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps({"x-guidance": _ON_ONE_LINE, **schema})
    except RecursionError as error:
        raise refuse("body", "has a schema that is nested too deeply") from error


def _text(text: str) -> str:
    return json.dumps(text)


def _literal(mark: str, tokenizer: Tokenizer) -> str:
    """`mark` in a grammar, where a special token stands without quotes."""
    added = tokenizer.added_tokens_decoder.values()
    is_special = any(one.special and one.content == mark for one in added)
    return mark if is_special else _text(mark)
