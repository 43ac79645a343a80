"""Tools of MCP servers (Model Context Protocol), through the protocol's official client.

    mcp:https://host/mcp             a server that runs already
    mcp:npx -y @scope/some-server    a command, which every worker runs as a child of its own

A worker has one connection to a server, for all its episodes; one that is lost is made again by the
next call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from processes import die_with_parent
from rollout_pool.episodes.env import Tool, ToolError, ToolSpec

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger(__name__)

PREFIX = "mcp:"
CONNECT_S = 60.0
"""Time to start a server and to list its tools; `npx` may have to fetch it."""


def mcp_tools(name: str, setting: str) -> list[Tool]:
    """The tools of the server `name`. Raises ValueError naming `setting` if it lists none."""
    try:
        # In a thread: the caller may be in an event loop.
        with ThreadPoolExecutor(1) as thread:
            specs = thread.submit(_specs, name).result()
    except Exception as error:  # the client raises what its transports do, in groups
        raise ValueError(
            f"{setting}: this MCP server lists no tools: {_in_words(error)}; give mcp: and a URL "
            "or a command, as 'mcp:http://127.0.0.1:8000/mcp' or 'mcp:python my_server.py'"
        ) from error
    if not specs:
        raise ValueError(f"{setting}: this MCP server has no tools; leave it out")
    server = _Server(name)
    return [Tool(spec=spec, run=partial(server.call, spec.name)) for spec in specs]


@lru_cache
def _specs(name: str) -> tuple[ToolSpec, ...]:
    """Asked once per process."""
    return asyncio.run(_ask_specs(name))


async def _ask_specs(name: str) -> tuple[ToolSpec, ...]:
    found: list[ToolSpec] = []
    async with asyncio.timeout(CONNECT_S), _client(name) as client:
        page = await client.list_tools()
        while True:
            found += [
                ToolSpec(
                    name=tool.name,
                    description=tool.description or tool.title or tool.name,
                    parameters=tool.input_schema,
                )
                for tool in page.tools
            ]
            if page.next_cursor is None:
                return tuple(found)
            page = await client.list_tools(cursor=page.next_cursor)


def _client(name: str) -> Client:
    from mcp import Client, StdioServerParameters

    address = name.removeprefix(PREFIX)
    if address.startswith(("http://", "https://")):
        return Client(address)
    program, *arguments = shlex.split(address) or [""]
    if (found := shutil.which(program)) is None:
        raise FileNotFoundError(f"there is no program {program!r}")
    python, *arguments = die_with_parent.bound([found, *arguments])
    return Client(
        StdioServerParameters(
            command=python,
            args=arguments,
            # As a function has it; and the run finds its processes by a variable.
            env=dict(os.environ),
        )
    )


class _Server:
    """A connection, opened by the first call; for one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._opening: asyncio.Future[Client] | None = None
        """The connection, if there is one or will be."""
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Raises ToolError with what the server says of a failed call."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            client = await self._connected()
        except Exception as error:
            log.warning("task.tools=%r: cannot be reached: %r", self._name, error)
            raise ToolError(f"{tool}: its server cannot be reached") from error
        try:
            result = await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._drop(client, error)
            raise ToolError(f"{tool}: {error.message}") from error
        except (OSError, RuntimeError) as error:
            self._drop(client, error)
            raise ToolError(f"{tool}: the connection to its server was lost") from error
        text = "\n".join(str(getattr(part, "text", f"({part.type})")) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _connected(self) -> Client:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
            self._lost = asyncio.Event()
            # The client must be opened and closed in one task.
            self._keeping = asyncio.create_task(self._keep(self._opening, self._lost))
        return await asyncio.shield(self._opening)

    async def _keep(self, opening: asyncio.Future[Client], lost: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(CONNECT_S):
                    client = await stack.enter_async_context(_client(self._name))
                opening.set_result(client)
                await lost.wait()
        except Exception as error:
            if not opening.done():
                opening.set_exception(error)
                opening.exception()  # mark as retrieved: the call may have timed out
        finally:
            if self._opening is opening:
                self._opening = None

    def _drop(self, client: Client, error: Exception) -> None:
        if self._opening is None or not self._opening.done() or self._opening.result() != client:
            return  # another call noticed it first, and there may be a new one
        log.warning("task.tools=%r: the connection was lost: %r", self._name, error)
        self._opening = None
        self._lost.set()


def _in_words(error: BaseException) -> str:
    """The first cause of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    return f"{type(error).__name__}: {error}"
