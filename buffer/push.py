"""A push: what is sent, the reply, and the errors for a full buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

from buffer.redis.keys import check_group_id
from buffer.redis.payloads import Allocate, fresh
from buffer.redis.replies import optional_int
from buffer.redis.wakeups import Deadline
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import split_payload
from buffer.wire.codec import encode_into

PushWord = Literal[
    "stored", "duplicate", "stale", "abandoned_lineage", "full", "too_large", "missing", "again"
]


class PushReply(NamedTuple):
    """The reply of push_groups.lua about one group."""

    word: PushWord
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

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> PushReply:
        word = cast("PushWord", reply[0].decode())
        if len(reply) == 1:
            return cls(word)
        _, groups, num_bytes, capacity_groups, capacity_bytes, on_full = reply
        limits = optional_int(capacity_groups), optional_int(capacity_bytes)
        return cls(word, int(groups), int(num_bytes), *limits, on_full.decode())


class Space(NamedTuple):
    """Whether a push has room, and what is in use."""

    has_room: bool
    last_wake: str
    groups: int
    bytes: int


class PendingPush:
    """A group being pushed. It is encoded on each send, rarely twice, so no bytes are kept."""

    def __init__(self, group: TrajectoryGroup, compress: bool) -> None:
        self.group_id = check_group_id(group.group_id)
        self.memory_bytes = group.num_bytes
        """Approximate size in memory and on the wire."""
        self._group = group
        self._compress = compress
        self._num_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        if self._num_bytes is None:
            self.encode("", fresh)
        assert self._num_bytes is not None
        return self._num_bytes

    def encode(self, key: str, allocate: Allocate) -> list[tuple[str, bytes | memoryview]]:
        """Keys and values of the payload (one, and further chunks if it is large).

        The values lie in memory of `allocate`. Raises ValueError if the group cannot be encoded.
        """
        chunks = split_payload(encode_into(allocate, self._group, self._compress))
        self._num_bytes = sum(map(len, chunks))
        names = [key, *(f"{key}:{number}" for number in range(1, len(chunks)))]
        return list(zip(names, chunks, strict=True))

    @property
    def arguments(self) -> tuple[str | int, ...]:
        """The group's arguments of push_groups.lua."""
        group = self._group
        versions = group.tokens_by_version
        return (
            self.group_id,
            min(versions),
            max(versions),
            " ".join(f"{version}:{number}" for version, number in versions.items()),
            group.num_tokens,
            sum(versions.values()),
            self.num_bytes,
            group.prompt.task,
            group.prompt.index,
            group.prompt.attempt,
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
