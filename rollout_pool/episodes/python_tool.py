"""The `python` tool: runs a program in the sandbox and shows the model what it printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_pool.episodes.env import ToolSpec
from rollout_pool.episodes.tools import Tool, ToolError, shorten
from rollout_pool.sandbox.run import REASONS, SandboxResult, run_python

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
        raise ToolError('python takes one argument, "code", a text')
    return _shown(await run_python(code))


def _shown(result: SandboxResult) -> str:
    parts = [shorten(result.stdout, MAX_OUTPUT_CHARS)]
    if result.stderr:
        parts.append(f"standard error:\n{shorten(result.stderr, MAX_OUTPUT_CHARS)}")
    if result.reason is not None:
        parts.append(f"{REASONS[result.reason]} (exit code {result.exit_code})")
    return "\n".join(part for part in parts if part) or "(no output)"
