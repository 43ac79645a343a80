"""Splits a payload that is too large for one Redis value into chunks, and joins them again.

A payload of at most MAX_CHUNK_BYTES is one value. A larger one is an index and chunks of equal
size, the last possibly shorter. The index, little-endian:

    4s magic b"LSHC", u16 format version (1), u16 flags (0), u32 number of chunks,
    u32 bytes of a chunk, u64 bytes of the payload, u32 CRC-32 of the index so far

The payload's own checksum covers the chunks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

MAGIC = b"LSHC"
FORMAT_VERSION = 1
MAX_CHUNK_BYTES = 64 * 2**20
MAX_CHUNKS = 1000
"""An index with more is rejected before anything is fetched: no group has that many."""

_INDEX = struct.Struct("<4sHHIIQ")
_CRC = struct.Struct("<I")
INDEX_BYTES = _INDEX.size + _CRC.size


def split_payload(
    data: bytes | memoryview, chunk_bytes: int = MAX_CHUNK_BYTES
) -> list[bytes | memoryview]:
    """The values to store: the payload itself, or an index and then the chunks."""
    if not 0 < chunk_bytes < 2**32:
        raise ValueError(f"chunk_bytes={chunk_bytes}: must be at least 1 and below 2^32")
    if len(data) <= chunk_bytes:
        return [data]
    chunks = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    index = _INDEX.pack(MAGIC, FORMAT_VERSION, 0, len(chunks), chunk_bytes, len(data))
    return [index + _CRC.pack(zlib.crc32(index)), *chunks]


def num_chunks(first: bytes | memoryview) -> int:
    """Number of chunks that follow the first value; 0 if it is the whole payload.

    Raises ValueError for a damaged index.
    """
    if first[: len(MAGIC)] != MAGIC:
        return 0
    return _read_index(first)[0]


def join_payload(
    first: bytes | memoryview, rest: Sequence[bytes | memoryview | None]
) -> bytes | memoryview:
    """Joins the values of `split_payload`; None stands for a missing chunk.

    Raises ValueError unless every length is what the index says.
    """
    if first[: len(MAGIC)] != MAGIC:
        if rest:
            raise ValueError(f"{len(rest)} chunks after a payload that is whole")
        return first
    count, chunk_bytes, num_bytes = _read_index(first)
    if len(rest) != count:
        raise ValueError(f"{len(rest)} chunks of {count}")
    chunks: list[bytes | memoryview] = []
    for number, chunk in enumerate(rest, start=1):
        wanted = chunk_bytes if number < count else num_bytes - chunk_bytes * (count - 1)
        if chunk is None or len(chunk) != wanted:
            found = "is missing" if chunk is None else f"has {len(chunk)} bytes, not {wanted}"
            raise ValueError(f"chunk {number} of {count} {found}")
        chunks.append(chunk)
    return b"".join(chunks)


def _read_index(first: bytes | memoryview) -> tuple[int, int, int]:
    """Number of chunks, bytes of each but the last, total bytes."""
    if len(first) != INDEX_BYTES:
        raise ValueError(f"an index of chunks has {len(first)} bytes, not {INDEX_BYTES}")
    _, version, flags, count, chunk_bytes, num_bytes = _INDEX.unpack_from(first)
    if _CRC.unpack_from(first, _INDEX.size)[0] != zlib.crc32(first[: _INDEX.size]):
        raise ValueError("the checksum of an index of chunks does not match: it was damaged")
    if version != FORMAT_VERSION or flags:
        raise ValueError(
            f"index of chunks in format {version} with flags {flags:#x}; "
            f"this program reads format {FORMAT_VERSION}: update it"
        )
    if (
        not 2 <= count <= MAX_CHUNKS
        or not (count - 1) * chunk_bytes < num_bytes <= count * chunk_bytes
    ):
        raise ValueError(f"{count} chunks of {chunk_bytes} bytes cannot be {num_bytes} bytes")
    return count, chunk_bytes, num_bytes
