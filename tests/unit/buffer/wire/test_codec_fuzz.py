"""Decoding forged messages: whatever the bytes, ValueError or a group that encodes to them again.

LEASH_SOAK_FUZZ sets the number of inputs and LEASH_SOAK_SEED the seed; a failure names its seed and
index, from which `_forge` makes the input again.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from dataclasses import replace
from hashlib import sha256
from itertools import product
from random import Random

import numpy as np
import pytest
import zstandard

from buffer.types import PromptRef, SamplingParams, TrajectoryGroup
from buffer.wire.codec import decode_group, encode_group
from tests.support.buffer.random_groups import random_trajectory

NUM_INPUTS = int(os.environ.get("LEASH_SOAK_FUZZ", "8000"))
SEED = int(os.environ.get("LEASH_SOAK_SEED", "1"))

HEADER = 16
EDITS = tuple(
    struct.pack(layout, value)
    for layout, values in (
        ("<B", (0, 1, 0x7F, 0xFF)),
        ("<H", (0, 1, 0x7FFF, 0xFFFF)),
        ("<I", (0, 1, 2**16, 2**21, 2**31 - 1, 2**31, 2**32 - 1)),
        ("<Q", (0, 2**31, 2**32, 2**63, 2**64 - 1)),
        ("<f", (float("nan"), float("inf"), -1e38, 1e-45)),
        ("<d", (float("nan"), float("-inf"), 1.7e308)),
    )
    for value in values
)
HUGE = (b"\xff\xff\xff\x7f", b"\xdd\x7f\xff\xff", b"\xdf\x7f\xff\xff", b"\xdb\x7f\xff\xff")
"""A number of the lengths of arrays; MessagePack's beginnings of a long array, map and text."""
SIGNALLING_NAN = b"\x01\x00\xa0\x7f"


def _corpus() -> list[bytes]:
    random = np.random.default_rng(0)
    messages = []
    for size, num_tokens, num_columns in ((1, 1, 0), (1, 5, 2), (2, 9, 0), (3, 20, 4), (8, 40, 1)):
        group = TrajectoryGroup(
            group_id=f"group-{size}",
            prompt=PromptRef(task="sums", index=7, attempt=1),
            trajectories=tuple(
                replace(
                    random_trajectory(random, num_tokens + i, num_columns),
                    episode=i // 2,
                    reward=0.25 * (i // 2),
                )
                for i in range(size)
            ),
            sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
        )
        messages += [encode_group(group), encode_group(group, compress=True)]
    assert {message[6] for message in messages} == {0, 1}, "some are compressed and some are not"
    return messages


CORPUS = _corpus()
PLAIN = [message for message in CORPUS if message[6] == 0]


def _seal(head: bytes, body: bytes) -> bytes:
    """A message with a right checksum, so that the checks behind it are reached."""
    return head[:8] + struct.pack("<I", zlib.crc32(body)) + head[12:HEADER] + body


def _damage(random: Random, data: bytes, start: int) -> bytes:
    """Some bytes at or after `start` changed, removed, repeated or added."""
    forged = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(start, max(start, len(forged) - 1))
        match random.randrange(6):
            case 0 if at < len(forged):
                forged[at] ^= 1 << random.randrange(8)
            case 1:
                forged[at : at + 4] = SIGNALLING_NAN
            case 2:
                del forged[at : at + random.choice((1, 2, 4, 8, 64))]
            case 3:
                forged[at:at] = forged[at : at + random.choice((1, 4, 8, 64))]
            case _:
                edit = random.choice(EDITS)
                forged[at : at + len(edit)] = edit
    return bytes(forged)


def _compressed(random: Random, message: bytes) -> bytes:
    """Forged contents in an honest frame, or a forged frame or length around honest contents."""
    body = message[HEADER:]
    kind = random.randrange(3)
    if kind == 0:
        body = _damage(random, body, 0)
    frame = zstandard.ZstdCompressor(level=1).compress(body)
    if kind == 1:
        frame = _damage(random, frame, 0)
    length = random.choice((0, 1, 2**31, 2**64 - 1)) if kind == 2 else len(body)
    head = message[:6] + b"\x01\x00" + message[8:HEADER]
    return _seal(head, struct.pack("<Q", length) + frame)


def _forge(random: Random) -> bytes:
    message = random.choice(CORPUS)
    match random.randrange(9):
        case 0:
            return random.randbytes(random.randrange(200))
        case 1:
            return _damage(random, message, 0)
        case 2:
            return message[: random.randrange(len(message))]
        case 3:
            at = random.randrange(HEADER, len(message))
            return _seal(message, message[HEADER:at])
        case 4:
            other = random.choice(CORPUS)
            tail = other[random.randrange(HEADER, len(other)) :]
            return _seal(message, message[HEADER : random.randrange(HEADER, len(message))] + tail)
        case 5:
            body = random.randbytes(random.randrange(300))
            head = message[:12] + struct.pack("<I", random.choice((0, 1, 40, len(body), 2**32 - 1)))
            return _seal(head, body)
        case 6:
            return _compressed(random, random.choice(PLAIN))
        case 7:  # the description's lengths and counts, which are the dangerous ones
            message = random.choice(PLAIN)
            (length,) = struct.unpack_from("<I", message, 12)
            forged = bytearray(message)
            for _ in range(random.randint(1, 2)):
                edit = random.choice(EDITS)
                at = random.randrange(HEADER, HEADER + length)
                forged[at : at + len(edit)] = edit
            return _seal(message, bytes(forged[HEADER:]))
        case _:
            return _seal(message, _damage(random, message, HEADER)[HEADER:])


def _body(message: bytes) -> bytes:
    if not message[6]:
        return message[HEADER:]
    return zstandard.ZstdDecompressor().decompress(message[HEADER + 8 :])


def _check(data: bytes) -> bool:
    """Whether the bytes are a group; fails on anything but a ValueError or a group like them."""
    try:
        group = decode_group(data)
    except ValueError:
        return False
    assert encode_group(group)[HEADER:] == _body(data)
    return True


def test_forged_messages_raise_only_value_error() -> None:
    num_groups = 0
    for index in range(NUM_INPUTS):
        data = _forge(Random(SEED << 32 | index))
        try:
            num_groups += _check(data)
        except BaseException as error:
            error.add_note(f"seed {SEED}, index {index}: {data.hex()}")
            raise
    # The forger is good enough if some of it passes every check: some rest is changed numbers.
    assert NUM_INPUTS < 1000 or 0.01 * NUM_INPUTS < num_groups < 0.5 * NUM_INPUTS


def _peak_of_decoding(data: bytes) -> int:
    tracemalloc.start()
    try:
        _check_refused(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _check_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_group(data)


def test_forged_lengths_do_not_allocate_much_memory() -> None:
    tracemalloc.start()
    try:
        for message in PLAIN[1:3]:  # with columns, and with two trajectories
            (length,) = struct.unpack_from("<I", message, 12)
            for at, huge in product(range(HEADER, HEADER + length), HUGE):
                forged = bytearray(message)
                forged[at : at + 4] = huge
                sealed = _seal(message, bytes(forged[HEADER:]))
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                _check(sealed)
                assert tracemalloc.get_traced_memory()[1] - before < 200_000, at
    finally:
        tracemalloc.stop()


def test_compression_bomb_is_refused_before_it_is_unpacked() -> None:
    zeros = bytes(2**28)
    frame = zstandard.ZstdCompressor(level=1).compress(zeros)
    head = b"LSHG\x04\x00\x01\x00" + bytes(8)
    for claimed in (len(zeros), 1000, 2**40):
        bomb = _seal(head, struct.pack("<Q", claimed) + frame)
        assert _peak_of_decoding(bomb) < 1_000_000


def test_bomb_that_grows_no_more_than_tokens_could_not_is_refused_too() -> None:
    raw = b"".join(sha256(b"%d" % i).digest() + bytes(4000) for i in range(2**13))
    frame = zstandard.ZstdCompressor(level=1).compress(raw)
    assert 16 < len(raw) / len(frame) < 1000
    head = b"LSHG\x04\x00\x01\x00" + bytes(8)
    assert _peak_of_decoding(_seal(head, struct.pack("<Q", len(raw)) + frame)) < 1_000_000


def test_frame_that_hides_its_size_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(write_content_size=False)
    body = PLAIN[0][HEADER:]
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(body)
    head = PLAIN[0][:6] + b"\x01\x00" + PLAIN[0][8:HEADER]
    _check_refused(_seal(head, struct.pack("<Q", len(body)) + frame))
    _check_refused(_seal(head, struct.pack("<Q", 2**64 - 1) + frame))
