"""Tools of MCP servers (Model Context Protocol), through the protocol's official client.

    mcp:https://host/mcp             a server that runs already
    mcp:npx -y @scope/some-server    a command, which every worker runs as a child of its own

A worker has one connection to a server, for all its episodes; one that is lost is made again by the
next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import shutil
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from processes import die_with_parent
from processes.child import kill_group
from rollout_pool.cancelling import end_tasks
from rollout_pool.episodes.conversation import Tool, ToolError, ToolSpec

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

log = logging.getLogger(__name__)

PREFIX = "mcp:"
CONNECT_S = 60.0
"""Time to start a server and to list its tools; `npx` may have to fetch it."""
MAX_MESSAGE_BYTES = 16 * 2**20
"""Limit for one message from a server."""
MAX_OTHER_LINES = 1000
"""Printed by a command beside its messages, by mistake."""
END_S = 2.0
"""For a command to end by itself, and to be gone once it is killed."""


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
    from mcp import Client

    address = name.removeprefix(PREFIX)
    if address.startswith(("http://", "https://")):
        return Client(_streams_at(address))
    program, *arguments = shlex.split(address) or [""]
    if (found := shutil.which(program)) is None:
        raise FileNotFoundError(f"there is no program {program!r}")
    return Client(_streams_of([found, *arguments], name))


@asynccontextmanager
async def _streams_at(url: str) -> AsyncIterator[TransportStreams]:
    """The library's, which bounds the events of a stream, but no other body of a response."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, response: httpx2.Response) -> None:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            self._stream = response.stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = MAX_MESSAGE_BYTES
            async for part in self._stream:
                left -= len(part)
                if left < 0:
                    raise httpx2.ReadError(f"a response of more than {MAX_MESSAGE_BYTES} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if "Content-Encoding" in response.headers:  # a few KiB of it may be GiB
            raise httpx2.ReadError("a compressed response, unasked")
        if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
            response.stream = Bounded(response)

    async with create_mcp_http_client(headers={"Accept-Encoding": "identity"}) as client:
        client.event_hooks = {"response": [bound]}
        async with streamable_http_client(url, http_client=client) as streams:
            yield streams


@asynccontextmanager
async def _streams_of(command: Sequence[str], name: str) -> AsyncIterator[TransportStreams]:
    """The messages of a command, one a line of its standard input and output. The library has the
    same, but without a limit: a line that does not end would take all memory and the event loop."""
    import anyio
    from mcp.shared.message import SessionMessage

    process = await asyncio.create_subprocess_exec(
        *die_with_parent.bound(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_MESSAGE_BYTES,
        start_new_session=True,
    )
    received, to_read = anyio.create_memory_object_stream[SessionMessage | Exception]()
    to_write, sent = anyio.create_memory_object_stream[SessionMessage]()

    working = [
        asyncio.create_task(_read_messages(process, received, name)),
        asyncio.create_task(_write_messages(process, sent)),
    ]

    def close(_: object = None) -> None:
        """So the client sees that its connection has ended."""
        received.close()
        sent.close()

    for task in working:
        task.add_done_callback(close)
    try:
        yield to_read, to_write
    finally:
        with anyio.CancelScope(shield=True):
            await end_tasks(working)
            for stream in (to_read, to_write):
                stream.close()
            await _end(process)


async def _read_messages(
    process: Process, received: MemoryObjectSendStream[SessionMessage | Exception], name: str
) -> None:
    """Returns when there will be no more."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert process.stdout is not None
    num_others = 0
    try:
        while line := await process.stdout.readline():
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                num_others += 1
                if num_others > MAX_OTHER_LINES:
                    raise ValueError(f"more than {num_others - 1} lines are no messages") from None
                continue
            await received.send(SessionMessage(message))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # the client has ended the connection
    except ValueError as error:  # readline's, or the one above
        log.warning("task.tools=%r: the command's output is not read on: %s", name, error)


async def _write_messages(
    process: Process, sent: MemoryObjectReceiveStream[SessionMessage]
) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for one in sent:
            text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _end(process: Process) -> None:
    """Lets it end by itself first, as the protocol wants."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    kill_group(process.pid)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            while await process.stdout.read(2**16):
                pass
            await process.wait()


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
        except OSError as error:
            self._drop(client, error)
            raise ToolError(f"{tool}: the connection to its server was lost") from error
        except (RuntimeError, ValueError) as error:  # other calls still have their connection
            raise ToolError(f"{tool}: its server's result cannot be used: {error}") from error
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
