"""Keeps what was pushed until the server has it on disk, and pushes it again if it was lost.

    room ──> push ──> keep ──┐                       ┌─> same server: on disk, forgotten
                             ├─ SET marker, WAITAOF, ┤
    room ──> push ──> keep ──┘  WAIT, INFO at once   └─> another one: pushed again, then asked again

A server that was killed comes back without the last second of its log, or with an empty disk; a
replica takes over without what had not reached it. Both show another run_id. To push again what the
server still has changes nothing, for a push is idempotent. Where there are replicas, a push is kept
until one of them has it, too. Pushing again is a task of its own, for it may wait for room; what is
on disk is forgotten meanwhile.

One keeper looks after one hash tag: all of it lives in one server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from buffer.redis.wakeups import BufferClosedError

Ticket = str
"""The server that was there before a push: its run_id."""

_ROUND_EVERY_S = 0.2  # pushes in between share a round trip
_LONGEST_PAUSE_S = 5.0
_WAIT_MS = 5_000
_NEVER = float("-inf")
_MARKER_EXPIRY_MS = 60_000
_SETTLE_S = 2.5
"""Without WAITAOF: after this long, a server with a healthy disk has called fsync (each second)."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    num_bytes: int
    again: Callable[[], Awaitable[object]]
    server: Ticket
    at: float = field(default_factory=time.monotonic)
    trouble: str = ""
    """Why it could not be pushed again, the last time that this was tried."""
    is_told: bool = False
    """Whether an error of `again` was told already."""


@dataclass(slots=True, frozen=True)
class _Answer:
    """What one round trip told: the server, and until when what it had been sent is on disk."""

    server: Ticket
    durable_until: float


class PushKeeper:
    """What this process pushed below one hash tag and the server may still lose.

    Before a push take a ticket from `room`, after it hand in the ticket with `keep`. Nothing is
    sent while nothing is kept. Used from one event loop.
    """

    def __init__(self, redis: Redis, marker: str, *, max_bytes: int = 1 << 28) -> None:
        """`marker` is a key below the hash tag, written before each question."""
        self._redis = redis
        self._marker = marker
        self._max_bytes = max_bytes
        self._server: Ticket | None = None
        self._kept: dict[int, _Kept] = {}  # in the order of the pushes
        self._bytes = 0
        self._numbers = count()
        self._changed = asyncio.Condition()  # guards nothing: it tells of every change of _kept
        self._task: asyncio.Task[None] | None = None
        self._again: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_replicas = 0
        self._error: Exception | None = None
        self._can_wait_aof = True
        self._has_warned = False
        self.num_repushed = 0
        """Pushes that were made again."""

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    async def room(self, num_bytes: int, timeout_s: float) -> Ticket:
        """Waits until that much may be kept; something larger than all room is kept alone.

        Raises TimeoutError, BufferClosedError once `close` is called, and what went wrong with
        what is kept already, if something did.
        """

        def has_room() -> bool:
            free = self._max_bytes - self._bytes
            return self._is_over or not self._kept or num_bytes <= free

        self._start()
        if not await self._wait_until(has_room, timeout_s):
            raise TimeoutError(
                f"{self.num_kept} pushed groups ({self._bytes} bytes) are not on the disk of Redis "
                f"and at a replica, if it has one, after {timeout_s:g} s: see its log, INFO "
                f"persistence and INFO replication for what is slow{self._troubles}"
            )
        self._raise_error()
        if self._server is None:
            _, info = self._read(*await self._after_marker())
            self._server = info["run_id"]
        return self._server

    def keep(self, ticket: Ticket, num_bytes: int, again: Callable[[], Awaitable[object]]) -> None:
        """Keeps a push that the server has acknowledged; `again` repeats it, whatever its reply.

        Nothing is kept once `close` is called.
        """
        if self._is_closed:
            return
        self._kept[next(self._numbers)] = _Kept(num_bytes, again, ticket)
        self._bytes += num_bytes
        self._start()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all that is kept now is on disk. Whether it came so far in time.

        Raises BufferClosedError once `close` is called, for then it will never be known. Raises
        what went wrong with what is kept, if something did; the same call again goes on waiting.
        """
        newest = max(self._kept, default=-1)

        def is_flushed() -> bool:
            return self._is_over or min(self._kept, default=newest + 1) > newest

        self._start()
        is_done = await self._wait_until(is_flushed, timeout_s)
        self._raise_error()
        return is_done

    async def close(self) -> None:
        """Ends every wait with BufferClosedError, and forgets what is kept; `flush` first."""
        self._is_closed = True
        tasks = [task for task in (self._task, self._again) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kept.clear()
        self._bytes = 0
        await self._tell()

    def _start(self) -> None:
        if self._kept and (self._task is None or self._task.done()) and not self._is_closed:
            self._task = asyncio.create_task(self._watch(), name="push-keeper")

    @property
    def _is_over(self) -> bool:
        """Whether every wait ends now: `_raise_error` says why."""
        return self._is_closed or self._error is not None

    @property
    def _troubles(self) -> str:
        troubles = [kept.trouble for kept in self._kept.values() if kept.trouble]
        if not troubles:
            return ""
        return f"; {len(troubles)} of them it lost and did not take again yet: {troubles[0]}"

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        if condition():
            return True
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(condition)
        return condition()

    def _raise_error(self) -> None:
        if self._is_closed:
            raise BufferClosedError("the buffer was closed before what it kept was on disk")
        if self._error is not None:
            error, self._error = self._error, None  # the next push may find that it is over
            self._start()  # for the others who wait
            raise error

    async def _watch(self) -> None:
        """Runs while something is kept."""
        pause_s = _ROUND_EVERY_S
        try:
            while self._kept:
                await asyncio.sleep(pause_s)
                try:
                    await self._round()
                    pause_s = _ROUND_EVERY_S
                except (exceptions.RedisError, OSError) as error:
                    # Nothing is known of what is kept, so it stays.
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    _log.warning("Redis does not tell what is on its disk yet: %s", error)
        except Exception as error:  # told by the next room() or flush(), which start this again
            self._error = error
        finally:
            await self._tell()

    async def _round(self) -> None:
        asked_at = time.monotonic()
        answer = await (self._ask() if self._can_wait_aof else self._ask_without_waitaof())
        self._server = answer.server
        for number, kept in list(self._kept.items()):
            is_there = kept.server == answer.server
            if is_there and kept.at <= min(asked_at, answer.durable_until):
                del self._kept[number]
                self._bytes -= kept.num_bytes
        if self._lost() and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._push_again(), name="push-again")
        await self._tell()

    def _lost(self) -> list[_Kept]:
        """What was pushed to another server than the one that answered last, in order."""
        return [kept for kept in self._kept.values() if kept.server != self._server]

    async def _push_again(self) -> None:
        """Runs while something is lost. What cannot be pushed holds up nothing behind it."""
        pause_s = _ROUND_EVERY_S
        logged: set[str] = set()
        while lost := self._lost():
            for kept in lost:
                server = self._server
                assert server is not None  # a round has started this
                if kept.server == server:  # it had only been out of reach
                    continue
                try:
                    await kept.again()
                except BufferClosedError:  # `close` follows
                    return
                except Exception as error:
                    await self._note(kept, error, logged)
                else:
                    # Whether that reached the server that answered is for the next round to see.
                    kept.server, kept.at, kept.trouble = server, time.monotonic(), ""
                    self.num_repushed += 1
            if any(kept.trouble for kept in lost):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _note(self, kept: _Kept, error: Exception, logged: set[str]) -> None:
        """That a group could not be pushed again. It stays, and will be tried again."""
        kept.trouble = str(error)
        if kept.trouble not in logged:
            logged.add(kept.trouble)
            _log.warning("Redis lost a pushed group and did not take it again yet: %s", error)
        # No server and no room (TimeoutError, an OSError) pass by themselves.
        if not isinstance(error, exceptions.RedisError | OSError) and not kept.is_told:
            kept.is_told = True
            self._error = self._error or error
            await self._tell()

    async def _ask(self) -> _Answer:
        """Waits at the server until the marker, and with it all that came before, is on disk."""
        asked_at = time.monotonic()
        synced, *rest = await self._after_marker(("WAITAOF", 1, 0, _WAIT_MS))
        is_replicated, info = self._read(*rest)
        if isinstance(synced, exceptions.ResponseError):
            text = str(synced).lower()
            if "appendonly is disabled" in text:
                self._warn_of_no_log()
                return _Answer(info["run_id"], asked_at if is_replicated else _NEVER)
            if "unknown command" in text or isinstance(synced, exceptions.NoPermissionError):
                self._can_wait_aof = False
                return await self._ask_without_waitaof()
            raise synced
        is_safe = synced[0] >= 1 and is_replicated
        return _Answer(info["run_id"], asked_at if is_safe else _NEVER)

    async def _ask_without_waitaof(self) -> _Answer:
        """What Redis before 7.2 can tell: that it is the same one, and that no fsync is late."""
        asked_at = time.monotonic()
        is_replicated, info = self._read(*await self._after_marker())
        if not info["aof_enabled"]:
            self._warn_of_no_log()
            return _Answer(info["run_id"], asked_at if is_replicated else _NEVER)
        is_late = info.get("aof_pending_bio_fsync", 0) > 0
        is_safe = info["aof_last_write_status"] == "ok" and not is_late and is_replicated
        return _Answer(info["run_id"], asked_at - _SETTLE_S if is_safe else _NEVER)

    async def _after_marker(self, *commands: tuple[object, ...]) -> list[Any]:
        """Replies to the commands, to WAIT, and to INFO, all after a write of this connection."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._marker, "", px=_MARKER_EXPIRY_MS)
            for command in commands:
                pipe.execute_command(*command)
            # Without a replica it would wait for nothing; so it goes by what the last round saw.
            pipe.execute_command("WAIT", min(1, self._num_replicas), _WAIT_MS)
            pipe.info("server", "replication", "persistence")
            written, *replies = await pipe.execute(raise_on_error=False)
        if isinstance(written, Exception):
            raise written
        return replies

    def _read(self, num_acknowledged: Any, info: Any) -> tuple[bool, dict[str, Any]]:
        """Whether a replica has it all, if there is any, and the reply to INFO."""
        for reply in (num_acknowledged, info):
            if isinstance(reply, Exception):
                raise reply
        is_replicated = num_acknowledged >= min(1, self._num_replicas)
        # One that is still copying what is there does not count: it may take minutes.
        slaves = (info.get(f"slave{i}", {}) for i in range(info.get("connected_slaves", 0)))
        self._num_replicas = sum(slave.get("state") == "online" for slave in slaves)
        return is_replicated, info

    def _warn_of_no_log(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Redis keeps no append-only file: a crash of it loses pushed groups; "
                "set appendonly yes"
            )

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
