"""A version being received into its slot: where each bucket goes, and which have arrived.

A receiver takes the buckets from the previous member, puts them in place, and forwards them.
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

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from weight_sync import delta
from weight_sync.buckets import Bucket, plan_buckets
from weight_sync.checksums import StreamChecksums, staged_checksums
from weight_sync.errors import ChecksumMismatch
from weight_sync.group import Message, WeightGroup
from weight_sync.group_thread import Staging
from weight_sync.layout import Layout, Manifest, Transfer, mismatches
from weight_sync.receiver.store import Slot


class Arrival:
    """Takes buckets in their global order, across epochs; ignores those that it has already.

    A full version goes straight into its slot, and its checksums are computed as it arrives. A
    delta is collected first and applied once it is complete.
    """

    def __init__(
        self, layout: Layout, transfer: Transfer, slot: Slot | None, base: Slot | None = None
    ) -> None:
        """`slot` is None for a version that is whole already: its buckets are only forwarded.

        `base` is the slot of the version that a delta changes.
        """
        self.transfer = transfer
        self.buckets = plan_buckets(layout, transfer)
        self.slot = slot
        self._base = base
        self.received = len(self.buckets) if slot is None else 0
        """Number of buckets in place: all those with a smaller index."""
        self._layout = layout
        self._sums = [StreamChecksums(layout, rank) for rank in range(layout.num_ranks)]
        self._payloads: list[Tensor] = []
        if slot is not None and not transfer.is_full:
            self._payloads = [torch.empty(n, dtype=torch.uint8) for n in transfer.wire_bytes]

    @property
    def max_bucket_bytes(self) -> int:
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    def place_of(self, bucket: Bucket) -> Tensor | None:
        if bucket.index < self.received or self.slot is None:
            return None
        if not self.transfer.is_full:
            return self._payloads[bucket.rank][bucket.start : bucket.stop]
        if (only := bucket.direct) is not None:
            return self.slot.data[only.file_start : only.file_start + only.num_bytes]
        return None

    def take(self, bucket: Bucket, data: Tensor) -> None:
        if bucket.index < self.received:
            return
        assert self.slot is not None and bucket.index == self.received
        if self.transfer.is_full:
            self._sums[bucket.rank].feed(bucket.start, data)
            if bucket.direct is None:
                self._scatter(bucket, data, self.slot.data)
        self.received += 1

    def _scatter(self, bucket: Bucket, data: Tensor, file: Tensor) -> None:
        for extent in bucket.extents:
            start = extent.stream_start - bucket.start
            place = file[extent.file_start : extent.file_start + extent.num_bytes]
            place.copy_(data[start : start + extent.num_bytes])

    def verify(self, slot: Slot, manifest: Manifest) -> None:
        """Apply a delta, and compare the version with its manifest. Raises ChecksumMismatch."""
        what = f"version {manifest.version}"
        if self.received < len(self.buckets):
            raise ChecksumMismatch(
                f"{what} ended after {self.received} of {len(self.buckets)} buckets"
            )
        if wrong := mismatches(self._layout, manifest.checksums, self._checksums(slot)):
            shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
            raise ChecksumMismatch(
                f"{what} did not arrive as it was sent: {len(wrong)} of "
                f"{len(self._layout.tensors)} tensors differ ({shown})"
            )

    def _checksums(self, slot: Slot) -> Sequence[Sequence[int]]:
        if self.transfer.is_full:
            return [sums.result() for sums in self._sums]
        assert self._base is not None, "a delta has a base"
        # Only now: during the transfer other members would have to wait for this copy.
        slot.data.copy_(self._base.data)
        try:
            for rank, payload in enumerate(self._payloads):
                delta.apply(self._layout, rank, payload, slot.data)
        except ValueError as error:
            message = f"the delta of version {self.transfer.version} is damaged: {error}"
            raise ChecksumMismatch(message) from error
        return staged_checksums(self._layout, slot.data)


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
        self._num_buffers = num_buffers
        self._limit = timedelta(seconds=limit_s)
        self._next = group.rank + 1 if group.rank + 1 < group.spec.world_size else None

    def run(self, buckets: Sequence[Bucket]) -> None:
        """Raises WeightSyncError naming the bucket, the peer and the epoch."""
        expected: deque[_Passing] = deque()
        before: _Passing | None = None
        for turn, bucket in enumerate(buckets[: self._num_buffers]):
            expected.append(self._prepare(turn, bucket))
            _, expected[-1].coming = self._group.exchange(None, expected[-1].message)
        for turn in range(self._num_buffers, len(buckets) + self._num_buffers):
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
