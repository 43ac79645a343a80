"""The wire format of a trajectory group: flat arrays behind a versioned header, no pickle.

    offset  header
    0       4s   magic b"LSHG"
    4       u16  format version (2)
    6       u16  flags: 1 = the body is compressed
    8       u32  CRC-32 of everything after the header
    12      u32  bytes of the description, with which the body begins
    16      the body; if compressed: u64 bytes of the body, then the body as one zstd frame

    body    description: group and prompt; for each trajectory lengths, reward, names (_describe)
            arrays, each padded with zeros to start at a multiple of 8; the first four hold those of
            all trajectories, one after the other, so that a group is checked in a few calls
              tokens i32[T], rollout_logprobs f32[T], mask runs u32[r], spans u32[s, 3]
            columns of the first trajectory, of the second, ...

Numbers are little-endian. `loss_mask` is stored as the lengths of its runs, the first one of zeros
(which alone may be empty); version spans as (version, start, end). That makes 8 bytes a token. One
group has one body: what `decode_group` accepts, `encode_group` writes again bit for bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import zstandard
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from buffer.arena import Allocate, fresh
from buffer.flat import F4, I4, U4, Array, FlatGroup, check_finite, exactly
from buffer.types import FloatArray, IntArray, PromptRef, Trajectory, TrajectoryGroup

MAGIC = b"LSHG"
FORMAT_VERSION = 2
COLUMN_DTYPES = ("<i1", "<u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""Types that a further column may have; the wire carries the index."""
MAX_TRAJECTORIES = 2**16
MAX_COLUMNS = 256
MAX_TEXT_BYTES = 2**16 - 1
MAX_BODY_BYTES = 2**32
MAX_COMPRESSION = 1024
"""A body that claims to be more than this many times as long as its frame is refused as a bomb. It
is never written either: what shrinks that well is sent as it is."""

_COMPRESSED = 1
_HEADER = struct.Struct("<4sHHII")
_RAW_BYTES = struct.Struct("<Q")
_PROMPT = struct.Struct("<QII")
_TRAJECTORY = struct.Struct("<IIIIdHH")
_COLUMN = struct.Struct("<BI")
_TEXT = struct.Struct("<H")
_NUMBER = struct.Struct("<d")
_ALIGNMENT = 8
_ZSTD_LEVEL = 1
_ZSTD_WINDOW_BYTES = 2**23  # more than any frame of that level asks for
_DTYPES = tuple(np.dtype(name) for name in COLUMN_DTYPES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def encode_group(group: TrajectoryGroup, compress: bool = False) -> bytes:
    """Bytes of a group. Raises ValueError naming what of it the format cannot carry.

    `compress` makes them about a third fewer with zstd, at a seventh of the speed.
    """
    return bytes(encode_into(fresh, group, compress))


def encode_into(
    allocate: Allocate, group: TrajectoryGroup, compress: bool = False
) -> bytes | memoryview:
    """The same bytes, uncompressed ones in memory that `allocate` gives."""
    try:
        flat = FlatGroup.of(group.trajectories)
        description, columns = _describe(group, flat)
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
        flat.check(arrays[0], arrays[1])  # where they have come to lie in one piece
        _write_header(data, 0, len(description))
        return _compress(data) if compress else data
    except ValueError as error:
        raise ValueError(f"group {group.group_id}: {error}") from None


def decode_group(data: bytes | memoryview) -> TrajectoryGroup:
    """The group of these bytes, its arrays read-only views of them.

    Whatever the bytes, raises ValueError and nothing else if they are not one whole, valid group,
    and takes memory only in proportion to them.
    """
    description, arrays = _open(data)
    group_id, task = description.text(), description.text()
    index, attempt, num_trajectories = description.unpack(_PROMPT)
    if not 0 < num_trajectories <= MAX_TRAJECTORIES:
        raise ValueError(f"a group of {num_trajectories} trajectories")
    heads = [_Head.read(description) for _ in range(num_trajectories)]
    description.expect_end()
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
    columns = [{c.name: c.read(arrays, head.num_tokens) for c in head.columns} for head in heads]
    arrays.expect_end()
    return TrajectoryGroup(
        group_id=group_id,
        prompt=PromptRef(task=task, index=index, attempt=attempt),
        trajectories=_cut(tokens, logprobs, flat, heads, columns),
    )


# Writing -------------------------------------------------------------------------------------


def _describe(group: TrajectoryGroup, flat: FlatGroup) -> tuple[bytes, list[Array]]:
    """The description, and the columns in wire order."""
    if len(group.trajectories) > MAX_TRAJECTORIES:
        raise ValueError(f"{len(group.trajectories)} trajectories, of at most {MAX_TRAJECTORIES}")
    prompt = group.prompt
    parts = [_text(group.group_id), _text(prompt.task)]
    try:
        parts.append(_PROMPT.pack(prompt.index, prompt.attempt, len(group.trajectories)))
    except struct.error as error:
        raise ValueError(f"{prompt} does not fit its fields: {error}") from None
    columns: list[Array] = []
    counts = zip(flat.lengths, flat.run_counts, flat.span_counts, strict=True)
    for number, (t, (length, num_runs, num_spans)) in enumerate(
        zip(group.trajectories, counts, strict=True)
    ):
        try:
            _check_described(t.reward, t.reward_parts, len(t.columns))
            sizes = (length, t.prompt_length, num_runs, num_spans)
            parts.append(_TRAJECTORY.pack(*sizes, t.reward, len(t.reward_parts), len(t.columns)))
            parts.append(_text(t.finish_reason))
            for name, value in t.reward_parts.items():
                parts += (_text(name), _NUMBER.pack(value))
            for name, column in t.columns.items():
                little = _little_endian(name, column)
                width = little.shape[1] if little.ndim == 2 else 0
                parts += (_text(name), _COLUMN.pack(_CODES[little.dtype], width))
                columns.append(little)
        except (ValueError, struct.error) as error:
            raise ValueError(f"trajectory {number}: {error}") from None
    return b"".join(parts), columns


def _text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"{len(raw)} bytes of text do not fit {MAX_TEXT_BYTES}")
    return _TEXT.pack(len(raw)) + raw


def _little_endian(name: str, column: Array) -> Array:
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    if little.dtype not in _CODES or little.ndim not in (1, 2) or 0 in little.shape[1:]:
        raise ValueError(
            f"column {name!r} is {column.dtype}{list(column.shape)}: use [T] or [T, k] of one of "
            f"{', '.join(COLUMN_DTYPES)}"
        )
    _check_column(name, little)
    return little


def _as_float32(logprobs: Array) -> Array:
    if logprobs.dtype == F4:
        return logprobs
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        return logprobs.astype(F4)


def _lay_out(
    allocate: Allocate,
    description: bytes,
    numbers: Sequence[tuple[np.dtype[Any], Sequence[Array]]],
) -> tuple[memoryview, list[NDArray[Any]]]:
    """The message, its header still empty, and its arrays. Of each, the pieces have no gap."""
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
    """The same message compressed, unless it would not become shorter, or incredibly short."""
    *_, description_bytes = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body)
    if not len(frame) + _RAW_BYTES.size < len(body) <= MAX_COMPRESSION * len(frame):
        return data
    packed = memoryview(bytearray(_HEADER.size) + _RAW_BYTES.pack(len(body)) + frame)
    _write_header(packed, _COMPRESSED, description_bytes)
    return packed


# Reading -------------------------------------------------------------------------------------


class _Description:
    """A cursor over the description that never steps past its end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        start, self._at = self._at, self._at + layout.size
        if self._at > len(self._data):
            raise ValueError(f"the description ends in the middle, at {len(self._data)}")
        return layout.unpack_from(self._data, start)

    def text(self) -> str:
        (length,) = self.unpack(_TEXT)
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError(f"a text of {length} bytes ends after the description")
        return self._data[start : self._at].decode()  # UnicodeDecodeError is a ValueError

    def expect_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many in the description")


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


@dataclass(slots=True, frozen=True)
class _ColumnLayout:
    name: str
    dtype: np.dtype[np.generic]
    width: int
    """k of [T, k]; 0 of [T]."""

    def read(self, arrays: _Arrays, num_tokens: int) -> Array:
        column = arrays.array(self.dtype, num_tokens * max(1, self.width))
        _check_column(self.name, column)
        return column.reshape(num_tokens, self.width) if self.width else column


class _Head(NamedTuple):
    """What the description says of one trajectory."""

    num_tokens: int
    prompt_length: int
    num_runs: int
    num_spans: int
    reward: float
    finish_reason: str
    reward_parts: Mapping[str, float]
    columns: Sequence[_ColumnLayout]

    @classmethod
    def read(cls, description: _Description) -> _Head:
        values = description.unpack(_TRAJECTORY)
        num_tokens, prompt_length, num_runs, num_spans, reward, num_parts, num_columns = values
        finish_reason = description.text()
        parts = {description.text(): description.unpack(_NUMBER)[0] for _ in range(num_parts)}
        _check_described(reward, parts, num_columns)
        columns = [_read_layout(description) for _ in range(num_columns)]
        if prompt_length > num_tokens:
            raise ValueError(f"a prompt of {prompt_length} in {num_tokens} tokens")
        if num_runs > num_tokens + 1 or num_spans > num_tokens:
            raise ValueError(f"{num_runs} runs and {num_spans} spans for {num_tokens} tokens")
        if len(parts) < num_parts or len({column.name for column in columns}) < num_columns:
            raise ValueError("two reward parts or two columns have the same name")
        sizes = (num_tokens, prompt_length, num_runs, num_spans)
        return cls(*sizes, reward, finish_reason, parts, columns)


def _read_layout(description: _Description) -> _ColumnLayout:
    name = description.text()
    code, width = description.unpack(_COLUMN)
    if code >= len(_DTYPES):
        raise ValueError(f"column {name!r} has type {code}, which is unknown")
    return _ColumnLayout(name, _DTYPES[code], width)


def _open(data: bytes | memoryview) -> tuple[_Description, _Arrays]:
    """Readers of the description and of the arrays, once header and checksum are right."""
    view = memoryview(data).toreadonly()
    if len(view) < _HEADER.size:
        raise ValueError(f"{len(view)} bytes are too few for a trajectory group")
    magic, version, flags, crc, length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise ValueError(f"these bytes begin with {magic!r} and are no trajectory group")
    if version != FORMAT_VERSION or flags & ~_COMPRESSED:
        raise ValueError(
            f"trajectory group in format {version} with flags {flags:#x}; "
            f"this program reads format {FORMAT_VERSION}: update it"
        )
    body = view[_HEADER.size :]
    if crc32(body) != crc:
        raise ValueError(
            "the checksum of a trajectory group does not agree: its bytes were damaged"
        )
    if flags & _COMPRESSED:
        body = memoryview(_decompress(body))
    if length > len(body):
        raise ValueError(f"a description of {length} bytes does not fit {len(body)} bytes")
    return _Description(bytes(body[:length])), _Arrays(body, length)


def _decompress(body: memoryview) -> bytes:
    if len(body) < _RAW_BYTES.size:
        raise ValueError(f"{len(body)} bytes are too few for a compressed body")
    (raw_bytes,) = _RAW_BYTES.unpack_from(body)
    frame = body[_RAW_BYTES.size :]
    if raw_bytes > min(MAX_BODY_BYTES, MAX_COMPRESSION * len(frame)):
        raise ValueError(f"{len(frame)} compressed bytes claim to be {raw_bytes}")
    try:
        # zstandard allocates what the frame itself declares, whatever max_output_size is.
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
    heads: Sequence[_Head],
    columns: Sequence[Mapping[str, Array]],
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
                columns=columns[number],
            )
        )
        start = end
    return tuple(trajectories)


# Both ways -----------------------------------------------------------------------------------


def _check_described(reward: float, reward_parts: Mapping[str, float], num_columns: int) -> None:
    if not (math.isfinite(reward) and all(map(math.isfinite, reward_parts.values()))):
        raise ValueError(f"reward {reward} {dict(reward_parts)} is not finite")
    if num_columns > MAX_COLUMNS:
        raise ValueError(f"{num_columns} columns, of at most {MAX_COLUMNS}")


def _check_column(name: str, column: Array) -> None:
    if column.dtype.kind == "f":
        check_finite(column, f"column {name!r}")
