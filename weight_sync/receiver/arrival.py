"""A version being received into its slot: where each bucket goes, and which have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weight_sync import delta
from weight_sync.buckets import Bucket, plan_buckets
from weight_sync.checksums import StreamChecksums, staged_checksums
from weight_sync.errors import ChecksumMismatch
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
        if len(transfer.wire_bytes) != layout.num_ranks:
            raise ValueError(
                f"version {transfer.version} comes in {len(transfer.wire_bytes)} streams, its "
                f"layout has {layout.num_ranks}"
            )
        self.transfer = transfer
        self.buckets = plan_buckets(layout, transfer)
        self.slot = slot
        self._base = base
        self.received = len(self.buckets) if slot is None else 0
        """Number of buckets in place: all those with a smaller index."""
        self._layout = layout
        self._sums = [StreamChecksums(layout, rank) for rank in range(layout.num_ranks)]
        self._payloads: list[Tensor] = []
        if slot is not None and self._is_delta:
            self._payloads = [torch.empty(n, dtype=torch.uint8) for n in transfer.wire_bytes]

    @property
    def _is_delta(self) -> bool:
        return self.transfer.base_version is not None

    @property
    def max_bucket_bytes(self) -> int:
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    def place_of(self, bucket: Bucket) -> Tensor | None:
        if bucket.index < self.received or self.slot is None:
            return None
        if self._is_delta:
            return self._payloads[bucket.rank][bucket.start : bucket.stop]
        if (only := bucket.direct) is not None:
            return self.slot.data[only.file_start : only.file_start + only.num_bytes]
        return None

    def take(self, bucket: Bucket, data: Tensor) -> None:
        if bucket.index < self.received:
            return
        assert self.slot is not None and bucket.index == self.received
        if not self._is_delta:
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
                f"{what} ended after {self.received} of {len(self.buckets)} buckets", ()
            )
        if wrong := mismatches(self._layout, manifest.checksums, self._checksums(slot)):
            shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
            raise ChecksumMismatch(
                f"{what} did not arrive as it was sent: {len(wrong)} of "
                f"{len(self._layout.tensors)} tensors differ ({shown})",
                wrong,
            )

    def _checksums(self, slot: Slot) -> Sequence[Sequence[int]]:
        if not self._is_delta:
            return [sums.result() for sums in self._sums]
        assert self._base is not None, "a delta has a base"
        # Only now: during the transfer other members would have to wait for this copy.
        slot.data.copy_(self._base.data)
        try:
            for rank, payload in enumerate(self._payloads):
                delta.apply(self._layout, rank, payload, slot.data)
        except ValueError as error:
            message = f"the delta of version {self.transfer.version} is damaged: {error}"
            raise ChecksumMismatch(message, ()) from error
        return staged_checksums(self._layout, slot.data)
