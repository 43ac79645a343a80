"""Sends the messages of several tasks of one process to one shard in one round trip.

    send ──┐             ┌─ a sender is free: all that wait, up to a bound ──> exchange ─┐
    send ──┼── waiting ──┤                                                               │
    send ──┘             └─ else they wait for one          to each its own reply <──────┘

There is no timer: the first message is sent at once, and those that arrive meanwhile form the next
batch. A message is built only when it is sent, in memory that is reused once its batch has its
replies: a hundred pushing tasks hold at most two batches of bytes.

Cancelling a task withdraws its message if that is still waiting; otherwise only the reply is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from buffer.redis.payloads import Allocate, Arena
from buffer.redis.wakeups import BufferClosedError

MAX_MESSAGES = 32
MAX_BYTES = 1 << 22
"""Size of one batch; a larger message is sent alone."""
_AT_ONCE = 2  # the next batch is built while the server works on one
_ARENA_BYTES = 2 * MAX_BYTES


class Message(NamedTuple):
    """Commands in wire format."""

    parts: Sequence[bytes | memoryview]
    num_replies: int
    arguments: Sequence[str | int | bytes] = ()
    """For the script that runs once after the messages of a batch."""


Make = Callable[[Allocate], Message]
"""Builds a message in memory that stays valid until the reply. May be called in any task."""
Exchange = Callable[[Sequence[Message]], Awaitable[Sequence[Any]]]
"""Sends the messages in order and returns for each its reply or an exception."""


@dataclass(slots=True, eq=False)
class _Waiting:
    make: Make
    num_bytes: int
    reply: asyncio.Future[Any]


class Batcher:
    """Used from one event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._waiting: deque[_Waiting] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._arenas: list[Arena] = []
        self._is_closed = False

    async def send(self, make: Make, num_bytes: int) -> Any:
        """The reply to the message. Raises an error reply, and what `make` raises.

        `num_bytes` is the message's approximate size.
        """
        if self._is_closed:
            raise BufferClosedError("the buffer was closed before this call")
        item = _Waiting(make, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        if len(self._senders) < _AT_ONCE:
            self._senders.add(asyncio.create_task(self._send_all(), name="push-batches"))
        return await item.reply

    async def close(self) -> None:
        """Ends every `send` with BufferClosedError."""
        self._is_closed = True
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        _fail(self._waiting, BufferClosedError("the buffer was closed during this call"))
        self._waiting.clear()

    async def _send_all(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        arena = self._arenas.pop() if self._arenas else Arena(_ARENA_BYTES)
        try:
            while batch := self._next_batch():
                await self._send(batch, arena)
                arena.clear()
        finally:
            self._arenas.append(arena)
            self._senders.discard(me)  # at once: the next `send` must not rely on this one

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        num_bytes = 0
        while self._waiting and len(batch) < MAX_MESSAGES:
            num_bytes += self._waiting[0].num_bytes
            if batch and num_bytes > MAX_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: Sequence[_Waiting], arena: Arena) -> None:
        made: list[_Waiting] = []
        messages: list[Message] = []
        for item in batch:
            if item.reply.done():  # cancelled
                continue
            try:
                messages.append(item.make(arena.take))
                made.append(item)
            except Exception as error:
                _fail([item], error)
        if not made:
            return
        try:
            replies = await self._exchange(messages)
        except asyncio.CancelledError:
            _fail(made, BufferClosedError("the buffer was closed during this call"))
            raise
        except Exception as error:
            _fail(made, error)
            return
        for item, reply in zip(made, replies, strict=True):
            if isinstance(reply, Exception):
                _fail([item], reply)
            elif not item.reply.done():
                item.reply.set_result(reply)


def _fail(items: Iterable[_Waiting], error: Exception) -> None:
    for item in items:
        if not item.reply.done():
            item.reply.set_exception(error)
