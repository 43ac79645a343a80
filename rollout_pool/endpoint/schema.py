"""The requests of the endpoint as types, and the sampling that they may choose.

No field that would change the completion is ignored: what is not supported is refused by name. A
session's tokens are trained on, so the run and not the client decides how they are sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from buffer.types import SamplingParams
from rollout_pool.endpoint.errors import ApiError, refuse
from rollout_pool.episodes.conversation import Message, ToolCall, ToolSpec
from rollout_pool.episodes.template import as_template_message, join_arguments
from rollout_pool.episodes.thoughts import join_thoughts

MAX_TOP_K = 1024
GROUP_TIMEOUT_S = 600.0
"""Longest wait for a credit, unless the request says otherwise."""
MAX_GROUP_TIMEOUT_S = 86_400.0

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Bookkeeping = Any
"""Accepted: it does not change the distribution of completions."""


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """A last chunk has the token counts."""
    include_obfuscation: Bookkeeping = None


class JsonSchema(Struct, kw_only=True):
    schema: dict[str, Any]


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None


class SharedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of OpenAI's pages have; `decode` takes null for a field that is absent."""

    model: str
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    user: Bookkeeping = None
    metadata: Bookkeeping = None
    service_tier: Bookkeeping = None
    safety_identifier: Bookkeeping = None
    prompt_cache_key: Bookkeeping = None
    prompt_cache_retention: Bookkeeping = None


class ModelRequest(SharedRequest, kw_only=True):
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    logit_bias: dict[str, Any] = {}
    min_tokens: Count | None = None
    ignore_eos: bool = False
    top_k: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """Best effort in OpenAI's API too; here the weights change between two requests."""
    store: Bookkeeping = None


class TextPart(Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: str | None = None
    """A JSON object as text."""


class Call(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None
    annotations: Bookkeeping = None
    parsed: Bookkeeping = None
    provider_specific_fields: Bookkeeping = None


class ChosenFunction(Struct, kw_only=True):
    name: Text


class Function(ChosenFunction, kw_only=True):
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: Function

    def spec(self, path: str) -> ToolSpec:
        """The tool for the model. `path` leads to this field of the request."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            raise refuse(f"{path}.function.parameters", "must be a JSON schema of an object")
        return ToolSpec(
            name=self.function.name,
            description=self.function.description or "",
            parameters=parameters,
        )


class ToolChoice(Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(ModelRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[FunctionTool] = []
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    max_completion_tokens: Positive | None = None
    modalities: list[str] | None = None


class CompletionRequest(ModelRequest, kw_only=True):
    prompt: Text | Annotated[list[int | str], Meta(min_length=1)]
    logprobs: int | None = None
    echo: bool = False
    suffix: Any = None
    best_of: int = 1


class GroupRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_GROUP_TIMEOUT_S)] = GROUP_TIMEOUT_S
    stream: bool = False


class Reward(Struct, kw_only=True, forbid_unknown_fields=True):
    reward: float | None = None
    parts: dict[str, float] = {}
    rewards: dict[str, float | None] = {}
    advantages: dict[str, float] = {}


# Reading ------------------------------------------------------------------------------------------


def decode(body: bytes, kind: type[T]) -> T:
    """The request in `body`. Raises ApiError naming the field, its value and what it must be."""
    try:
        given = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise refuse("body", f"not valid JSON: {error}") from error
    if isinstance(given, dict):
        given = _without_nulls(given)
        for name, usual in (("messages", {}), ("input", {"type": "message"})):
            if isinstance(has := given.get(name), list):
                given[name] = [usual | _without_nulls(m) if isinstance(m, dict) else m for m in has]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, getattr(kind, "CHOICES", _CHOICES)) from error


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_CHOICES = {
    "messages.role": "system, developer, user, assistant or tool",
    "messages.content.type": "text: the model reads nothing else",
    "response_format.type": "text, json_object, json_schema or grammar",
}
"""Values of the fields with a choice, by path; of all others: function."""


def _refusal(problem: str, given: Any, choices_of: Mapping[str, str]) -> ApiError:
    """Tells msgspec's `problem`, as "Expected `int`, got `str` - at `$.n`", in the API's words."""
    problem, _, path = problem.partition(" - at `$")
    param = path.rstrip("`").partition("[...]")[0].lstrip(".")
    if found := re.fullmatch(r"Object (missing|contains).* field `(.*)`", problem):
        fix = "is missing" if found[1] == "missing" else "is not supported here; leave it out"
        return refuse(f"{param}.{found[2]}" if param else found[2], fix)
    for name, place in re.findall(r"(\w+)|\[(\d+)\]", param):
        given = given[name or int(place)]
    if problem.startswith(("Invalid enum value", "Invalid value")):
        choices = choices_of.get(re.sub(r"\[\d+\]", "", param), "function")
        return refuse(param, f"{shown(given)} is not supported, only {choices}")
    wanted = "a number"  # else it is one out of range
    if found := re.fullmatch(r"Expected `(.*?)`(.*?)(, got .*)?", problem):
        kinds = [_WORDS[kind] for kind in found[1].split(" | ") if kind != "null"]
        limit = found[2].replace(">=", "at least").replace("<=", "at most")
        wanted = (" or ".join(kinds) or "null") + limit
    return refuse(param or "body", f"must be {wanted}, not {shown(given)}")


def shown(value: object) -> str:
    """For an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def only(name: str, value: object, accepted: object, why: str) -> None:
    """Refuses the field `name` of a request unless it has the value `accepted`."""
    if value != accepted:
        raise refuse(name, f"{shown(value)} is not supported: {why}")


def check_shared(request: ModelRequest, model: str) -> None:
    """Raises ApiError for another model than the endpoint's, and for options of no stream."""
    if request.model != model:
        raise ApiError(
            404,
            f"model: there is no {request.model!r} here; this session's model is {model!r}",
            param="model",
            code="model_not_found",
        )
    if request.stream_options is not None and not request.stream:
        raise refuse("stream_options", "requires stream=true")


# Sampling -----------------------------------------------------------------------------------------


def read_sampling(
    request: ModelRequest, usual: SamplingParams, *, may_override: bool, is_trained: bool
) -> SamplingParams:
    """How the request is sampled, in a session that samples as `usual`. Raises ApiError."""
    asked = dict[str, Any]()
    most_k = usual.top_k if is_trained else MAX_TOP_K
    for name, default in asdict(usual).items():
        value = getattr(request, name)
        asked[name] = default if value is None else value
        if asked[name] == default or (may_override and _may_be(name, value, most_k)):
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
            f"{value:g} was requested, but this session is sampled with {default:g}; "
            f"{why}; leave the field out",
        )
    return SamplingParams(**{**asked, "top_k": int(asked["top_k"])})


_OVERRIDES = (
    "a temperature from 0.05 to 2, and where rollout.sampling.top_k is set, top_k from 1 to that "
    "one, top_p from 0.01 to 1 and min_p from 0 to 1"
)


def _may_be(name: str, value: float, most_k: int) -> bool:
    """Returns whether the trainer can tell how a token was drawn: from its temperature and up to
    `most_k` candidates, which travel with it."""
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


# Conversations ------------------------------------------------------------------------------------


def read_messages(given: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The conversation, which must not end with the model's own message."""
    names: dict[str | None, str] = {}
    messages = []
    for place, one in enumerate(given):
        message = _read_message(one, f"messages[{place}]", names)
        names.update({call.call_id: call.name for call in message.tool_calls})
        messages.append(message)
    if messages[-1].role == "assistant":
        raise refuse(
            f"messages[{len(messages) - 1}].role",
            "the last message is the model's own; end with another role",
        )
    return tuple(messages)


def _read_message(given: ChatMessage, path: str, names: dict[str | None, str]) -> Message:
    """`names` holds those of the tools called so far, by call id."""
    for key in ("function_call", "audio", "refusal"):
        only(f"{path}.{key}", getattr(given, key), None, "a message has only text and tool calls")
    for key in ("tool_calls", "reasoning_content"):
        if getattr(given, key) and given.role != "assistant":
            raise refuse(f"{path}.{key}", f"a {given.role} message has none")
    content, call_id = given.content, given.tool_call_id if given.role == "tool" else None
    if content is None and given.role != "assistant":
        raise refuse(f"{path}.content", "is missing: it must be a string")
    if call_id is None and given.role == "tool":
        raise refuse(f"{path}.tool_call_id", "is missing: it must be a string")
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return Message(
        role="system" if given.role == "developer" else given.role,
        content=join_thoughts(given.reasoning_content or "", content or ""),
        tool_calls=tuple(
            ToolCall(
                call_id=call.id,
                name=call.function.name,
                arguments=read_arguments(
                    call.function.arguments or "{}",
                    f"{path}.tool_calls[{place}].function.arguments",
                ),
            )
            for place, call in enumerate(given.tool_calls or ())
        ),
        tool_call_id=call_id,
        name=(given.name or names.get(call_id)) if call_id is not None else None,
    )


def read_arguments(text: str, path: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise refuse(path, "must be a JSON object")
    return arguments


def message_json(message: Message, thoughts: str) -> dict[str, Any]:
    """The model's message, which has no `thoughts` any more, in the API's format."""
    written = as_template_message(message)
    join_arguments(written)
    has_content = message.content or not message.tool_calls
    shown = {"reasoning_content": thoughts} if thoughts else {}
    return {
        **written,
        "content": message.content if has_content else None,
        **shown,
        "refusal": None,
    }
