"""One receiver's pass over the buckets: receive from the previous member, place, forward.

num_buffers receives are always posted ahead. While a bucket is checked and put in place, the next
ones arrive, and the bucket itself is forwarded down the chain:

    receive    2   3   4   5        (posted ahead)
    place      0   1   2   3
    forward    0   1   2   3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Work

from weight_sync.buckets import Bucket
from weight_sync.group import Message, WeightGroup
from weight_sync.receiver.arrival import Arrival
from weight_sync.staging import Staging


@dataclass(kw_only=True, slots=True)
class _Passing:
    """A bucket while it passes through this receiver."""

    bucket: Bucket
    place: Tensor | None
    message: Message
    coming: Work | None = None
    leaving: Work | None = None


class Relay:
    """Used by one thread."""

    def __init__(
        self,
        group: WeightGroup,
        staging: Staging,
        arrival: Arrival,
        *,
        num_buffers: int,
        limit_s: float,
    ) -> None:
        """`staging` has num_buffers + 1 buffers: for the ones that arrive and the one forwarded.

        `limit_s`: longest wait for one bucket.
        """
        self._group = group
        self._staging = staging
        self._arrival = arrival
        self._ahead = num_buffers
        self._limit = timedelta(seconds=limit_s)
        self._next = group.rank + 1 if group.rank + 1 < group.spec.world_size else None

    def run(self, buckets: Sequence[Bucket]) -> None:
        """Raises WeightSyncError naming the bucket, the peer and the epoch."""
        expected: deque[_Passing] = deque()
        before: _Passing | None = None
        with self._staging.side_stream():
            for turn, bucket in enumerate(buckets[: self._ahead]):
                expected.append(self._prepare(turn, bucket))
                _, expected[-1].coming = self._group.exchange(None, expected[-1].message)
            for turn in range(self._ahead, len(buckets) + self._ahead):
                current = expected.popleft()
                self._wait_here(current)
                if before is not None:
                    self._wait_gone(before)
                if turn < len(buckets):  # into the buffer that `before` has left
                    expected.append(self._prepare(turn, buckets[turn]))
                self._exchange(current, expected[-1] if turn < len(buckets) else None)
                data = self._staging.download(current.message.tensor, current.place)
                self._arrival.take(current.bucket, data)
                before = current
            if before is not None:
                self._wait_gone(before)

    def _prepare(self, turn: int, bucket: Bucket) -> _Passing:
        is_first = self._group.rank == self._group.spec.num_senders
        source = bucket.rank if is_first else self._group.rank - 1
        place = self._arrival.place_of(bucket)
        wire = self._staging.room(turn, bucket.num_bytes, place)
        return _Passing(bucket=bucket, place=place, message=Message(wire, source, bucket.index))

    def _exchange(self, current: _Passing, following: _Passing | None) -> None:
        onward = None
        if self._next is not None:
            onward = Message(current.message.tensor, self._next, current.bucket.index)
        expected = None if following is None else following.message
        current.leaving, coming = self._group.exchange(onward, expected)
        if following is not None:
            following.coming = coming

    def _wait_here(self, passing: _Passing) -> None:
        assert passing.coming is not None
        with self._group.naming(f"receiving bucket {passing.bucket.index}", passing.message.peer):
            passing.coming.wait(self._limit)

    def _wait_gone(self, passing: _Passing) -> None:
        if passing.leaving is not None and self._next is not None:
            with self._group.naming(f"forwarding bucket {passing.bucket.index}", self._next):
                passing.leaving.wait(self._limit)
