"""Tools that the model may call, and the environment that runs its calls.

    reset ──► question and tools ──► completion with calls ──► all run at once ──► their results ──┐
                                        ▲                                                      │
                                        └──────────────────────────────────────────────────────┘
              completion without a call ──► the inner environment's own step

The model sees the error of a failed call and may try again; a failed call never ends the episode.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rollout_pool.cancelling import contained
from rollout_pool.episodes.conversation import (
    Completion,
    Message,
    Tool,
    ToolCall,
    ToolError,
    ToolSpec,
)
from rollout_pool.episodes.environment import Env, Observation, Step
from rollout_pool.sandbox.run import REASONS, SandboxResult, run_program

MAX_RESULT_CHARS = 8192
"""A longer result is cut in the middle."""
MAX_CALLS = 16
"""Per completion; further calls are not run."""
_THREADS = ThreadPoolExecutor(64, "tool")
"""Apart from asyncio's few, which the worker needs: one that hangs keeps its thread for ever."""


class ToolEnv:
    """Adds tools to an environment, which then sees only the completions without a call.

    Reports the counts tool_calls and tool_errors as parts of the reward.
    """

    def __init__(self, inner: Env, tools: Sequence[Tool], *, call_timeout_s: float) -> None:
        self._inner = inner
        self._tools = {tool.spec.name: tool for tool in tools}
        self._call_timeout_s = call_timeout_s
        self._num_calls = 0
        self._num_errors = 0

    async def reset(self) -> Observation:
        first = await self._inner.reset()
        specs = tuple(tool.spec for tool in self._tools.values())
        return dataclasses.replace(first, tools=(*first.tools, *specs))

    async def step(self, completion: Completion) -> Step:
        if not completion.tool_calls and completion.bad_call is None:
            return self._with_counts(await self._inner.step(completion))
        self._num_calls += len(completion.tool_calls)
        calls = enumerate(completion.tool_calls)
        running = (self._result_message(call, is_run=place < MAX_CALLS) for place, call in calls)
        results = list(await asyncio.gather(*running))
        if completion.bad_call is not None:
            self._num_errors += 1
            results.append(_bad_call_message(completion.bad_call))
        return self._with_counts(Step(observation=Observation(messages=tuple(results))))

    async def close(self) -> None:
        await self._inner.close()

    async def _result_message(self, call: ToolCall, *, is_run: bool) -> Message:
        try:
            if not is_run:
                raise ToolError(f"only the first {MAX_CALLS} calls of an answer are run")
            text = await self._result(call)
        except Exception as error:  # a user's tool may raise anything
            self._num_errors += 1
            text = f"error: {_in_words(error)}"
        return Message(
            role="tool", content=shorten(text), tool_call_id=call.call_id, name=call.name
        )

    async def _result(self, call: ToolCall) -> str:
        if call.name not in self._tools:
            raise ToolError(
                f"there is no tool named {call.name!r}; the tools are {', '.join(self._tools)}"
            )
        try:
            async with asyncio.timeout(self._call_timeout_s) as limit:
                with contained(call.name):
                    return await self._tools[call.name].run(call.arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ToolError(f"no result within {self._call_timeout_s:g} s") from error

    def _with_counts(self, step: Step) -> Step:
        counts = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return dataclasses.replace(step, info={**step.info, **counts})


def _bad_call_message(why: str) -> Message:
    return Message(
        role="tool",
        content=f"error: invalid tool call: {why}. Write it again, as a JSON "
        'object with the tool\'s name and its arguments.',
    )  # fmt: skip


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"


def shorten(text: str, limit: int = MAX_RESULT_CHARS) -> str:
    """Cuts the middle out of a text of more than about `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


# A function of the user's -------------------------------------------------------------------------

_JSON_TYPES: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def function_tool(function: Callable[..., Any], setting: str) -> Tool:
    """A tool with the function's name. An async function runs in the event loop, any other in a
    thread.

    Raises ValueError naming `setting` for what is no function, for one without a docstring, and for
    arguments that have no JSON type.
    """
    # A class would be called as well, and any object with __call__; neither describes its result.
    if not inspect.isroutine(function):
        raise ValueError(
            f"{setting}: must be a function, not {function!r:.100}; write one with def or async "
            "def that calls it"
        )
    description = inspect.getdoc(function)
    if not description:
        raise ValueError(f"{setting}: the function needs a docstring, its description")
    try:
        signature, hints = inspect.signature(function), typing.get_type_hints(function)
    except (ValueError, TypeError, NameError) as error:  # a built-in one, or an unknown type
        raise ValueError(
            f"{setting}: its arguments could not be read ({error}); call it from a function of "
            "yours with annotated arguments"
        ) from error
    spec = ToolSpec(
        name=function.__name__,
        description=description,
        parameters=_schema(hints, signature, setting),
    )

    async def run(arguments: Mapping[str, Any]) -> str:
        try:
            bound = signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{spec.name}: {error}") from error
        if inspect.iscoroutinefunction(function):
            result = await function(*bound.args, **bound.kwargs)
        else:
            call = partial(in_thread, *bound.args, **bound.kwargs)
            result = await asyncio.get_running_loop().run_in_executor(
                _THREADS, contextvars.copy_context().run, call
            )
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)

    def in_thread(*positional: Any, **named: Any) -> object:
        try:
            return function(*positional, **named)
        except StopIteration as error:  # no future takes it, and the call would never return
            raise RuntimeError(f"{spec.name} raised StopIteration") from error

    return Tool(spec=spec, run=run)


def _schema(hints: Mapping[str, Any], signature: inspect.Signature, setting: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{setting}: argument {parameter.name!r} must be a keyword argument")
        what = f"{setting}: argument {parameter.name!r}"
        properties[parameter.name] = _type_schema(hints.get(parameter.name, str), what)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required}


def _type_schema(hint: Any, what: str) -> dict[str, Any]:
    """The JSON schema of an annotation: JSON's types, lists and dicts of them, Literal, unions."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(option, what) for option in inner]}
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0], what)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inner[1], what)}
    raise ValueError(
        f"{what} is annotated as {hint!r}, which has no JSON type; use str, int, float, bool, "
        "list, dict, Literal or a union of these"
    )


# Python ------------------------------------------------------------------------------------------

MAX_OUTPUT_CHARS = 4096
"""Limit of standard output, and of standard error."""

SPEC = ToolSpec(
    name="python",
    description=(
        "Runs a Python program on its own, without network, and returns what it prints. Nothing is "
        "kept from one call to the next."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The whole program."}},
        "required": ["code"],
    },
)


def python_tool() -> Tool:
    return Tool(spec=SPEC, run=_run)


async def _run(arguments: Mapping[str, Any]) -> str:
    code = arguments.get("code")
    if not isinstance(code, str) or set(arguments) != {"code"}:
        raise ToolError('python takes one argument, "code", a string')
    return _shown(await run_program(code))


def _shown(result: SandboxResult) -> str:
    parts = [shorten(result.stdout, MAX_OUTPUT_CHARS)]
    if result.stderr:
        parts.append(f"standard error:\n{shorten(result.stderr, MAX_OUTPUT_CHARS)}")
    if result.reason is not None:
        parts.append(f"{REASONS[result.reason]} (exit code {result.exit_code})")
    return "\n".join(part for part in parts if part) or "(no output)"
