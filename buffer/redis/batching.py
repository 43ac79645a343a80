"""Sends what several tasks of one process have for one shard together, in one round trip.

    send ──┐             ┌─ a place is free: all that wait, up to a bound ──> exchange ─┐
    send ──┼── waiting ──┤                                                              │
    send ──┘             └─ else they wait for one      to each its own replies <───────┘

There is no timer: the first message goes out at once, and those that come meanwhile go together
next. A message is made only when it leaves, in memory that is used again as soon as its batch is
answered: a hundred tasks that push hold no more than two batches of bytes.

A batch belongs to none of the tasks. One that is cancelled takes its message along if it is still
waiting, and otherwise misses only the reply.
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
"""Of one batch; a message that is larger goes alone."""
_AT_ONCE = 2  # while the server works on one batch, the next is made
_ARENA_BYTES = 2 * MAX_BYTES


class Message(NamedTuple):
    """Commands as they go over the wire."""

    parts: Sequence[bytes | memoryview]
    num_replies: int
    arguments: Sequence[str | int | bytes] = ()
    """For the script that is run once behind the messages of a batch."""


Make = Callable[[Allocate], Message]
"""Makes a message in memory that is good until it is answered. May be called in any task."""
Exchange = Callable[[Sequence[Message]], Awaitable[Sequence[Any]]]
"""Sends the messages in their order; for each what it is answered, or an exception."""


@dataclass(slots=True, eq=False)
class _Waiting:
    make: Make
    num_bytes: int
    answer: asyncio.Future[Any]


class Batcher:
    """Used from one event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._waiting: deque[_Waiting] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._arenas: list[Arena] = []
        self._is_closed = False

    async def send(self, make: Make, num_bytes: int) -> Any:
        """What the message is answered; raises the exception that it is answered instead.

        Also raises what `make` raises. `num_bytes` is about how many there will be.
        """
        if self._is_closed:
            raise BufferClosedError("the buffer was closed before this call")
        item = _Waiting(make, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        if len(self._senders) < _AT_ONCE:
            self._senders.add(asyncio.create_task(self._send_all(), name="push-batches"))
        return await item.answer

    async def close(self) -> None:
        """Ends every `send` with BufferClosedError."""
        self._is_closed = True
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        _fail(self._waiting, BufferClosedError("the buffer was closed while this call was in it"))
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
            self._senders.discard(me)  # at once: who comes next must not count on this one

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
            if item.answer.done():  # cancelled
                continue
            try:
                messages.append(item.make(arena.take))
                made.append(item)
            except Exception as error:
                _fail([item], error)
        if not made:
            return
        try:
            answers = await self._exchange(messages)
        except asyncio.CancelledError:
            _fail(made, BufferClosedError("the buffer was closed while this call was in it"))
            raise
        except Exception as error:
            _fail(made, error)
            return
        for item, answer in zip(made, answers, strict=True):
            if isinstance(answer, Exception):
                _fail([item], answer)
            elif not item.answer.done():
                item.answer.set_result(answer)


def _fail(items: Iterable[_Waiting], error: Exception) -> None:
    for item in items:
        if not item.answer.done():
            item.answer.set_exception(error)
