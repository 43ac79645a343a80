"""CRC-32 of a layout's pieces: of the stream at a sender, of the staged file at a receiver.

The same CRC-32 as zlib's, at memory speed. It guards against accidental changes, not against an
attacker.
"""

from __future__ import annotations

from collections.abc import Sequence

from isal.isal_zlib import crc32
from torch import Tensor

from tensors.layout import Layout


def piece_checksums(layout: Layout, rank: int, stream: Tensor) -> tuple[int, ...]:
    """One for each piece of the rank's whole stream (flat uint8), in order."""
    view = stream.numpy().data
    return tuple(crc32(view[p.stream_start : p.stream_stop]) for p in layout.pieces[rank])


def staged_checksums(layout: Layout, data: Tensor) -> tuple[tuple[int, ...], ...]:
    """One for each piece, by rank, of a staged file's data (flat uint8)."""
    view = data.numpy().data
    return tuple(
        tuple(crc32(view[p.file_start : p.file_start + p.num_bytes]) for p in pieces)
        for pieces in layout.pieces
    )


class StreamChecksums:
    """Checksums of one rank's pieces, computed while its stream arrives and is still in cache.

    Chunks may end anywhere. Not thread-safe.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._pieces = layout.pieces[rank]
        self._position = 0
        """Number of bytes so far."""
        self._done: list[int] = []
        self._running = 0
        """CRC-32 of the current piece so far."""

    def feed(self, start: int, chunk: Tensor) -> None:
        """Add the stream's next bytes, which begin at offset `start`."""
        assert start == self._position
        view = chunk.numpy().data
        offset = 0
        while offset < len(view):
            piece = self._pieces[len(self._done)]
            length = min(piece.stream_stop - self._position, len(view) - offset)
            self._running = crc32(view[offset : offset + length], self._running)
            offset += length
            self._position += length
            if self._position == piece.stream_stop:
                self._done.append(self._running)
                self._running = 0

    def result(self) -> tuple[int, ...]:
        """Checksums of all pieces, once the last byte has arrived."""
        assert len(self._done) == len(self._pieces)
        return tuple(self._done)


def mismatches(
    layout: Layout, expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> list[str]:
    """Names of the tensors that have a differing piece."""
    names = {
        layout.tensors[piece.tensor].name
        for pieces, wanted, got in zip(layout.pieces, expected, found, strict=True)
        for piece, a, b in zip(pieces, wanted, got, strict=True)
        if a != b
    }
    return sorted(names)
