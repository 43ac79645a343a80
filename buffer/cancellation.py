"""Makes a wait for Redis end when the task that waits is cancelled.

redis-py sends through `asyncio.wait_for`, which in Python 3.11 drops a cancellation that arrives in
the same turn of the loop in which the bytes are written. The command then goes on as if nothing had
been asked, and a worker that is told to stop blocks for ever. The connections below send without
it, which also saves a task for each command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

T = TypeVar("T")

_ASK_AGAIN_S = 0.01


class _CancellableSend:
    """For a connection of redis-py: `send_packed_command` without `wait_for`."""

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


class TcpConnection(_CancellableSend, Connection):
    """redis://"""


class TlsConnection(_CancellableSend, SSLConnection):
    """rediss://"""


class UnixConnection(_CancellableSend, UnixDomainSocketConnection):
    """unix://"""


async def cancellable(reply: Awaitable[T]) -> T:
    """Awaits `reply` so that no cancellation is lost; the command may still have been applied."""
    task = asyncio.ensure_future(reply)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        while not task.done():  # one that was dropped is asked for again
            task.cancel()
            await asyncio.wait({task}, timeout=_ASK_AGAIN_S)
        if not task.cancelled():
            task.exception()  # seen: nobody else will ask
        raise
    return task.result()
