"""Waits for events in Redis without polling, and lets `close` end every wait.

A waiter remembers the id of the last event before its condition failed and is woken by any later
one, so no event is lost between the check and the wait. All waits of one process on one stream
share a single blocked XREAD:

    wait ──┐
    wait ──┼── _Watch(stream 0) ── XREAD BLOCK 60 s ── server
    wait ──┤
           └── _Watch(stream 1) ── XREAD ...      a wait on several shards: the first event wins
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from buffer.redis.client import BufferClosedError
from buffer.redis.deadline import Deadline

MAX_BLOCK_S = 60.0
"""Longest time that one XREAD blocks at the server."""
LOOK_AGAIN_S = 300.0
"""Longest wait before the condition is checked again: a server crash may lose an event."""

T = TypeVar("T")

Wake = tuple[str, str]
"""A wake stream, and the entry that a waiter has seen."""
_EntryId = tuple[int, int]


class WakeStreams:
    """Blocks on the run's wake streams. Used from one event loop."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._watches: dict[str, _Watch] = {}
        self._is_closed = False

    async def wait_until(
        self,
        key: str,
        read: Callable[[], Awaitable[T]],
        holds: Callable[[T], bool],
        timeout_s: float,
    ) -> T:
        """Reads a value whose changes the stream signals until it `holds`, or for `timeout_s`.

        Returns the value read last.
        """
        deadline = Deadline(timeout_s)
        while True:
            # The stream before the value, or a change between the two would be missed.
            entries: Any = await self._redis.xrevrange(key, count=1)
            value = await read()
            if holds(value) or not deadline.left_s:
                return value
            newest = entries[0][0].decode() if entries else "0-0"
            await self.wait([(key, newest)], deadline.left_s)

    async def wait(self, seen: Sequence[Wake], timeout_s: float) -> bool:
        """Waits until a stream in `seen` has an entry after the one there. False on timeout.

        Check the condition again in either case. Raises BufferClosedError once `close` is called.
        """
        self.check_open()
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watches = [self._watches.setdefault(key, _Watch(self._redis, key)) for key, _ in seen]
        for watch, (_, after) in zip(watches, seen, strict=True):
            watch.add(woken, _parse(after))
        try:
            await asyncio.wait({woken}, timeout=min(timeout_s, LOOK_AGAIN_S))
            if woken.done():
                woken.result()  # raises what ended the watch
            return woken.done()
        finally:
            for watch in watches:
                watch.discard(woken)
            if not woken.cancel() and not woken.cancelled():
                woken.exception()  # marks it as retrieved if this wait was cancelled just now

    def check_open(self) -> None:
        """Raises BufferClosedError once `close` is called."""
        if self._is_closed:
            raise BufferClosedError("the buffer was closed before this call")

    async def close(self) -> None:
        """Ends every wait with BufferClosedError."""
        self._is_closed = True
        for watch in self._watches.values():
            await watch.close()


class _Watch:
    """One stream, the task that reads it, and the waiters for its next entry.

    The task ends once its read returns and nothing waits: cancelling a blocked read would cost the
    connection.
    """

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key
        self._waiters: dict[asyncio.Future[None], _EntryId] = {}
        self._after: _EntryId = (0, 0)
        self._reading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, woken: asyncio.Future[None], seen: _EntryId) -> None:
        self._waiters[woken] = seen
        if self._reading is None or self._reading.done():
            self._start()
        elif seen < self._after:  # the pending read would skip entries since `seen`
            self._reading.cancel()
            self._start()

    def discard(self, woken: asyncio.Future[None]) -> None:
        self._waiters.pop(woken, None)

    async def close(self) -> None:
        closed = BufferClosedError("the buffer was closed during this call")
        self._end_waits(closed)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self) -> None:
        self._after = min(self._waiters.values())
        self._reading = asyncio.create_task(self._read())
        self._tasks.add(self._reading)
        self._reading.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        me = asyncio.current_task()
        try:
            while self._waiters and self._reading is me:
                self._after = min(self._waiters.values())
                after = f"{self._after[0]}-{self._after[1]}"
                block_ms = int(1000 * MAX_BLOCK_S)
                reply: Any = await self._redis.xread({self._key: after}, 1, block_ms)
                if reply:
                    self._wake(_parse(reply[0][1][0][0].decode()))
        except Exception as error:
            self._end_waits(error)

    def _wake(self, newest: _EntryId) -> None:
        for woken in [w for w, seen in self._waiters.items() if seen < newest]:
            del self._waiters[woken]
            if not woken.done():
                woken.set_result(None)

    def _end_waits(self, error: Exception) -> None:
        for woken in self._waiters:
            if not woken.done():
                woken.set_exception(error)
        self._waiters.clear()


def _parse(entry_id: str) -> _EntryId:
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number)
