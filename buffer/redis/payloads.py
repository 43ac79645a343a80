"""The way of payloads between Redis and the memory in which they are made or used.

    push   a group is encoded into an arena; packed commands and payloads are sent as they are
    lease  GET GET GET ...  ──>  server  ──>  $66016 | payload | $66016 | ...
                                                │         │
                                            scratch    recv_into a block: the value's own memory

redis-py and asyncio would copy each byte two to four times. Only as many values are asked for at
once as make some megabytes, for the server holds in memory what it was asked for.

Memory is used again: what malloc hands out for a payload of a megabyte was given back to the kernel
after the last one, and a fault for each of its pages costs many times what it takes to fill it. A
block is used again once nothing refers to any payload in it.

The connections send without `asyncio.wait_for`, by which redis-py sends. In Python 3.11 it drops a
cancellation that arrives in the same turn of the loop in which the bytes are written: the command
then goes on as if it had not been cancelled, and a worker that is asked to stop blocks for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray
from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

Allocate = Callable[[int], memoryview]
"""Writable memory of so many bytes; what is in it is left from before."""

ALIGNMENT = 64


def fresh(num_bytes: int) -> memoryview:
    """Memory of its own."""
    return np.empty(num_bytes, np.uint8).data


class Arena:
    """One block that is given out piece by piece, until `clear` makes all of it free again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        """What is larger is not kept for the next time."""
        self._block = fresh(0)
        self._used = 0
        self._wanted = 0

    def take(self, num_bytes: int) -> memoryview:
        """A piece that is good until the next `clear`; beyond the block it is memory of its own."""
        start = self._used + -self._used % ALIGNMENT
        end = start + num_bytes
        self._wanted += num_bytes + ALIGNMENT
        if end > len(self._block):
            return fresh(num_bytes)
        self._used = end
        return self._block[start:end]

    def clear(self) -> None:
        """The pieces are not used any more. The block grows to what was wanted this time."""
        if len(self._block) < self._wanted <= self._max_bytes:
            self._block = fresh(self._wanted)
        self._used = self._wanted = 0


BLOCK_BYTES = 8 << 20
BLOCKS_KEPT = 16
"""Free blocks that are kept for the next batch."""


class Blocks:
    """Hands out pieces of blocks. Used in one event loop; pieces may be dropped in any thread."""

    def __init__(self) -> None:
        self._free: deque[NDArray[Any]] = deque(maxlen=BLOCKS_KEPT)
        self._block = memoryview(b"")
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory that stays as it is for as long as this object, or a view of it, lives.

        What would fill half a block gets memory of its own.
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
        lent = memory[:]  # every piece refers to this one, which goes with the last of them
        finalize(lent, self._free.append, memory).atexit = False
        self._block, self._used = lent.data, 0


Value = memoryview | None | Exception
"""What a GET is answered: read-only bytes, None for no such key, or an error reply."""

_BYTES_AHEAD = 4 << 20
_SCRATCH_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 12
_END = b"\r\n"


async def receive(connection: Any, keys: Sequence[str], allocate: Allocate) -> list[Value]:
    """The values of these keys over a connection of redis-py that is ours alone and idle.

    Raises the ConnectionError or TimeoutError of redis-py; the connection is closed then.
    """
    transport = connection._writer.transport
    if transport.is_closing():
        raise exceptions.ConnectionError("Connection closed by server.")
    usual = transport.get_protocol()
    receiver = _Receiver(usual, allocate, connection._parser.parse_error)
    transport.set_protocol(receiver)
    try:
        num_asked = 0
        while len(receiver.values) < len(keys):
            num_ahead = receiver.num_ahead()
            # Never back: values that turn out larger than those before leave fewer to ask for.
            upto = max(num_asked, min(len(receiver.values) + num_ahead, len(keys)))
            transport.write(b"".join(map(_get, keys[num_asked:upto])))
            num_asked = upto
            halfway = max(len(receiver.values) + 1, upto - num_ahead // 2)
            enough = upto if upto == len(keys) else halfway
            async with asyncio.timeout(connection.socket_timeout):
                await receiver.wait_for(enough)
        receiver.check_end(len(keys))
        transport.set_protocol(usual)
    except BaseException as error:  # what is under way would be taken for replies to what is next
        transport.set_protocol(usual)
        transport.abort()
        await connection.disconnect(nowait=True)
        if isinstance(error, TimeoutError):
            raise exceptions.TimeoutError("Redis takes too long for a payload") from None
        raise
    return receiver.values


def _get(key: str) -> bytes:
    raw = key.encode()
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(raw), raw)


class _Receiver(asyncio.BufferedProtocol):
    """Takes the place of a connection's usual protocol while values arrive."""

    def __init__(
        self,
        usual: Any,
        allocate: Allocate,
        parse_error: Callable[[str], Exception],
    ) -> None:
        self.values: list[Value] = []
        self._usual = usual
        self._allocate = allocate
        self._parse_error = parse_error
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._end = 0
        """So much of `scratch` is filled with what is not understood yet."""
        self._value = memoryview(b"")
        """The value that is being filled, with the line end behind it; empty between two."""
        self._filled = 0
        self._num_wanted = 0
        self._done: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def num_ahead(self) -> int:
        """Values to have under way: few until it is known how large they are."""
        sizes = [len(value) for value in self.values[-8:] if isinstance(value, memoryview)]
        if not sizes:
            return 4
        return max(2, _BYTES_AHEAD * len(sizes) // (sum(sizes) + 64 * len(sizes)))

    def check_end(self, num_values: int) -> None:
        """Raises InvalidResponse if anything but these values came: who knows whose they are."""
        if len(self.values) != num_values or self._end or self._value:
            raise exceptions.InvalidResponse(
                f"{num_values} GETs are answered {len(self.values)} values and {self._end} bytes"
            )

    async def wait_for(self, num_values: int) -> None:
        """Until there are so many, in all. Raises the error that ended the connection."""
        self._num_wanted = num_values
        self._done = asyncio.get_running_loop().create_future()
        self._tell()
        await self._done

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._value[self._filled :] if self._value else self._scratch[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._value:
                self._filled += nbytes
                if self._filled == len(self._value):
                    self._finish_value()
            else:
                self._end += nbytes
                self._read_scratch()
        except Exception as error:
            self._error = error
        self._tell()

    def _read_scratch(self) -> None:
        text = self._scratch[: self._end].tobytes()
        start = 0
        while not self._value and (end := text.find(_END, start)) >= 0:
            line, start = text[start:end], end + len(_END)
            start = self._read_line(line, start)
        self._end -= start
        if self._end > _LONGEST_LINE_BYTES:
            raise exceptions.InvalidResponse(f"no end of the line {text[start : start + 40]!r}")
        self._scratch[: self._end] = text[start:]

    def _read_line(self, line: bytes, start: int) -> int:
        """Understands the head of a reply; returns where in `scratch` the next one begins."""
        if line == b"$-1":
            self.values.append(None)
        elif line[:1] == b"-":
            self.values.append(self._parse_error(line[1:].decode(errors="replace")))
        elif line[:1] == b"$":
            self._value = self._allocate(int(line[1:]) + len(_END))
            self._filled = min(len(self._value), self._end - start)
            self._value[: self._filled] = self._scratch[start : start + self._filled]
            start += self._filled
            if self._filled == len(self._value):
                self._finish_value()
        else:
            raise exceptions.InvalidResponse(f"GET is answered {line[:40]!r}")
        return start

    def _finish_value(self) -> None:
        value, self._value = self._value, memoryview(b"")
        if value[-len(_END) :] != _END:
            raise exceptions.InvalidResponse("a value does not end where it was said to")
        self.values.append(value[: -len(_END)].toreadonly())

    def _tell(self) -> None:
        if self._done is None or self._done.done():
            return
        if self._error is not None:
            self._done.set_exception(self._error)
        elif len(self.values) >= self._num_wanted:
            self._done.set_result(None)

    def eof_received(self) -> bool | None:
        self._error = exceptions.ConnectionError("Connection closed by server.")
        self._tell()
        passed_on: bool | None = self._usual.eof_received()
        return passed_on

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = exceptions.ConnectionError(f"lost the connection to Redis: {exc}")
        self._tell()
        self._usual.connection_lost(exc)

    def pause_writing(self) -> None:
        self._usual.pause_writing()

    def resume_writing(self) -> None:
        self._usual.resume_writing()


_PIECE_BYTES = 1 << 18


class _CancellableSend:
    """For a connection of redis-py: `send_packed_command` without `wait_for`, and `exchange`."""

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        connection: Any = self
        if not connection.is_connected:  # with the timeouts of its own
            await connection.connect_check_health(check_health=False)
        limit_s, self.socket_timeout = self.socket_timeout, None  # None: it sends without wait_for
        try:
            async with asyncio.timeout(limit_s):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except TimeoutError:  # the connection is closed already, for it was cancelled in there
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except RuntimeError as error:  # uvloop's, where the kernel has closed the connection
            raise exceptions.ConnectionError(f"lost the connection to Redis: {error}") from None
        finally:
            self.socket_timeout = limit_s

    async def exchange(self, parts: Sequence[bytes | memoryview], num_replies: int) -> list[Any]:
        """Sends packed commands and reads the replies to them, errors among them.

        Raises the ConnectionError or TimeoutError of redis-py; the connection is closed then.
        """
        connection: Any = self
        try:
            async with asyncio.timeout(self.socket_timeout):
                for part in _joined(parts):
                    connection._writer.write(part)
                    await connection._writer.drain()
            replies = []
            async with asyncio.timeout(self.socket_timeout):
                for _ in range(num_replies):
                    replies.append(await connection._parser.read_response(disable_decoding=True))
            return replies
        except BaseException as error:  # old and new replies would be mixed up
            if connection._writer is not None:  # what was not sent lies in memory that is not ours
                connection._writer.transport.abort()
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise exceptions.TimeoutError("Redis takes too long for a batch") from None
            if isinstance(error, OSError | RuntimeError):  # uvloop says it with the latter
                raise exceptions.ConnectionError(f"lost the connection to Redis: {error}") from None
            raise


def _joined(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces that are worth a system call, and small enough.

    asyncio copies what the socket does not take at once, so that should not be much.
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


class TcpConnection(_CancellableSend, Connection):
    """redis://"""


class TlsConnection(_CancellableSend, SSLConnection):
    """rediss://"""


class UnixConnection(_CancellableSend, UnixDomainSocketConnection):
    """unix://"""
