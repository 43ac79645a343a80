"""Transfers payloads between Redis and the memory in which they are encoded or used.

    push   a group is encoded into an arena; packed commands and payloads are sent as they are
    lease  GET GET GET ...  ──>  server  ──>  $66016 | payload | $66016 | ...
                                                │         │
                                            scratch    recv_into a block: the value's own memory

The connections are our own: redis-py and asyncio's streams would copy each byte two to four times.
Only some megabytes of values are requested at once, because the server holds them all in memory.

Memory is reused: malloc returns a payload of a megabyte to the kernel when it is freed, and the
page faults of the next one cost many times what filling it costs. A block is reused once no payload
in it is referenced.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from weakref import finalize

import numpy as np
from hiredis import Reader, pack_command
from numpy.typing import NDArray
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio.connection import ConnectionPool

Allocate = Callable[[int], memoryview]
"""Writable, uninitialised memory of the given size."""

ALIGNMENT = 64


def fresh(num_bytes: int) -> memoryview:
    """Newly allocated memory."""
    return np.empty(num_bytes, np.uint8).data


class Arena:
    """One block of memory, handed out in pieces until `clear` frees all of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        """The block grows no larger than this."""
        self._block = fresh(0)
        self._used = 0
        self._wanted = 0

    def allocate(self, num_bytes: int) -> memoryview:
        """A piece that is valid until the next `clear`; newly allocated if the block is full."""
        start = self._used + -self._used % ALIGNMENT
        end = start + num_bytes
        self._wanted += num_bytes + ALIGNMENT
        if end > len(self._block):
            return fresh(num_bytes)
        self._used = end
        return self._block[start:end]

    def clear(self) -> None:
        """Frees all pieces. The block grows to the total size requested since the last `clear`."""
        if len(self._block) < self._wanted <= self._max_bytes:
            self._block = fresh(self._wanted)
        self._used = self._wanted = 0


BLOCK_BYTES = 8 << 20
BLOCKS_KEPT = 16
"""Free blocks kept for the next batch."""


class Blocks:
    """Hands out pieces of blocks. Used in one event loop; pieces may be dropped in any thread."""

    def __init__(self) -> None:
        self._free: deque[NDArray[Any]] = deque(maxlen=BLOCKS_KEPT)
        self._block = memoryview(b"")
        self._used = 0

    def allocate(self, num_bytes: int) -> memoryview:
        """Writable memory that is not reused while it, or a view of it, is referenced.

        More than half a block is newly allocated.
        """
        if 2 * num_bytes > BLOCK_BYTES:
            return fresh(num_bytes)
        if self._used + num_bytes > len(self._block):
            self._begin_block()
        piece = self._block[self._used : self._used + num_bytes]
        self._used += num_bytes + -num_bytes % ALIGNMENT
        return piece

    def _begin_block(self) -> None:
        memory = self._free.pop() if self._free else np.empty(BLOCK_BYTES, np.uint8)
        lent = memory[:]  # every piece references this view, which dies with the last of them
        finalize(lent, self._free.append, memory).atexit = False
        self._block, self._used = lent.data, 0


Value = memoryview | None | Exception
"""Reply to a GET: read-only bytes, None for a missing key, or an error reply."""

_BYTES_AHEAD = 4 << 20
SCRATCH_BYTES = 1 << 18
"""Holds several small values, so that each costs less than one read."""
_LONGEST_LINE_BYTES = 1 << 12
_SEND_BYTES = 1 << 22
_PIECE_BYTES = 1 << 18
_END = b"\r\n"
_NO_REPLY = object()


class PayloadConnections:
    """Connections to one server, opened on demand and kept for the next call."""

    def __init__(self, pool: ConnectionPool) -> None:
        """`pool`, a pool of redis-py, provides address, TLS and user."""
        self._pool = pool
        self._idle: list[PayloadConnection] = []
        self._is_closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[PayloadConnection]:
        """A connection for one call; an error closes it.

        Raises the ConnectionError or TimeoutError of redis-py.
        """
        connection: PayloadConnection | None = None
        try:
            connection = await self._take()
            yield connection
        except BaseException as error:  # replies in flight would be taken for the next call's
            if connection is not None:
                connection.abort()
            if isinstance(error, TimeoutError):
                raise exceptions.TimeoutError("Redis took too long for a payload") from None
            if isinstance(error, OSError | RuntimeError):  # the latter is uvloop's
                raise exceptions.ConnectionError(f"lost the connection to Redis: {error}") from None
            raise
        if self._is_closed:
            connection.abort()
        else:
            self._idle.append(connection)

    async def _take(self) -> PayloadConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return await PayloadConnection.open(self._pool.make_connection())  # type: ignore[no-untyped-call]

    async def aclose(self) -> None:
        self._is_closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the loop close the sockets


class PayloadConnection(asyncio.BufferedProtocol):
    """One connection to a server, for one call at a time. A failed call leaves it unusable."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._reader: Any = Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=_NO_REPLY,
            encoding="utf-8",
            errors="replace",
        )
        self._replies: list[Any] = []
        self._allocate: Allocate | None = None
        """Allocates memory for the values of `receive`; None while replies are of any kind."""
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._end = 0
        """Number of bytes in `scratch` that are not parsed yet."""
        self._value = memoryview(b"")
        """The value being filled, including its line end; empty between values."""
        self._filled = 0
        self._num_wanted = 0
        self._arrived: asyncio.Future[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._error: Exception | None = None

    @classmethod
    async def open(cls, like: Any) -> PayloadConnection:
        """Connects with the address, TLS settings and user of a redis-py connection."""
        made = cls(like.socket_timeout)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(like.socket_connect_timeout):
                if not await made._open_unix(like):
                    context = like.ssl_context.get() if hasattr(like, "ssl_context") else None
                    await loop.create_connection(lambda: made, like.host, like.port, ssl=context)
                    made._keep_alive(like.socket_keepalive_options)
                await made._introduce(like)
        except BaseException:
            made.abort()
            raise
        return made

    async def _open_unix(self, like: Any) -> bool:
        """Connects to the Unix socket; False if there is none beside the server's port."""
        path = getattr(like, "path", None) or getattr(like, "local_path", None)
        if path is None:
            return False
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_unix_connection(lambda: self, path)
        except OSError:
            if hasattr(like, "host"):
                return False
            raise
        enlarge(transport)
        return True

    def _keep_alive(self, options: dict[int, int]) -> None:
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            sock.setsockopt(socket.IPPROTO_TCP, name, value)

    async def _introduce(self, like: Any) -> None:
        commands: list[tuple[str | int, ...]] = []
        if like.username or like.password:
            user = (like.username,) if like.username else ()
            commands.append(("AUTH", *user, like.password or ""))
        if like.db:
            commands.append(("SELECT", like.db))
        packed = [pack_command(cast(Any, command)) for command in commands]
        for reply in await self.exchange(packed, len(packed)):
            if isinstance(reply, Exception):
                raise reply

    @property
    def is_usable(self) -> bool:
        """It is open and has no unexpected replies."""
        assert self._transport is not None
        is_clean = not self._replies and not self._reader.has_data()
        return self._error is None and is_clean and not self._transport.is_closing()

    def abort(self) -> None:
        """Closes it at once, since unsent data lies in memory that others will reuse."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, parts: Sequence[bytes | memoryview], num_replies: int) -> list[Any]:
        """Sends packed commands and returns their replies, including errors."""
        for part in _joined(parts):
            await self._write(part)
        async with asyncio.timeout(self._timeout_s):
            await self._wait_for(num_replies)
        return self._take_replies(num_replies)

    async def receive(self, keys: Sequence[str], allocate: Allocate) -> list[Value]:
        """The values of these keys."""
        self._allocate = allocate
        num_asked = 0
        while len(self._replies) < len(keys):
            num_ahead = self._num_ahead()
            # Never below num_asked: `num_ahead` shrinks when values turn out to be larger.
            upto = max(num_asked, min(len(self._replies) + num_ahead, len(keys)))
            async with asyncio.timeout(self._timeout_s):
                await self._write(b"".join(map(_get, keys[num_asked:upto])))
                num_asked = upto
                halfway = max(len(self._replies) + 1, upto - num_ahead // 2)
                await self._wait_for(upto if upto == len(keys) else halfway)
        self._allocate = None
        return self._take_replies(len(keys))

    def _num_ahead(self) -> int:
        """Number of values to request ahead: few until their size is known."""
        sizes = [len(value) for value in self._replies[-8:] if isinstance(value, memoryview)]
        if not sizes:
            return 4
        return max(2, _BYTES_AHEAD * len(sizes) // (sum(sizes) + 64 * len(sizes)))

    async def _write(self, data: bytes | memoryview) -> None:
        if self._error is not None:
            raise self._error
        assert self._transport is not None
        self._transport.write(data)
        if not self._may_write.is_set():
            async with asyncio.timeout(self._timeout_s):
                await self._may_write.wait()

    async def _wait_for(self, num_replies: int) -> None:
        """Waits for so many replies in total. Raises the error that ended the connection."""
        self._num_wanted = num_replies
        self._arrived = asyncio.get_running_loop().create_future()
        self._wake()
        await self._arrived

    def _take_replies(self, num_wanted: int) -> list[Any]:
        """Raises InvalidResponse if more or fewer arrived: they cannot be matched to commands."""
        replies, self._replies = self._replies, []
        if len(replies) != num_wanted or self._end or self._value:
            raise exceptions.InvalidResponse(
                f"{num_wanted} commands got {len(replies)} replies and {self._end} further bytes"
            )
        return replies

    def _wake(self) -> None:
        if self._arrived is None or self._arrived.done():
            return
        if self._error is not None:
            self._arrived.set_exception(self._error)
        elif len(self._replies) >= self._num_wanted:
            self._arrived.set_result(None)

    # Called by the transport -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._value[self._filled :] if self._value else self._scratch[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._value:
                self._filled += nbytes
                if self._filled == len(self._value):
                    self._finish_value()
            elif self._allocate is not None:
                self._end += nbytes
                self._read_scratch(self._allocate)
            else:
                self._reader.feed(self._scratch, 0, nbytes)
                while (reply := self._reader.gets()) is not _NO_REPLY:
                    self._replies.append(reply)
        except Exception as error:
            self._error = error
        self._wake()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        why = exc or "the server closed it"
        self._error = exceptions.ConnectionError(f"lost the connection to Redis: {why}")
        self._may_write.set()
        self._wake()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # Values ----------------------------------------------------------------------------------

    def _read_scratch(self, allocate: Allocate) -> None:
        start = 0
        while not self._value and start < self._end:
            text = bytes(self._scratch[start : min(start + _LONGEST_LINE_BYTES, self._end)])
            line, end, _ = text.partition(_END)
            if not end:
                if len(text) == _LONGEST_LINE_BYTES:
                    raise exceptions.InvalidResponse(f"no end of the line {text[:40]!r}")
                break
            start = self._read_line(line, start + len(line) + len(_END), allocate)
        self._scratch[: self._end - start] = self._scratch[start : self._end]
        self._end -= start

    def _read_line(self, line: bytes, start: int, allocate: Allocate) -> int:
        """Parses the head of a reply; returns where in `scratch` the next one begins."""
        if line == b"$-1":
            self._replies.append(None)
        elif line[:1] == b"-":
            text = line[1:].decode(errors="replace")
            self._replies.append(BaseParser.parse_error(text))  # type: ignore[no-untyped-call]
        elif line[:1] == b"$":
            self._value = allocate(int(line[1:]) + len(_END))
            self._filled = min(len(self._value), self._end - start)
            self._value[: self._filled] = self._scratch[start : start + self._filled]
            start += self._filled
            if self._filled == len(self._value):
                self._finish_value()
        else:
            raise exceptions.InvalidResponse(f"GET got the reply {line[:40]!r}")
        return start

    def _finish_value(self) -> None:
        value, self._value = self._value, memoryview(b"")
        if value[-len(_END) :] != _END:
            raise exceptions.InvalidResponse("a value does not match its declared length")
        self._replies.append(value[: -len(_END)].toreadonly())


def enlarge(transport: asyncio.BaseTransport) -> None:
    """Gives a Unix socket room to send; the kernel lets only that of TCP grow by itself."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)


def _get(key: str) -> bytes:
    raw = key.encode()
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(raw), raw)


def _joined(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of about _PIECE_BYTES.

    Small parts are joined to save system calls; large ones are cut because asyncio copies whatever
    the socket does not take at once.
    """
    small: list[bytes | memoryview] = []
    num_bytes = 0
    for part in parts:
        if len(part) >= _PIECE_BYTES:
            yield b"".join(small)
            small, num_bytes = [], 0
            view = memoryview(part)
            for start in range(0, len(view), _PIECE_BYTES):
                yield view[start : start + _PIECE_BYTES]
            continue
        small.append(part)
        num_bytes += len(part)
        if num_bytes >= _PIECE_BYTES:
            yield b"".join(small)
            small, num_bytes = [], 0
    yield b"".join(small)
