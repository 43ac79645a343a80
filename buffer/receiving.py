"""Reads large values from Redis straight into the memory in which they are to stay.

    GET GET GET ...  ──>  server  ──>  $66016\r\n | payload ... \r\n | $66016\r\n | ...
                                            │           │
                                        scratch      recv_into: the value's own memory

redis-py and asyncio would copy each byte four times on its way. Only as many values are asked for
at once as make some megabytes, for the server holds in memory what it was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis import exceptions

from buffer.arena import Allocate

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
