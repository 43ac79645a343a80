"""Makes a tool of a function: its signature is what the model may pass, its docstring what it is
told."""

from __future__ import annotations

import asyncio
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rollout_pool.episodes.env import ToolSpec
from rollout_pool.episodes.tools import Tool, ToolError, as_text

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
    """A tool of the function's own name. An async function runs in the event loop, another one in
    a thread.

    Raises ValueError naming `setting` for a function without a docstring, or with arguments that
    JSON has no name for.
    """
    description = inspect.getdoc(function)
    if not description:
        raise ValueError(f"{setting}: the function needs a docstring that tells the model its use")
    signature = inspect.signature(function)
    spec = ToolSpec(
        name=function.__name__,
        description=description,
        parameters=_schema(function, signature, setting),
    )

    async def run(arguments: Mapping[str, Any]) -> str:
        try:
            bound = signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{spec.name}: {error}") from error
        if inspect.iscoroutinefunction(function):
            return as_text(await function(*bound.args, **bound.kwargs))
        return as_text(await asyncio.to_thread(function, *bound.args, **bound.kwargs))

    return Tool(spec=spec, run=run)


def _schema(
    function: Callable[..., Any], signature: inspect.Signature, setting: str
) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{setting}: argument {parameter.name!r} must be one that is passed by its name"
            )
        what = f"{setting}: argument {parameter.name!r}"
        properties[parameter.name] = _type_schema(hints.get(parameter.name, str), what)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required}


def _type_schema(hint: Any, what: str) -> dict[str, Any]:
    """Of an annotation: the types of JSON, lists and dicts of them, Literal, unions of all that."""
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
        f"{what} is annotated as {hint!r}, which JSON has no name for; use str, int, float, bool, "
        "list, dict, Literal or a union of these"
    )
