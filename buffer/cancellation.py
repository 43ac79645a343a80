"""Connections whose waits end when the task that waits is cancelled, and that send batches.

redis-py sends through `asyncio.wait_for`, which in Python 3.11 drops a cancellation that arrives in
the same turn of the loop in which the bytes are written. The command then goes on as if nothing had
been asked, and a worker that is told to stop blocks for ever. The connections below send without
it, which also saves a task for each command. Batches that are packed already they send as they are:
redis-py and asyncio would copy megabytes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

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
        except BaseException as error:  # what is under way cannot be told from what comes next
            if connection._writer is not None:  # what was not sent lies in memory that is not ours
                connection._writer.transport.abort()
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise exceptions.TimeoutError("Redis takes too long for a batch") from None
            if isinstance(error, OSError):
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
