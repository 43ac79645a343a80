"""The wire format of a trajectory group: flat arrays behind a versioned header, no pickle.

    offset  header
    0       4s   magic b"LSHG"
    4       u16  format version (4)
    6       u16  flags: 1 = the body is compressed
    8       u32  CRC-32 of everything after the header
    12      u32  bytes of the description at the start of the body
    16      the body; if compressed: u64 bytes of the body, then the body as one zstd frame

    body    description: group, prompt and sampling; for each trajectory lengths, episode, reward,
            names; a MessagePack map (buffer/wire/header.py)
            arrays, each padded with zeros to start at a multiple of 8; the first four concatenate
            those of all trajectories, so that a group is checked in a few calls
              tokens i32[T], rollout_logprobs f32[T], mask runs u32[r], spans u32[s, 3]
            columns of the first trajectory, of the second, ...
            files of pictures u1[bytes], in the order of their digests; each digest is checked

Numbers are little-endian. `loss_mask` is stored as run lengths, beginning with a run of zeros (the
only one that may be empty); version spans as (version, start, end). That is 8 bytes per token. The
encoding is unique: `encode_group` reproduces what `decode_group` accepts bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from buffer.redis.payloads import Allocate, fresh
from buffer.types import FloatArray, IntArray, Trajectory, TrajectoryGroup, digest_of
from buffer.wire.header import Column, Description, Head, PictureFile, check_column, describe
from buffer.wire.masks import F4, I4, U1, U4, Array, FlatGroup, exactly

MAGIC = b"LSHG"
FORMAT_VERSION = 4
MAX_BODY_BYTES = 2**32
MAX_COMPRESSION = 16
"""A body that claims a higher compression ratio is rejected as a bomb before memory is allocated,
and never written: such data is sent uncompressed. Real groups shrink to two thirds."""

_COMPRESSED = 1
_HEADER = struct.Struct("<4sHHII")
_RAW_BYTES = struct.Struct("<Q")
_ALIGNMENT = 8
_ZSTD_LEVEL = 1
_ZSTD_WINDOW_BYTES = 2**23  # more than any frame of that level needs


def encode_group(group: TrajectoryGroup, compress: bool = False) -> bytes:
    """Bytes of a group. Raises ValueError naming what the format cannot represent.

    `compress` saves about a third with zstd, at a seventh of the speed.
    """
    return bytes(encode_into(fresh, group, compress))


def encode_into(
    allocate: Allocate, group: TrajectoryGroup, compress: bool = False
) -> bytes | memoryview:
    """The same bytes; uncompressed ones lie in memory of `allocate`."""
    try:
        flat = FlatGroup.of(group.trajectories)
        description, columns = describe(group, flat)
        tokens = [exactly(t.tokens, I4, "tokens") for t in group.trajectories]
        logprobs = [_as_float32(t.rollout_logprobs) for t in group.trajectories]
        numbers: list[tuple[np.dtype[Any], Sequence[Array]]] = [
            (I4, tokens),
            (F4, logprobs),
            (U4, [flat.runs]),
            (U4, [flat.spans.reshape(-1)]),
            *((column.dtype, [column.reshape(-1)]) for column in columns),
        ]
        data, arrays = _lay_out(allocate, description, numbers)
        flat.check(arrays[0], arrays[1])  # they are contiguous here
        _write_header(data, 0, len(description))
        return _compress(data) if compress else data
    except ValueError as error:
        raise ValueError(f"group {group.group_id}: {error}") from None


def decode_group(data: bytes | memoryview) -> TrajectoryGroup:
    """The group in these bytes; its arrays are read-only views of them.

    Raises ValueError, and nothing else, if they are not one whole, valid group. Memory use is
    proportional to the input, whatever it claims.
    """
    description, arrays = _open(data)
    said = Description.read(description)
    heads = said.trajectories
    lengths = [head.num_tokens for head in heads]
    run_counts = [head.num_runs for head in heads]
    span_counts = [head.num_spans for head in heads]
    num_tokens = sum(lengths)
    tokens, logprobs = arrays.array(I4, num_tokens), arrays.array(F4, num_tokens)
    flat = FlatGroup(
        lengths=lengths,
        run_counts=run_counts,
        span_counts=span_counts,
        runs=arrays.array(U4, sum(run_counts)),
        spans=arrays.array(U4, 3 * sum(span_counts)).reshape(-1, 3),
    )
    flat.check(tokens, logprobs)
    columns = [
        {c.name: _read_column(arrays, c, head.num_tokens) for c in head.columns} for head in heads
    ]
    pictures = {one.digest: _read_picture(arrays, one) for one in said.pictures}
    arrays.expect_end()
    return TrajectoryGroup(
        group_id=said.group_id,
        prompt=said.prompt,
        trajectories=_cut(tokens, logprobs, flat, heads, columns, [*pictures]),
        sampling=said.sampling,
        pictures=pictures,
    )


# Writing -------------------------------------------------------------------------------------


def _as_float32(logprobs: Array) -> Array:
    if logprobs.dtype == F4:
        return logprobs
    with np.errstate(over="ignore"):  # too large values become infinite, which is rejected
        return logprobs.astype(F4)


def _lay_out(
    allocate: Allocate,
    description: bytes,
    numbers: Sequence[tuple[np.dtype[Any], Sequence[Array]]],
) -> tuple[memoryview, list[NDArray[Any]]]:
    """The message with an empty header, and its arrays, each joined from its pieces."""
    places, end = [], _HEADER.size + len(description)
    for dtype, pieces in numbers:
        start = end + -(end - _HEADER.size) % _ALIGNMENT
        count = sum(map(len, pieces))
        places.append((end, start, dtype, count))
        end = start + dtype.itemsize * count
    size = end - _HEADER.size
    if size > MAX_BODY_BYTES:
        raise ValueError(f"its {size} bytes are more than {MAX_BODY_BYTES}: make groups smaller")
    data = allocate(end)
    data[_HEADER.size : _HEADER.size + len(description)] = description
    arrays = []
    for (padding, start, dtype, count), (_, pieces) in zip(places, numbers, strict=True):
        data[padding:start] = bytes(start - padding)
        array = np.frombuffer(data, dtype, count, start)
        np.concatenate(pieces, out=array)
        arrays.append(array)
    return data, arrays


def _write_header(data: memoryview, flags: int, description_bytes: int) -> None:
    crc = crc32(data[_HEADER.size :])
    _HEADER.pack_into(data, 0, MAGIC, FORMAT_VERSION, flags, crc, description_bytes)


def _compress(data: memoryview) -> bytes | memoryview:
    """The message compressed, unless that does not shrink it or exceeds MAX_COMPRESSION."""
    *_, description_bytes = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body)
    if not len(frame) + _RAW_BYTES.size < len(body) <= MAX_COMPRESSION * len(frame):
        return data
    packed = memoryview(bytearray(_HEADER.size) + _RAW_BYTES.pack(len(body)) + frame)
    _write_header(packed, _COMPRESSED, description_bytes)
    return packed


# Reading -------------------------------------------------------------------------------------


class _Arrays:
    """A cursor over the arrays behind the description."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: memoryview, at: int) -> None:
        self._body, self._at = body, at

    def array(self, dtype: np.dtype[np.generic], count: int) -> NDArray[Any]:
        start = self._at + -self._at % _ALIGNMENT
        end = start + dtype.itemsize * count
        if end > len(self._body):
            raise ValueError(f"an array ends at {end}, after the body of {len(self._body)}")
        if start > self._at and any(self._body[self._at : start]):
            raise ValueError("the padding between two arrays is not zero")
        self._at = end
        return np.frombuffer(self._body[start:end], dtype)

    def expect_end(self) -> None:
        if self._at != len(self._body):
            raise ValueError(f"{len(self._body) - self._at} bytes too many after the arrays")


def _read_column(arrays: _Arrays, layout: Column, num_tokens: int) -> Array:
    column = arrays.array(layout.dtype, num_tokens * max(1, layout.width))
    check_column(layout.name, column)
    return column.reshape(num_tokens, layout.width) if layout.width else column


def _read_picture(arrays: _Arrays, said: PictureFile) -> bytes:
    picture = arrays.array(U1, said.num_bytes).tobytes()
    if digest_of(picture) != said.digest:
        raise ValueError(f"the picture {said.digest} has the digest {digest_of(picture)}")
    return picture


def _open(data: bytes | memoryview) -> tuple[bytes, _Arrays]:
    """The description and a reader of the arrays, once header and checksum are right."""
    view = memoryview(data).toreadonly()
    if len(view) < _HEADER.size:
        raise ValueError(f"{len(view)} bytes are too few for a trajectory group")
    magic, version, flags, crc, length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise ValueError(f"these bytes begin with {magic!r} and are not a trajectory group")
    if version != FORMAT_VERSION or flags & ~_COMPRESSED:
        raise ValueError(
            f"trajectory group in format {version} with flags {flags:#x}; "
            f"this program reads format {FORMAT_VERSION}: use the version of Leash that wrote it"
        )
    body = view[_HEADER.size :]
    if crc32(body) != crc:
        raise ValueError(
            "the checksum of a trajectory group does not match: its bytes were damaged"
        )
    if flags & _COMPRESSED:
        body = memoryview(_decompress(body))
    if length > len(body):
        raise ValueError(f"a description of {length} bytes does not fit {len(body)} bytes")
    return bytes(body[:length]), _Arrays(body, length)


def _decompress(body: memoryview) -> bytes:
    if len(body) < _RAW_BYTES.size:
        raise ValueError(f"{len(body)} bytes are too few for a compressed body")
    (raw_bytes,) = _RAW_BYTES.unpack_from(body)
    frame = body[_RAW_BYTES.size :]
    if raw_bytes > min(MAX_BODY_BYTES, MAX_COMPRESSION * len(frame)):
        raise ValueError(f"{len(frame)} compressed bytes claim to be {raw_bytes}")
    try:
        # zstandard allocates what the frame declares, regardless of max_output_size.
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != raw_bytes:
            raise ValueError(f"a frame of {declared} bytes where {raw_bytes} are declared")
        reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        raw = reader.decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(f"a trajectory group cannot be decompressed: {error}") from None
    if len(raw) != raw_bytes:
        raise ValueError(f"{len(raw)} bytes were compressed where {raw_bytes} are declared")
    return raw


def _cut(
    tokens: IntArray,
    logprobs: FloatArray,
    flat: FlatGroup,
    heads: Sequence[Head],
    columns: Sequence[Mapping[str, Array]],
    digests: Sequence[str],
) -> tuple[Trajectory, ...]:
    masks, spans = flat.masks(), flat.version_spans()
    trajectories = []
    start = 0
    for number, head in enumerate(heads):
        end = start + head.num_tokens
        trajectories.append(
            Trajectory(
                tokens=tokens[start:end],
                loss_mask=masks[start:end],
                rollout_logprobs=logprobs[start:end],
                version_spans=spans[number],
                prompt_length=head.prompt_length,
                reward=head.reward,
                finish_reason=head.finish_reason,
                reward_parts=head.reward_parts,
                episode=head.episode,
                role=head.role,
                columns=columns[number],
                pictures=tuple(digests[place] for place in head.pictures),
            )
        )
        start = end
    return tuple(trajectories)
