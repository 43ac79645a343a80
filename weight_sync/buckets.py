"""Splits the bytes that the ranks send into buckets; pure, and the same at every member.

The buckets of a transfer have one global order. Every member sends, receives and forwards in that
order, so no two members can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from tensors.layout import Layout
from weight_sync.types import Transfer

_DIRECT_SHARE = 4
"""An extent of at least a quarter bucket gets a bucket of its own, received straight in place."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Extent:
    """A range that is contiguous both in a stream and in the file. All in bytes."""

    stream_start: int
    file_start: int
    num_bytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Bucket:
    """A range of the bytes that one rank sends, one message on the wire."""

    index: int
    """Place in the global order of the transfer."""
    rank: int
    start: int
    stop: int
    extents: tuple[Extent, ...]
    """Places of its bytes in the file, in order; empty for a delta."""

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def direct(self) -> Extent | None:
        """Its only extent, if it has one: such a bucket can be received straight in place."""
        return self.extents[0] if len(self.extents) == 1 else None


def plan_buckets(layout: Layout, transfer: Transfer) -> tuple[Bucket, ...]:
    """All buckets of the transfer in their global order, in which the ranks take turns.

    Raises ValueError for a transfer that is not of this layout.
    """
    size = transfer.bucket_bytes
    whole = Transfer.full(transfer.version, layout, size)
    if len(transfer.wire_bytes) != layout.num_ranks or (transfer.is_full and transfer != whole):
        raise ValueError(
            f"the transfer of version {transfer.version} has streams of "
            f"{list(transfer.wire_bytes)} bytes, its layout has {list(whole.wire_bytes)}"
        )
    streams = [
        _cut_pieces(layout, rank, size) if transfer.is_full else _cut_delta(rank, num_bytes, size)
        for rank, num_bytes in enumerate(transfer.wire_bytes)
    ]
    in_turns = (bucket for turn in zip_longest(*streams) for bucket in turn if bucket is not None)
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(in_turns))


_NO_INDEX = -1


def _cut_delta(rank: int, num_bytes: int, size: int) -> Iterator[Bucket]:
    for start in range(0, num_bytes, size):
        stop = min(start + size, num_bytes)
        yield Bucket(index=_NO_INDEX, rank=rank, start=start, stop=stop, extents=())


def _cut_pieces(layout: Layout, rank: int, size: int) -> Iterator[Bucket]:
    """Long extents get buckets of their own; short neighbours share one."""
    gathered: list[Extent] = []
    room = size
    for extent in _extents(layout, rank):
        is_long = extent.num_bytes * _DIRECT_SHARE >= size
        if gathered and (is_long or extent.num_bytes > room):
            yield _bucket(rank, gathered)
            gathered, room = [], size
        if is_long:
            yield from (_bucket(rank, [part]) for part in _cut(extent, size))
        else:
            gathered.append(extent)
            room -= extent.num_bytes
    if gathered:
        yield _bucket(rank, gathered)


def _bucket(rank: int, extents: Sequence[Extent]) -> Bucket:
    return Bucket(
        index=_NO_INDEX,
        rank=rank,
        start=extents[0].stream_start,
        stop=extents[-1].stream_start + extents[-1].num_bytes,
        extents=tuple(extents),
    )


def _extents(layout: Layout, rank: int) -> Iterator[Extent]:
    """The rank's pieces, joined where they are also contiguous in the file."""
    current: Extent | None = None
    for piece in layout.pieces[rank]:
        if current and current.file_start + current.num_bytes == piece.file_start:
            current = replace(current, num_bytes=current.num_bytes + piece.num_bytes)
            continue
        if current:
            yield current
        current = Extent(
            stream_start=piece.stream_start,
            file_start=piece.file_start,
            num_bytes=piece.num_bytes,
        )
    if current:
        yield current


def _cut(extent: Extent, size: int) -> Iterator[Extent]:
    for offset in range(0, extent.num_bytes, size):
        yield Extent(
            stream_start=extent.stream_start + offset,
            file_start=extent.file_start + offset,
            num_bytes=min(size, extent.num_bytes - offset),
        )
