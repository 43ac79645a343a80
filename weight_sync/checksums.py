"""CRC-32 of the pieces of a layout: at a sender of its stream, at a receiver of its staged file.

The same CRC-32 as zlib's, at memory speed. It guards against bytes that change on their way, not
against someone who wants to change them.
"""

from __future__ import annotations

from isal.isal_zlib import crc32
from torch import Tensor

from weight_sync.layout import Layout


def piece_checksums(layout: Layout, rank: int, stream: Tensor) -> tuple[int, ...]:
    """Of each piece of the rank's whole stream (flat uint8), in the order of its pieces.

    Raises ValueError for a stream of another length than the layout's.
    """
    expected = layout.stream_bytes(rank)
    if stream.numel() != expected:
        raise ValueError(f"stream of rank {rank} has {stream.numel()} bytes, not {expected}")
    view = stream.numpy().data
    return tuple(crc32(view[p.stream_start : p.stream_stop]) for p in layout.pieces[rank])


def staged_checksums(layout: Layout, data: Tensor) -> tuple[tuple[int, ...], ...]:
    """Of every rank's pieces, as they lie in the data of a staged file (flat uint8).

    Raises ValueError for data of another length than the layout's.
    """
    if data.numel() != layout.num_bytes:
        raise ValueError(f"staged data has {data.numel()} bytes, not {layout.num_bytes}")
    view = data.numpy().data
    return tuple(
        tuple(crc32(view[p.file_start : p.file_start + p.num_bytes]) for p in pieces)
        for pieces in layout.pieces
    )


class StreamChecksums:
    """The checksums of one rank's pieces while its stream comes in: the bytes are still in cache.

    Cuts between the chunks may lie anywhere. Not thread-safe.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._rank = rank
        self._pieces = layout.pieces[rank]
        self._position = 0
        """Bytes of the stream so far."""
        self._done: list[int] = []
        self._running = 0
        """CRC-32 of the bytes so far of the piece that is not done."""

    @property
    def position(self) -> int:
        """Where in the stream the next chunk starts."""
        return self._position

    def feed(self, start: int, chunk: Tensor | memoryview) -> None:
        """The stream's next bytes; `start` is where in the stream they begin.

        Raises ValueError for bytes that do not follow those before, or that the stream lacks.
        """
        view = chunk.numpy().data if isinstance(chunk, Tensor) else chunk.cast("B")
        end = self._pieces[-1].stream_stop if self._pieces else 0
        if start != self._position or start + len(view) > end:
            raise ValueError(
                f"stream of rank {self._rank} ({end} bytes): bytes {start} to {start + len(view)} "
                f"came where byte {self._position} was next"
            )
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
        """Of all pieces. Raises ValueError before the last byte has come."""
        if len(self._done) != len(self._pieces):
            raise ValueError(
                f"stream of rank {self._rank} ended at byte {self._position}, "
                f"in piece {len(self._done)} of {len(self._pieces)}"
            )
        return tuple(self._done)
