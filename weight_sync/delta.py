"""Encodes the elements of one rank's stream that changed since another version.

Elements are compared by their bits in the serving dtype, including NaN and -0.0. The payload has
the new bits, which overwrite the old ones, so applying it twice is harmless.

    stream      [ 4-byte elements | 2-byte elements ]      blocks of 65536 elements in each half
    payload     number changed in each half (u64) | in each block (u32) | values of the first half
                | values of the second | index of each value inside its block (u16), ascending

All of it is little-endian. A changed bfloat16 costs 4 bytes instead of 2, so a delta is shorter
than the stream below a density of one half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensors.layout import ITEM_BYTES, Layout

_BLOCK = 65536
_CHUNK_BLOCKS = 16
"""Blocks processed at a time, so that intermediate results stay in the cache."""
_CHUNK = _CHUNK_BLOCKS * _BLOCK
_SIZE, _COUNT, _INDEX = np.dtype("<u8"), np.dtype("<u4"), np.dtype("<u2")
_BITS: dict[int, np.dtype[np.signedinteger[Any]]] = {4: np.dtype("<i4"), 2: np.dtype("<i2")}

_Array = NDArray[np.generic]
_Places = NDArray[np.int64]
"""Indices of elements, ascending."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Delta:
    payload: Tensor
    """Flat uint8, contiguous, in host memory."""
    num_changed: int
    """Number of elements."""


def encode(
    layout: Layout, rank: int, base: Tensor, new: Tensor, max_density: float = 1.0
) -> Delta | None:
    """The delta from `base` to `new`, both the rank's whole stream as flat uint8.

    Returns None as soon as more than `max_density` of the elements have changed.
    """
    old, now = base.numpy(), new.numpy()
    halves = _halves(layout, rank)
    num_elements = sum(half.num_elements for half in halves)
    sizes = [0 for _ in halves]
    counts: list[_Array] = []
    values: list[_Array] = []
    indices: list[_Array] = []
    for number, half in enumerate(halves):
        for old_chunk, new_chunk in zip(half.chunks(old), half.chunks(now), strict=True):
            places = _differences(old_chunk, new_chunk)
            sizes[number] += len(places)
            if sum(sizes) / num_elements > max_density:
                return None
            num_blocks = -(-len(new_chunk) // _BLOCK)
            counts.append(np.bincount(places // _BLOCK, minlength=num_blocks).astype(_COUNT))
            values.append(new_chunk.take(places))
            indices.append(places.astype(_INDEX))  # the low 16 bits: the place inside its block
    parts = [np.array(sizes, _SIZE), *counts, *values, *indices]
    return Delta(
        payload=torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts])),
        num_changed=sum(sizes),
    )


def apply(layout: Layout, rank: int, payload: Tensor, data: Tensor) -> None:
    """Writes the payload's values to `data`, the data of a staged file as flat uint8.

    Raises ValueError, before anything is written, for a payload that does not fit this rank of this
    layout. Bytes of other ranks are never touched.
    """
    target = data.numpy()
    changes = _read(rank, _halves(layout, rank), payload.numpy())
    for change in changes:
        for _ in change.checked_places():
            pass
    for change in changes:
        change.write(target)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Half:
    """A rank's elements of one width: next to each other in the stream, scattered in the file."""

    item_bytes: int
    stream_start: int
    """Byte at which they begin."""
    num_elements: int
    piece_starts: NDArray[np.int64]
    """First element of each piece, counted from the start of this half."""
    piece_shifts: NDArray[np.int64]
    """Offset from an element's index in the half to its index in the file's data."""

    @property
    def num_blocks(self) -> int:
        return -(-self.num_elements // _BLOCK)

    def chunks(self, stream: _Array) -> Iterator[_Array]:
        """Its elements in a whole stream, as integers."""
        stop = self.stream_start + self.num_elements * self.item_bytes
        elements = stream[self.stream_start : stop].view(_BITS[self.item_bytes])
        for start in range(0, self.num_elements, _CHUNK):
            yield elements[start : start + _CHUNK]

    def in_file(self, places: _Places, start: int, stop: int) -> _Places:
        """Indices in the file's data of elements that lie between `start` and `stop`."""
        first = int(np.searchsorted(self.piece_starts, start, side="right")) - 1
        last = int(np.searchsorted(self.piece_starts, stop))
        cuts = np.searchsorted(places, self.piece_starts[first:last])
        per_piece = np.diff(cuts, append=len(places))
        return places + np.repeat(self.piece_shifts[first:last], per_piece)


def _halves(layout: Layout, rank: int) -> list[_Half]:
    halves = []
    stream_start = 0
    for item in _BITS:
        pieces = [
            piece
            for piece in layout.pieces[rank]
            if ITEM_BYTES[layout.tensors[piece.tensor].dtype] == item
        ]
        num_bytes = sum(piece.num_bytes for piece in pieces)
        assert not pieces or pieces[0].stream_start == stream_start, "wider items come first"
        starts = np.array([p.stream_start - stream_start for p in pieces], np.int64) // item
        half = _Half(
            item_bytes=item,
            stream_start=stream_start,
            num_elements=num_bytes // item,
            piece_starts=starts,
            piece_shifts=np.array([p.file_start for p in pieces], np.int64) // item - starts,
        )
        halves.append(half)
        stream_start += num_bytes
    return halves


def _differences(old: _Array, new: _Array) -> _Places:
    """Indices of the elements that differ. Most are equal, so whole words are compared first."""
    old_words, new_words = _words(old), _words(new)
    unequal = np.flatnonzero(old_words != new_words)
    per_word = old_words.itemsize // old.itemsize
    inside = np.flatnonzero(
        old_words.take(unequal).view(old.dtype) != new_words.take(unequal).view(new.dtype)
    )
    return unequal.take(inside // per_word) * per_word + inside % per_word


def _words(elements: _Array) -> _Array:
    """The same bytes as 8-byte integers, with zeros at the end if there are too few."""
    missing = -elements.nbytes % 8 // elements.itemsize
    if missing:
        elements = np.concatenate([elements, np.zeros(missing, elements.dtype)])
    return elements.view(np.int64)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Change:
    """The changes that a payload makes to one half; `counts` is by block."""

    rank: int
    half: _Half
    counts: NDArray[np.uint32]
    values: _Array
    indices: NDArray[np.uint16]

    def checked_places(self) -> Iterator[tuple[int, _Places, _Array]]:
        """Yields each chunk's first element, its changed elements and their values.

        Raises ValueError for elements that the half does not have, or that come twice.
        """
        stop = 0
        for block in range(0, self.half.num_blocks, _CHUNK_BLOCKS):
            counts = self.counts[block : block + _CHUNK_BLOCKS]
            start, stop = stop, stop + int(counts.sum())
            first = block * _BLOCK
            bases = np.arange(first, first + len(counts) * _BLOCK, _BLOCK)
            places = np.repeat(bases, counts) + self.indices[start:stop]
            if len(places) and (
                places[-1] >= self.half.num_elements or not (np.diff(places) > 0).all()
            ):
                raise ValueError(
                    f"delta of rank {self.rank}: its places in the blocks from {block} "
                    "are out of order or outside"
                )
            yield first, places, self.values[start:stop]

    def write(self, data: _Array) -> None:
        item = self.half.item_bytes
        elements = data[: len(data) // item * item].view(self.values.dtype)
        for first, places, values in self.checked_places():
            elements[self.half.in_file(places, first, first + _CHUNK)] = values


def _read(rank: int, halves: list[_Half], payload: _Array) -> list[_Change]:
    """Splits a payload; its places are not yet checked."""
    num_blocks = [half.num_blocks for half in halves]
    start_of_values = len(halves) * _SIZE.itemsize + sum(num_blocks) * _COUNT.itemsize
    if len(payload) < start_of_values:
        raise ValueError(f"delta of rank {rank} has {len(payload)} bytes: truncated")
    buffer = payload.data
    sizes = [int(size) for size in np.frombuffer(buffer, _SIZE, len(halves))]
    counts = np.frombuffer(buffer, _COUNT, sum(num_blocks), len(halves) * _SIZE.itemsize)
    per_half = np.split(counts, [num_blocks[0]])
    num_bytes = start_of_values + sum(
        size * (half.item_bytes + _INDEX.itemsize) for size, half in zip(sizes, halves, strict=True)
    )
    if len(payload) != num_bytes or [int(part.sum()) for part in per_half] != sizes:
        raise ValueError(
            f"delta of rank {rank} has {len(payload)} bytes and changes {sizes} elements, "
            f"by its counts {[int(part.sum()) for part in per_half]}: truncated or damaged"
        )
    changes = []
    start, index_start = start_of_values, len(payload) - sum(sizes) * _INDEX.itemsize
    for half, size, part in zip(halves, sizes, per_half, strict=True):
        changes.append(
            _Change(
                rank=rank,
                half=half,
                counts=part,
                values=np.frombuffer(buffer, _BITS[half.item_bytes], size, start),
                indices=np.frombuffer(buffer, _INDEX, size, index_start),
            )
        )
        start += size * half.item_bytes
        index_start += size * _INDEX.itemsize
    return changes
