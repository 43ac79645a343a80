"""Hands groups over to a shard, waits while it is full, and keeps them until they are safe.

    room at the keeper ──> encode, payload + commit ──┬──> stored ──> kept until it is on disk
                                      ▲               └──> full
                                      │                     │ stand in line (one line a shard)
                                      └──── there is room ──┘ woken by wake:room

A payload is large, so one that was refused is sent again only when the shard says that it has room,
and only by the first in line: a hundred blocked groups do not all race for the place of one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic

from buffer.durability import PushKeeper
from buffer.errors import BufferFullError
from buffer.redis.keys import check_group_id
from buffer.redis.payloads import Allocate, fresh
from buffer.redis.wakeups import Deadline, WakeStreams
from buffer.results import PushResult
from buffer.shard import PushRecord, PushReply, Shard
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import split_payload
from buffer.wire.codec import encode_into


class Pusher:
    """Pushes to one shard, as one process does it."""

    def __init__(self, shard: Shard, keeper: PushKeeper, wake: WakeStreams) -> None:
        self._shard = shard
        self._keeper = keeper
        self._wake = wake
        self._line = asyncio.Lock()
        """Held by the one blocked push that waits for room; the others wait for it, in order."""

    async def push(self, group: TrajectoryGroup, timeout_s: float, *, compress: bool) -> PushResult:
        """See ReplayBuffer.push."""
        deadline = Deadline(timeout_s)
        pending = PendingPush(group, compress)
        ticket = await self._keeper.room(pending.memory_bytes, deadline.left_s)
        result = await self._send(pending, deadline)
        again = partial(self._send_again, pending, timeout_s)
        self._keeper.keep(ticket, pending.memory_bytes, again)
        return result

    async def flush(self, timeout_s: float) -> bool:
        return await self._keeper.flush(timeout_s)

    async def close(self) -> None:
        await self._keeper.close()
        await self._shard.close()

    async def _send(self, pending: PendingPush, deadline: Deadline) -> PushResult:
        if not self._line.locked():
            reply = await self._commit(pending, blocked_ms=0)
            if reply.word != "full":
                return PushResult(reply.word)
            if reply.on_full == "error":
                raise BufferFullError(_fullness(pending, reply))
        return await self._send_when_there_is_room(pending, deadline)

    async def _send_again(self, pending: PendingPush, timeout_s: float) -> None:
        """For a group that the server had acknowledged and lost: it waits whatever on_full says."""
        await self._send_when_there_is_room(pending, Deadline(timeout_s))

    async def _send_when_there_is_room(
        self, pending: PendingPush, deadline: Deadline
    ) -> PushResult:
        blocked_at = monotonic()
        await self._stand_in_line(pending, deadline)
        try:
            while True:
                self._wake.check_open()  # the one before in line may have ended by `close`
                await self._wait_for_room(pending, deadline)
                blocked_ms = int(1000 * (monotonic() - blocked_at))
                reply = await self._commit(pending, max(1, blocked_ms))
                if reply.word != "full":  # else another process was faster
                    return PushResult(reply.word)
        finally:
            self._line.release()

    async def _stand_in_line(self, pending: PendingPush, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._line.acquire()
        except TimeoutError:
            space = await self._shard.has_space(pending.num_bytes)
            raise _timeout(pending, deadline, space.groups, space.bytes) from None

    async def _wait_for_room(self, pending: PendingPush, deadline: Deadline) -> None:
        while not (space := await self._shard.has_space(pending.num_bytes)).has_room:
            if not deadline.left_s:
                raise _timeout(pending, deadline, space.groups, space.bytes)
            await self._wake.wait({self._shard.keys.wake("room"): space.last_wake}, deadline.left_s)

    async def _commit(self, pending: PendingPush, blocked_ms: int) -> PushReply:
        while True:
            reply = await self._shard.push(pending.pack, pending.memory_bytes, blocked_ms)
            if reply.word == "too_large":
                raise ValueError(
                    f"group {pending.group_id} has {pending.num_bytes} bytes and a shard of this "
                    f"buffer may hold {reply.capacity_bytes}: raise buffer.capacity_bytes"
                )
            if reply.word not in ("missing", "again"):
                return reply


class PendingPush:
    """A group on its way, encoded whenever it is sent: rarely twice, so its bytes are not kept."""

    __slots__ = ("_compress", "_group", "_num_bytes", "memory_bytes")

    def __init__(self, group: TrajectoryGroup, compress: bool) -> None:
        self._group = group
        self._compress = compress
        self._num_bytes: int | None = None
        self.memory_bytes = group.num_bytes
        """What it takes while it is kept."""

    @property
    def group_id(self) -> str:
        return self._group.group_id

    @property
    def num_bytes(self) -> int:
        """Of its payload."""
        if self._num_bytes is None:
            self.pack(fresh)
        assert self._num_bytes is not None
        return self._num_bytes

    def pack(self, allocate: Allocate) -> tuple[PushRecord, list[bytes | memoryview]]:
        """Raises ValueError if the group cannot be encoded."""
        group = self._group
        chunks = split_payload(encode_into(allocate, group, self._compress))
        self._num_bytes = sum(map(len, chunks))
        versions = group.tokens_by_version
        record = PushRecord(
            group_id=check_group_id(group.group_id),
            min_version=min(versions),
            max_version=max(versions),
            versions=" ".join(f"{version}:{number}" for version, number in versions.items()),
            tokens=group.num_tokens,
            trainable=sum(versions.values()),
            bytes=self._num_bytes,
            task=group.prompt.task,
            index=group.prompt.index,
            attempt=group.prompt.attempt,
        )
        return record, chunks


def _fullness(pending: PendingPush, reply: PushReply) -> str:
    limits = (
        f"{reply.groups} of {_limit(reply.capacity_groups)} groups, "
        f"{reply.bytes} of {_limit(reply.capacity_bytes)} bytes"
    )
    return (
        f"no room for group {pending.group_id} ({pending.num_bytes} bytes): its shard holds "
        f"{limits}; raise buffer.capacity_groups or buffer.capacity_bytes, or set "
        "buffer.on_full=block"
    )


def _limit(capacity: int | None) -> str:
    return "any number of" if capacity is None else str(capacity)


def _timeout(pending: PendingPush, deadline: Deadline, groups: int, num_bytes: int) -> TimeoutError:
    return TimeoutError(
        f"no room for group {pending.group_id} ({pending.num_bytes} bytes) within "
        f"{deadline.timeout_s:g} s: its shard is full with {groups} groups and {num_bytes} bytes "
        "that are ready or leased, and the trainer took none; raise buffer.capacity_groups or "
        "buffer.capacity_bytes, or buffer.wait_timeout_s"
    )
