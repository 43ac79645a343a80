"""A push: what is sent, in batches that the tasks of a process share, and what is replied.

    push ──┐             ┌─ a sender is free: all that wait, up to a bound ──> Redis ─┐
    push ──┼── waiting ──┤                                                            │
    push ──┘             └─ else they wait for one         to each its own reply <────┘

There is no timer: the first push is sent at once, and those that arrive meanwhile form the next
batch. A group is encoded only when it is sent, in memory that is reused once its batch has its
replies: a hundred pushing tasks hold at most two batches of bytes.

Cancelling a task withdraws its push if that is still waiting; otherwise only the reply is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from time import monotonic
from typing import Literal

import msgspec

from buffer.errors import BufferFullError
from buffer.redis.client import BufferClosedError
from buffer.redis.deadline import Deadline
from buffer.redis.durability import Durability
from buffer.redis.keys import Keys, check_group_id
from buffer.redis.payloads import Allocate, Arena, fresh
from buffer.redis.replies import Reply
from buffer.redis.scripts import BOUND, Scripts
from buffer.redis.wakeups import Wake, WakeStreams
from buffer.results import PushResult
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import split_payload
from buffer.wire.codec import encode_into

MAX_PUSHES = 32
MAX_BYTES = 1 << 22
"""Size of one batch; a larger push is sent alone."""
_AT_ONCE = 2  # the next batch is built while the server works on one
_ARENA_BYTES = 2 * MAX_BYTES
_ORPHAN_EXPIRY_MS = 600_000
"""A payload whose push is never committed expires after this."""


class PushedGroup(msgspec.Struct, frozen=True):
    """A group, without its payload, as a script gets it."""

    group_id: str
    min_version: int
    max_version: int
    versions: str
    """'version:tokens version:tokens', trainable tokens alone, the oldest version first."""
    tokens: int
    pairs: int
    trainable: int
    bytes: int
    task: str
    index: str
    """In text: Lua would round a large one."""
    attempt: int
    chunks: int
    """Values that follow the payload's first one."""
    blocked_ms: int


class PushReply(Reply):
    """The reply about one group of a push."""

    word: Literal[
        "stored", "duplicate", "stale", "abandoned_lineage", "full", "too_large", "missing", "again"
    ]
    """missing: the payload expired before the commit, send all again. again: the bound on evictions
    was reached, call again. full: nothing was stored and the payload is gone."""
    groups: int = 0
    bytes: int = 0
    """In use (ready and leased), for full and too_large."""
    capacity_groups: int | None = None
    capacity_bytes: int | None = None
    """The limits, for full and too_large."""
    on_full: str = ""
    """For full: block, drop_stalest (only leased groups are left: wait) or error."""


class Space(Reply):
    """The room that a push has, and what is in use."""

    has_room: bool
    seen: Wake
    groups: int
    bytes: int


class PendingPush:
    """A group being pushed. It is encoded on each send, rarely twice, so no bytes are kept."""

    def __init__(self, group: TrajectoryGroup, compress: bool) -> None:
        self.group_id = check_group_id(group.group_id)
        self.memory_bytes = group.num_bytes
        """Approximate size in memory and on the wire."""
        self.blocked_ms = 0
        """How long it has waited for room."""
        self._group = group
        self._compress = compress
        self._num_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        if self._num_bytes is None:
            self.encode(fresh)
        assert self._num_bytes is not None
        return self._num_bytes

    def encode(self, allocate: Allocate) -> list[bytes | memoryview]:
        """The payload as values in memory of `allocate`: one, and further chunks if it is large.

        Raises ValueError if the group cannot be encoded.
        """
        chunks = split_payload(encode_into(allocate, self._group, self._compress))
        self._num_bytes = sum(map(len, chunks))
        return chunks

    def described(self, num_chunks: int) -> PushedGroup:
        group, versions = self._group, self._group.tokens_by_version
        return PushedGroup(
            group_id=self.group_id,
            min_version=min(versions),
            max_version=max(versions),
            versions=" ".join(f"{version}:{number}" for version, number in versions.items()),
            tokens=group.num_tokens,
            pairs=group.num_pairs,
            trainable=sum(versions.values()),
            bytes=self.num_bytes,
            task=group.prompt.task,
            index=str(group.prompt.index),
            attempt=group.prompt.attempt,
            chunks=num_chunks,
            blocked_ms=self.blocked_ms,
        )

    def too_large(self, reply: PushReply) -> str:
        return (
            f"group {self.group_id} has {self.num_bytes} bytes and a shard of this buffer may hold "
            f"{reply.capacity_bytes}: raise buffer.capacity_bytes"
        )

    def full(self, reply: PushReply) -> str:
        return (
            f"no room for group {self.group_id} ({self.num_bytes} bytes): its shard holds "
            f"{reply.groups} of {_limit(reply.capacity_groups)} groups, "
            f"{reply.bytes} of {_limit(reply.capacity_bytes)} bytes; raise buffer.capacity_groups "
            "or buffer.capacity_bytes, or set buffer.on_full=block"
        )

    def timeout(self, deadline: Deadline, space: Space) -> TimeoutError:
        return TimeoutError(
            f"no room for group {self.group_id} ({self.num_bytes} bytes) within "
            f"{deadline.timeout_s:g} s: its shard is full with {space.groups} groups and "
            f"{space.bytes} bytes ready or leased, and the trainer consumed none; raise "
            "buffer.capacity_groups or buffer.capacity_bytes, or buffer.wait_timeout_s"
        )


def _limit(capacity: int | None) -> str:
    return "any number of" if capacity is None else str(capacity)


_Reply = asyncio.Future[PushReply]


class Pushes:
    """Pushes groups to one shard. Used from one event loop."""

    def __init__(
        self, scripts: Scripts, keys: Keys, wake: WakeStreams, durability: Durability
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        self._wake = wake
        self._durability = durability
        self._line = asyncio.Lock()
        """Held by the blocked push that waits for room; the others queue for it in order."""
        self._waiting: deque[tuple[PendingPush, _Reply]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._arenas: list[Arena] = []
        self._is_closed = False

    async def push(self, pending: PendingPush, timeout_s: float) -> PushResult:
        """Stores a group once there is room; see `ReplayBuffer.push`."""
        deadline = Deadline(timeout_s)
        if not self._line.locked():
            reply = await self.store(pending)
            if reply.word != "full":
                return PushResult(reply.word)
            if reply.on_full == "error":
                raise BufferFullError(pending.full(reply))
        # Payloads are large: a refused one is sent again only when there is room, and only by the
        # first in the queue, so that a hundred blocked groups do not race for one place.
        blocked_at = monotonic()
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._line.acquire()
        except TimeoutError:
            raise pending.timeout(deadline, await self._space(pending.num_bytes)) from None
        try:
            while True:
                self._wake.check_open()  # `close` may have ended the push before this one
                while not (space := await self._space(pending.num_bytes)).has_room:
                    if not deadline.left_s:
                        raise pending.timeout(deadline, space)
                    await self._wake.wait([space.seen], deadline.left_s)
                pending.blocked_ms = max(1, int(1000 * (monotonic() - blocked_at)))
                reply = await self.store(pending)
                if reply.word != "full":  # else another process was faster
                    return PushResult(reply.word)
        finally:
            self._line.release()

    async def _space(self, num_bytes: int) -> Space:
        return await self._scripts.run("rollout/check_room", Space, num_bytes=num_bytes)

    async def store(self, pending: PendingPush) -> PushReply:
        """Sends the push, with others in a batch, until it is stored or refused.

        Raises what encoding raises, and an error reply.
        """
        await self._durability.note_server()
        while True:
            if self._is_closed:
                raise BufferClosedError("the buffer was closed before this call")
            replied: _Reply = asyncio.get_running_loop().create_future()
            self._waiting.append((pending, replied))
            if len(self._senders) < _AT_ONCE:
                self._senders.add(asyncio.create_task(self._send_all(), name="push-batches"))
            reply = await replied
            if reply.word == "too_large":
                raise ValueError(pending.too_large(reply))
            if reply.word not in ("missing", "again"):
                return reply

    async def close(self) -> None:
        """Ends every `push` with BufferClosedError."""
        self._is_closed = True
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        _fail((reply for _, reply in self._waiting), _closed())
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
            self._senders.discard(me)  # at once: the next push must not rely on this one

    def _next_batch(self) -> list[tuple[PendingPush, _Reply]]:
        batch: list[tuple[PendingPush, _Reply]] = []
        num_bytes = 0
        while self._waiting and len(batch) < MAX_PUSHES:
            num_bytes += self._waiting[0][0].memory_bytes
            if batch and num_bytes > MAX_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: Sequence[tuple[PendingPush, _Reply]], arena: Arena) -> None:
        """Sends all payloads and one commit in one round trip."""
        sent: list[tuple[_Reply, int]] = []
        parts: list[bytes | memoryview] = []
        groups: list[PushedGroup] = []
        for push, reply in batch:
            if reply.done():  # cancelled
                continue
            try:
                values = push.encode(arena.allocate)
                groups.append(push.described(len(values) - 1))
            except Exception as error:
                _fail([reply], error)
                continue
            parts += _set_commands(self._keys.payload(push.group_id), values)
            sent.append((reply, len(values)))
        if not sent:
            return
        num_sets = sum(number for _, number in sent)
        try:
            *of_sets, answers = await self._scripts.exchange(
                parts,
                num_sets,
                "rollout/push_groups",
                list[PushReply],
                bound=BOUND,
                groups=groups,
            )
        except asyncio.CancelledError:
            _fail((reply for reply, _ in sent), _closed())
            raise
        except Exception as error:
            _fail((reply for reply, _ in sent), error)
            return
        if isinstance(answers, Exception):
            answers = [answers] * len(sent)
        rest = iter(of_sets)
        for (reply, number), answer in zip(sent, answers, strict=True):
            errors = [r for r in (*islice(rest, number), answer) if isinstance(r, Exception)]
            if errors:
                _fail([reply], errors[0])
            elif not reply.done():
                reply.set_result(answer)


def _set_commands(key: str, values: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Packed commands that set the payload unless it exists; it expires unless it is committed.

    The values are not passed through the script because Lua would copy them.
    """
    end = b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n$2\r\nNX\r\n" % (
        len(str(_ORPHAN_EXPIRY_MS)),
        _ORPHAN_EXPIRY_MS,
    )
    for number, value in enumerate(values):
        name = (f"{key}:{number}" if number else key).encode()
        yield b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
        yield value
        yield end


def _closed() -> BufferClosedError:
    return BufferClosedError("the buffer was closed during this call")


def _fail(replies: Iterable[_Reply], error: Exception) -> None:
    for reply in replies:
        if not reply.done():
            reply.set_exception(error)
