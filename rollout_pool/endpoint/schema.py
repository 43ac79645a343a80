"""What a request may contain: its JSON fields, messages and tools.

No field that would change the answer is ignored: what is not supported is refused by name. A
session's tokens are trained on, so the run and not the client decides how they are sampled.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from buffer.types import SamplingParams
from rollout_pool.endpoint.errors import ApiError, refuse
from rollout_pool.episodes.env import Message, ToolCall, ToolSpec

T = TypeVar("T")


class Fields:
    """One JSON object. Null means absent, as in OpenAI's API."""

    def __init__(self, values: object, path: str = "") -> None:
        self.path = path
        if not isinstance(values, Mapping):
            raise refuse(path or "body", f"must be an object, not {_kind(values)}")
        self._values: Mapping[str, Any] = values

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def only(self, *allowed: str) -> None:
        """Refuses all other fields."""
        for key in self._values:
            if key not in allowed and self.has(key):
                raise refuse(self.name(key), "is not supported here; leave it out")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false", default)

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer too large for a float
                number = float(value)
        if not math.isfinite(number):
            raise refuse(self.name(key), f"must be a number, not {_kind(value)}")
        return number

    def count(self, key: str, default: int, *, at_least: int = 0) -> int:
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            problem = f"must be a whole number, at least {at_least}, not {shown(value)}"
            raise refuse(self.name(key), problem)
        return value

    def optional_count(self, key: str, *, at_least: int = 0) -> int | None:
        return self.count(key, 0, at_least=at_least) if self.has(key) else None

    def raw(self, key: str) -> Any:
        """The raw value; None if absent."""
        return self._values.get(key)

    def inner(self, key: str) -> Fields | None:
        return Fields(self._values[key], self.name(key)) if self.has(key) else None

    def objects(self, key: str) -> list[Fields]:
        """The elements of a list of objects; empty if absent."""
        values = self._values.get(key)
        if values is None:
            return []
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise refuse(self.name(key), f"must be a list, not {_kind(values)}")
        return [Fields(value, f"{self.name(key)}[{i}]") for i, value in enumerate(values)]

    def must_be(self, key: str, accepted: Sequence[object], why: str) -> None:
        """Refuses a value not in `accepted`; `why` goes into the message."""
        value = self._values.get(key)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in accepted
        ):
            raise refuse(self.name(key), f"{shown(value)} is not supported: {why}")

    def _typed(self, key: str, kind: type[T], words: str, default: T | None) -> T:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise refuse(self.name(key), f"is missing: it must be {words}")
            return default
        if not isinstance(value, kind):
            raise refuse(self.name(key), f"must be {words}, not {_kind(value)}")
        return value


def check_whole(name: str, value: object) -> None:
    """Refuses lone surrogates, which JSON can spell but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refuse(name, "contains a lone surrogate") from error


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {shown(value)}"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def shown(value: object) -> str:
    """For an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "seed")
"""Fields, such as OpenAI's bookkeeping, that do not affect the distribution of answers. A seed is
best effort in OpenAI's API too; here the weights change between two requests."""
CACHE_HINTS = ("prompt_cache_key", "prompt_cache_retention")
SHARED = (
    "model",
    "max_tokens",
    "n",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    *WITHOUT_EFFECT,
    *CACHE_HINTS,
    *SamplingParams.__dataclass_fields__,
)


MAX_ANSWERS = 128
"""OpenAI's limit of `n`."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 256


def check_shared(fields: Fields, model: str) -> None:
    """Raises ApiError for fields that both endpoints do not support."""
    asked = fields.text("model")
    if asked != model:
        raise ApiError(
            404,
            f"model: there is no {asked!r} here; this session's model is {model!r}",
            param="model",
            code="model_not_found",
        )
    if fields.has("seed") and type(fields.raw("seed")) is not int:
        raise refuse("seed", f"must be a whole number, not {shown(fields.raw('seed'))}")


def read_sampling(
    fields: Fields, usual: SamplingParams, *, may_override: bool, is_trained: bool
) -> SamplingParams:
    """How the request is sampled, in a session that samples as `usual`. Raises ApiError."""
    asked: dict[str, Any] = {
        name: fields.number(name, value) for name, value in asdict(usual).items()
    }
    most_k = usual.top_k if is_trained else MAX_TOP_K
    for name, value in asked.items():
        if value == getattr(usual, name):
            continue
        if may_override and _may_be(name, value, most_k):
            continue
        if may_override:
            why = f"rollout.openai.sampling_overrides allows {_OVERRIDES}"
        else:
            why = (
                "its tokens are trained on, so they are sampled as the run is configured "
                "(rollout.sampling; rollout.openai.sampling_overrides=true allows some)"
            )
        raise refuse(
            name,
            f"{value:g} was requested, but this session is sampled with {getattr(usual, name):g}; "
            f"{why}; leave the field out",
        )
    return SamplingParams(**{**asked, "top_k": int(asked["top_k"])})


MAX_TOP_K = 1024
_OVERRIDES = (
    "a temperature from 0.05 to 2, and where rollout.sampling.top_k is set, top_k from 1 to that "
    "one, top_p from 0.01 to 1 and min_p from 0 to 1"
)


def _may_be(name: str, value: float, most_k: int) -> bool:
    """Whether what travels with a token, its temperature and up to `most_k` candidates, shows how
    it was drawn."""
    match name:
        case "temperature":
            return 0.05 <= value <= 2  # SGLang takes one near 0 for greedy sampling
        case "top_k":
            return value == int(value) and 0 < value <= most_k
        case "top_p":
            return most_k > 0 and 0.01 <= value <= 1
        case "min_p":
            return most_k > 0 and 0 <= value <= 1
        case _:
            return False


def read_n(fields: Fields) -> int:
    """The number of answers."""
    number = fields.count("n", 1, at_least=1)
    if number > MAX_ANSWERS:
        raise refuse("n", f"may be {MAX_ANSWERS} at most, not {number}; send several requests")
    return number


def read_stop(fields: Fields) -> tuple[str, ...] | None:
    """The texts that end an answer; None if the request leaves that to the run."""
    value = fields.raw("stop")
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > MAX_STOPS
        or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in texts)
    ):
        problem = (
            f"must be a text or a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} "
            f"characters, not {shown(value)}"
        )
        raise refuse("stop", problem)
    return tuple(texts)


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether a last chunk then has the token counts."""
    is_streamed = fields.flag("stream", False)
    options = fields.inner("stream_options")
    if options is None:
        return is_streamed, False
    if not is_streamed:
        raise refuse(fields.name("stream_options"), "requires stream=true")
    options.only("include_usage", "include_obfuscation")
    return is_streamed, options.flag("include_usage", False)


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """The conversation so far. Raises ApiError naming the message and its error."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for one in fields.objects("messages"):
        message = _read_message(one, names)
        names.update({call.call_id: call.name for call in message.tool_calls})
        messages.append(message)
    if not messages:
        raise refuse("messages", "must be a list of at least one message")
    if messages[-1].role == "assistant":
        raise refuse(
            f"messages[{len(messages) - 1}].role",
            "the last message is the model's own; end with another role",
        )
    return tuple(messages)


def message_json(message: Message) -> dict[str, Any]:
    """The model's answer in the API's format."""
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
    """`names`: of the tools called so far, by call id."""
    role = _ROLES.get(fields.text("role"))
    if role is None:
        raise refuse(fields.name("role"), f"must be one of {', '.join(_ROLES)}")
    for key in ("function_call", "audio"):
        fields.must_be(key, [], "a message has only text and tool calls")
    calls = tuple(_read_call(one) for one in fields.objects("tool_calls"))
    if calls and role != "assistant":
        raise refuse(fields.name("tool_calls"), f"a {role} message has none")
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
        content: str | None = fields.raw("content")
        return content
    parts: list[str] = []
    for part in fields.objects("content"):
        kind = part.text("type", "text")
        if kind != "text":
            raise refuse(part.name("type"), f"{kind!r} is not supported: the model only reads text")
        parts.append(part.text("text"))
    return "".join(parts)


def _read_function(fields: Fields) -> Fields:
    fields.must_be("type", ["function"], "only functions are supported")
    function = fields.inner("function")
    if function is None:
        raise refuse(fields.name("function"), "is missing")
    return function


def _read_call(fields: Fields) -> ToolCall:
    function = _read_function(fields)
    text = function.text("arguments", "") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(function.name("arguments"), f"is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise refuse(function.name("arguments"), "must be a JSON object")
    check_whole(function.name("arguments"), arguments)
    return ToolCall(call_id=fields.text("id"), name=function.text("name"), arguments=arguments)


def read_tool(fields: Fields) -> ToolSpec:
    """A tool that the model may call."""
    function = _read_function(fields)
    parameters = function.raw("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise refuse(function.name("parameters"), "must be a JSON schema of an object")
    if not (name := function.text("name")):
        raise refuse(function.name("name"), "is empty: a call would name no tool")
    return ToolSpec(
        name=name,
        description=function.text("description", ""),
        parameters=parameters,
    )
