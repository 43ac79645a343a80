"""Payloads above the size of one value: cut, and joined only if every length is right."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.wire.chunks import INDEX_BYTES, MAX_CHUNK_BYTES, join_payload, num_chunks, split_payload


@given(st.binary(max_size=200).map(lambda data: b"LSHG" + data), st.integers(1, 300))
def test_split_payload_is_joined_again(data: bytes, chunk_bytes: int) -> None:
    first, *rest = split_payload(data, chunk_bytes)
    assert num_chunks(first) == len(rest)
    assert join_payload(first, rest) == data
    assert bool(rest) == (len(data) > chunk_bytes)
    assert all(len(chunk) <= chunk_bytes for chunk in rest)


def test_payload_of_just_the_limit_is_one_value() -> None:
    data = bytes(MAX_CHUNK_BYTES)
    assert split_payload(data) == [data]
    index, *chunks = split_payload(data + b"x")
    assert (len(index), [len(chunk) for chunk in chunks]) == (INDEX_BYTES, [MAX_CHUNK_BYTES, 1])


def test_wrong_missing_and_surplus_chunks_are_refused() -> None:
    first, *rest = split_payload(b"0123456789", 4)
    for wrong, message in (
        (rest[:2], "2 chunks of 3"),
        ([*rest, b""], "4 chunks of 3"),
        ([rest[0], None, rest[2]], "chunk 2 of 3 is missing"),
        ([rest[0], b"456", rest[2]], "chunk 2 of 3 has 3 bytes, not 4"),
        ([*rest[:2], b"8901"], "chunk 3 of 3 has 4 bytes, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            join_payload(first, wrong)
    with pytest.raises(ValueError, match="whole"):
        join_payload(b"LSHG whole", rest)


def test_index_with_a_flipped_bit_or_truncation_is_refused() -> None:
    first, *rest = split_payload(b"0123456789", 4)
    for bit in range(8 * len(first)):
        damaged = bytearray(first)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            join_payload(bytes(damaged), rest)
    for length in range(4, len(first)):
        with pytest.raises(ValueError, match="bytes"):
            num_chunks(first[:length])


def _index(version: int, flags: int, count: int, chunk_bytes: int, num_bytes: int) -> bytes:
    head = struct.pack("<4sHHIIQ", b"LSHC", version, flags, count, chunk_bytes, num_bytes)
    return head + struct.pack("<I", zlib.crc32(head))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((2, 0, 3, 4, 10), "format 2"),
        ((1, 1, 3, 4, 10), "flags 0x1"),
        ((1, 0, 0, 4, 0), "cannot be"),
        ((1, 0, 1, 4, 4), "cannot be"),
        ((1, 0, 3, 4, 13), "cannot be"),
        ((1, 0, 3, 4, 8), "cannot be"),
        ((1, 0, 2**32 - 1, 2**32 - 1, 2**64 - 1), "cannot be"),
        ((1, 0, 3, 0, 0), "cannot be"),
    ],
)
def test_forged_index_is_refused(fields: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join_payload(_index(*fields), [b"0123", b"4567", b"89"])
