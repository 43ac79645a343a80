"""Limits on the clients of an HTTP server; uvicorn itself bounds only the idle time.

    connection ──► head ──► body ──► response ──► idle ──► next head
                  head_s   body_s    write_s     keep_alive_s

A connection above `max_connections` replaces one without a request, so clients that send nothing,
or have no key, cannot lock others out.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

LINGER_S = 2.0
"""How long a client may go on sending after an early response: closing the connection at once could
lose the response."""

_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""A client whose machine has vanished is missed after two minutes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HttpLimits:
    """Longest times, in seconds, and the number of connections."""

    head_s: float = 10.0
    """From the connection, or the first byte of a further request, to the end of its head."""
    body_s: float = 60.0
    """From the end of the head to the end of the body."""
    write_s: float = 120.0
    """For a client that has stopped reading its response."""
    keep_alive_s: int = 75
    """Longer than clients keep idle connections, or a request could arrive at a closing one."""
    max_connections: int = 16_384
    """At most half of the files that the process may open."""


class ServerConfig(uvicorn.Config):
    """Settings of a server of `app` that enforces `limits`."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        *,
        close_s: int,
        count: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`close_s`: time for pending responses at shutdown. `count` gets the name of each limit
        at which a client was refused or cut off."""
        super().__init__(
            cast(Any, app),
            http=_Connection,
            log_level="error",  # clients' mistakes must not fill the log
            access_log=False,  # paths may contain keys
            lifespan="off",
            ws="none",
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=close_s,
        )
        self.limits = limits
        self.count = count
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = limits.max_connections
        if most_files != resource.RLIM_INFINITY:
            self.max_connections = min(self.max_connections, most_files // 2)
        # All that wait are accepted before one of them is looked at.
        self.backlog = min(self.backlog, max(1, self.max_connections // 4))


class _Connection(H11Protocol):
    """One client's connection."""

    def __init__(self, config: uvicorn.Config, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        assert isinstance(config, ServerConfig)
        self._limits = config.limits
        self._count = config.count
        self._max_connections = config.max_connections
        self._phase: object = None
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # `write_s` is for every byte: by default some 64 KiB may wait for a reader without end.
        transport.set_write_buffer_limits(high=0)
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
        if len(self.connections) > self._max_connections and not self._make_room():
            self._count("requests_refused:connections")
            self._refuse(503, "Service Unavailable", "there are too many connections")
        self._time_phase()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.write_s, self._write_no_more)

    def _write_no_more(self) -> None:
        self._count("requests_refused:unread")
        self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._receiving, self._writing):
            if timer is not None:
                timer.cancel()

    def _make_room(self) -> bool:
        """Closes another connection that has no request, if there is one."""
        for other in self.connections:
            if not isinstance(other, _Connection) or other is self or other._is_answering:
                continue
            if not other.transport.is_closing():
                other.shutdown()
                return True
        return False

    def _time_phase(self) -> None:
        """Starts the timer of the phase that is being received, unless it runs already."""
        state, limits = self.conn.their_state, self._limits
        phase: object = None
        timeout_s = 0.0
        if state is h11.SEND_BODY:
            timeout_s = limits.body_s if self._is_answering else LINGER_S
            phase = self.cycle, self._is_answering
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            timeout_s = limits.head_s
            phase = self.cycle, h11.IDLE
        if phase == self._phase:
            return
        self._phase = phase
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = None
        if phase is not None and not self.transport.is_closing():
            self._receiving = self.loop.call_later(timeout_s, self._receive_no_more, timeout_s)

    def _receive_no_more(self, timeout_s: float) -> None:
        has_begun = self._is_answering or self.conn.trailing_data[0]
        if not has_begun or (self._is_answering and self.cycle.response_started):
            self.transport.close()
            return
        what = "body" if self._is_answering else "head"
        self._count("requests_refused:slow")
        self._refuse(
            408, "Request Timeout", f"the request's {what} did not arrive within {timeout_s:g} s"
        )

    def _refuse(self, status: int, phrase: str, why: str) -> None:
        """Responds like uvicorn's own refusals, and closes the connection."""
        if not self.transport.is_closing():
            self.transport.write(
                f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain\r\n"
                f"content-length: {len(why)}\r\nconnection: close\r\n\r\n{why}".encode()
            )
            self.transport.close()


class BodyRoom:
    """Bounds the bytes of the bodies that a server holds; further requests wait, unread. Used in
    one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def place(self, request: Request, max_bytes: int) -> AsyncIterator[None]:
        """Room for its body, of at most `max_bytes`. Raises HTTPException if that is declared to be
        larger."""
        size = _declared_bytes(request, max_bytes)
        async with self._turn:  # small ones do not overtake a large one that waits
            while size > self._left:
                self._freed.clear()
                await self._freed.wait()
            self._left -= size
        try:
            yield
        finally:
            self._left += size
            self._freed.set()


def _declared_bytes(request: Request, max_bytes: int) -> int:
    """Length of its body, or `max_bytes` if it does not tell. Raises HTTPException if too large."""
    declared = request.headers.get("content-length", str(max_bytes))
    if len(declared) > len(str(max_bytes)) or int(declared) > max_bytes:
        raise _too_large(max_bytes)
    return int(declared)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"a request may have {max_bytes} bytes here at most")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises HTTPException for a body above `max_bytes` (unread if its length is declared), and
    for one that ends early."""
    _declared_bytes(request, max_bytes)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as error:
        raise HTTPException(400, "the request ended early") from error
    return bytes(body)


def has_more_values(body: bytes, most: int) -> bool:
    """Returns whether JSON holds more values than `most`. Decoding them takes many times the memory
    of the text, and holds the GIL meanwhile, in a thread too."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= most:
        return False
    # Most of these characters may lie inside strings, in code for example.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 4 * most:
        return True
    outside = b"".join(unescaped.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{") > most
