"""Parses the tool calls in a model's text. Pure; never raises.

    hermes        I look it up. <tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>
    llama3_json   <|python_tag|>{"name": "find", "parameters": {"q": "x"}}; {"name": ...}

Models often get calls only half right. Unambiguous deviations are accepted (arguments given as a
string of JSON, line breaks inside strings, further keys); for others `bad_call` has the reason,
which an environment may show to the model. Thoughts, up to the last `</think>`, hold no calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.choices import ToolParser
from rollout_pool.episodes.thoughts import split_thoughts

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_LLAMA_START = re.compile(r'\s*\{(?=.*"name").*"(parameters|arguments)"', re.DOTALL)
SHOWN = 80
"""Characters of a broken call that are quoted."""


Call = tuple[str, dict[str, Any]]
"""Tool name and arguments."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ParsedText:
    """A completion's text, parsed."""

    content: str
    """The text around the calls; the unchanged text if there is none."""
    calls: tuple[Call, ...] = ()
    """In the order of the text."""
    bad_call: str | None = None
    """Why the first invalid call is invalid."""


def parse_tool_calls(parser: ToolParser, text: str) -> ParsedText:
    """The calls in `text`, in the format that `parser` names."""
    thoughts, said = split_thoughts(text)
    content, calls, bad_call = PARSERS[parser](said)
    if not calls and bad_call is None:
        return ParsedText(content=text)
    return ParsedText(content=(thoughts + content).strip(), calls=tuple(calls), bad_call=bad_call)


_Parsed = tuple[str, list[Call], str | None]
"""Content, calls, why one is invalid."""


class BadCall(ValueError):
    """Its message goes to the model as the reason."""


# Hermes -------------------------------------------------------------------------------------------


def _parse_hermes(text: str) -> _Parsed:
    before, *rests = text.split(OPEN, 1)
    content, calls, bad_call = [before], [], None
    while rests:
        # From here on `text` is what follows an opening tag. A JSON string may contain a closing
        # tag, so the value is parsed first and the tag is searched after it.
        [text] = rests
        try:
            value, end = _read_json(text)
            calls.append(as_call(value))
            rest = text[end:].lstrip()
            if rest.strip() and not rest.startswith((CLOSE, OPEN)):
                bad_call = bad_call or f"there is text between a call and its {CLOSE}"
                rest = _after_close(rest)
        except BadCall as error:
            bad_call = bad_call or str(error)
            rest = _after_close(text)
        between, *rests = rest.removeprefix(CLOSE).split(OPEN, 1)
        content.append(between)
    return "".join(content), calls, bad_call


def _after_close(text: str) -> str:
    """The text after the next closing tag; "" if there is none."""
    places = [place for tag in (CLOSE, OPEN) if (place := text.find(tag)) >= 0]
    return text[min(places) :] if places else ""


# Llama 3 ------------------------------------------------------------------------------------------


def _parse_llama3(text: str) -> _Parsed:
    before, tag, rest = text.partition(PYTHON_TAG)
    if not tag or before.lstrip().startswith("{"):
        # Without the tag only a completion that begins like a call is one: other JSON is text.
        if not _LLAMA_START.match(text):
            return text, [], None
        before, tag, rest = "", "", text
    calls: list[Call] = []
    while True:
        try:
            value, end = _read_json(rest)
            calls.append(as_call(value))
        except BadCall as error:
            return (before if calls or tag else text), calls, str(error)
        rest = rest[end:].lstrip()
        if not rest.startswith((";", ",")):
            return before + rest, calls, None
        rest = rest[1:].lstrip().removeprefix(PYTHON_TAG)
        if not rest.strip():
            return before, calls, None


PARSERS: dict[ToolParser, Callable[[str], _Parsed]] = {
    ToolParser.hermes: _parse_hermes,
    ToolParser.llama3_json: _parse_llama3,
}


# One call -----------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
"""Accepts line breaks inside strings, which models write in code; refuses NaN and infinity."""


def _read_json(text: str) -> tuple[Any, int]:
    """The JSON value at the start of `text`, and where it ends."""
    start = len(text) - len(text.lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise BadCall("the call is nested too deeply") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        written = text.partition(CLOSE)[0].strip()
        raise BadCall(f"not valid JSON ({reason}): {written[:SHOWN]!r}") from None


def as_call(value: Any) -> Call:
    """Ignores keys besides the name and the arguments. Raises BadCall."""
    if not isinstance(value, dict):
        raise BadCall(f"a call must be a JSON object, not {_shown(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadCall(f'a call must have a "name", a string: {_shown(value)}')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments, _ = _read_json(arguments)
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadCall(f'the arguments of "{name}" must be a JSON object: {_shown(arguments)}')
    _check_text({"name": name, "arguments": arguments})
    return name.strip(), arguments


def _check_text(call: Any) -> None:
    """Refuses lone surrogates, which JSON can spell but UTF-8 cannot encode, and NaN."""
    try:
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise BadCall("the call contains a lone surrogate") from None
    except ValueError:
        raise BadCall("the call contains NaN or infinity, which are not JSON") from None
    except RecursionError:
        raise BadCall("the call is nested too deeply") from None


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:SHOWN]
    except RecursionError:
        return "a value nested too deeply"
