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
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from buffer.flat import F4, I4, U4, Array, FlatGroup, check_finite, exactly
from buffer.types import FloatArray, IntArray, PromptRef, Trajectory, TrajectoryGroup

MAGIC = b"LSHG"
FORMAT_VERSION = 2
COLUMN_DTYPES = ("<i1", "<u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""Types that a further column may have; the wire carries the index."""
MAX_TRAJECTORIES = 2**16
MAX_COLUMNS = 256
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
    try:
        flat = FlatGroup.of(group.trajectories)
        out = _Writer()
        columns = _describe(group, flat, out)
        tokens = [exactly(t.tokens, I4, "tokens") for t in group.trajectories]
        logprobs = [_as_float32(t.rollout_logprobs) for t in group.trajectories]
        description = b"".join(out.parts)
        data = _seal(description, [tokens, logprobs, [flat.runs], [flat.spans], *columns])
        # Checked where they have come to lie in one piece.
        arrays = _Reader(memoryview(data)[_HEADER.size :], len(description))
        flat.check(arrays.array(I4, flat.num_tokens), arrays.array(F4, flat.num_tokens))
        return _compress(data) if compress else data
    except ValueError as error:
        raise ValueError(f"group {group.group_id}: {error}") from None


def decode_group(data: bytes) -> TrajectoryGroup:
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
    description.expect_end("description")
    num_tokens = sum(head.num_tokens for head in heads)
    tokens, logprobs = arrays.array(I4, num_tokens), arrays.array(F4, num_tokens)
    flat = FlatGroup(
        lengths=[head.num_tokens for head in heads],
        run_counts=[head.num_runs for head in heads],
        span_counts=[head.num_spans for head in heads],
        runs=arrays.array(U4, sum(head.num_runs for head in heads)),
        spans=arrays.array(U4, 3 * sum(head.num_spans for head in heads)).reshape(-1, 3),
    )
    flat.check(tokens, logprobs)
    columns = [{c.name: c.read(arrays, head.num_tokens) for c in head.columns} for head in heads]
    arrays.expect_end("arrays")
    return TrajectoryGroup(
        group_id=group_id,
        prompt=PromptRef(task=task, index=index, attempt=attempt),
        trajectories=_cut(tokens, logprobs, flat, heads, columns),
    )


# Writing -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    parts: list[bytes] = field(default_factory=list)

    def pack(self, layout: struct.Struct, *values: float) -> None:
        try:
            self.parts.append(layout.pack(*values))
        except struct.error as error:
            raise ValueError(f"{values} do not fit their fields: {error}") from None

    def text(self, value: str) -> None:
        raw = value.encode()
        self.pack(_TEXT, len(raw))
        self.parts.append(raw)


def _describe(group: TrajectoryGroup, flat: FlatGroup, out: _Writer) -> list[list[Array]]:
    """Writes the description; returns the columns in wire order."""
    if len(group.trajectories) > MAX_TRAJECTORIES:
        raise ValueError(f"{len(group.trajectories)} trajectories, of at most {MAX_TRAJECTORIES}")
    out.text(group.group_id)
    out.text(group.prompt.task)
    out.pack(_PROMPT, group.prompt.index, group.prompt.attempt, len(group.trajectories))
    columns: list[list[Array]] = []
    for number, trajectory in enumerate(group.trajectories):
        try:
            _check_described(trajectory.reward, trajectory.reward_parts, len(trajectory.columns))
            out.pack(
                _TRAJECTORY,
                *(trajectory.num_tokens, trajectory.prompt_length),
                *(flat.run_counts[number], flat.span_counts[number]),
                trajectory.reward,
                *(len(trajectory.reward_parts), len(trajectory.columns)),
            )
            out.text(trajectory.finish_reason)
            for name, value in trajectory.reward_parts.items():
                out.text(name)
                out.pack(_NUMBER, value)
            columns += [[_describe_column(n, c, out)] for n, c in trajectory.columns.items()]
        except ValueError as error:
            raise ValueError(f"trajectory {number}: {error}") from None
    return columns


def _describe_column(name: str, column: Array, out: _Writer) -> Array:
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    if little.dtype not in _CODES or little.ndim not in (1, 2) or 0 in little.shape[1:]:
        raise ValueError(
            f"column {name!r} is {column.dtype}{list(column.shape)}: use [T] or [T, k] of one of "
            f"{', '.join(COLUMN_DTYPES)}"
        )
    _check_column(name, little)
    out.text(name)
    out.pack(_COLUMN, _CODES[little.dtype], little.shape[1] if little.ndim == 2 else 0)
    return little


def _as_float32(logprobs: Array) -> Array:
    if logprobs.dtype == F4:
        return logprobs
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        return logprobs.astype(F4)


def _seal(description: bytes, arrays: Sequence[Sequence[Array]]) -> bytes:
    """The message. The arrays of one inner sequence are written without a gap."""
    parts: list[bytes | memoryview] = [description]
    size = len(description)
    for pieces in arrays:
        padding = -size % _ALIGNMENT
        parts.append(bytes(padding))
        parts += [np.ascontiguousarray(p).reshape(-1).view(np.uint8).data for p in pieces]
        size += padding + sum(piece.nbytes for piece in pieces)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"its {size} bytes are more than {MAX_BODY_BYTES}: make groups smaller")
    return _with_header(0, len(description), parts)


def _compress(data: bytes) -> bytes:
    """The same message compressed, unless it would not become shorter, or incredibly short."""
    *_, description_bytes = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body)
    if not len(frame) + _RAW_BYTES.size < len(body) <= MAX_COMPRESSION * len(frame):
        return data
    return _with_header(_COMPRESSED, description_bytes, [_RAW_BYTES.pack(len(body)), frame])


def _with_header(flags: int, description_bytes: int, body: Sequence[bytes | memoryview]) -> bytes:
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, flags, crc, description_bytes)
    return b"".join([header, *body])


# Reading -------------------------------------------------------------------------------------


class _Reader:
    """A cursor over a part of a body that never steps past its end."""

    __slots__ = ("_at", "_data", "_end")

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at, self._end = data, at, len(data)

    def take(self, num_bytes: int) -> memoryview:
        start = self._at
        if num_bytes > self._end - start:
            raise ValueError(
                f"{num_bytes} bytes wanted at {start}, but the part ends at {self._end}"
            )
        self._at = start + num_bytes
        return self._data[start : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self) -> float:
        return float(_NUMBER.unpack(self.take(_NUMBER.size))[0])

    def text(self) -> str:
        (length,) = self.unpack(_TEXT)
        return str(self.take(length), "utf-8")  # UnicodeDecodeError is a ValueError

    def array(self, dtype: np.dtype[np.generic], count: int) -> NDArray[Any]:
        padding = self.take(-self._at % _ALIGNMENT)
        if any(padding):
            raise ValueError("the padding between two arrays is not zero")
        return np.frombuffer(self.take(dtype.itemsize * count), dtype)

    def expect_end(self, part: str) -> None:
        if self._at != self._end:
            raise ValueError(f"{self._end - self._at} bytes too many after the {part}")


@dataclass(slots=True, frozen=True)
class _ColumnLayout:
    name: str
    dtype: np.dtype[np.generic]
    width: int
    """k of [T, k]; 0 of [T]."""

    def read(self, arrays: _Reader, num_tokens: int) -> Array:
        column = arrays.array(self.dtype, num_tokens * max(1, self.width))
        _check_column(self.name, column)
        return column.reshape(num_tokens, self.width) if self.width else column


@dataclass(slots=True, frozen=True)
class _Head:
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
    def read(cls, description: _Reader) -> _Head:
        values = description.unpack(_TRAJECTORY)
        num_tokens, prompt_length, num_runs, num_spans, reward, num_parts, num_columns = values
        finish_reason = description.text()
        parts = {description.text(): description.number() for _ in range(num_parts)}
        _check_described(reward, parts, num_columns)
        columns = [_read_layout(description) for _ in range(num_columns)]
        if prompt_length > num_tokens:
            raise ValueError(f"a prompt of {prompt_length} in {num_tokens} tokens")
        if max(num_runs - 1, num_spans) > num_tokens:
            raise ValueError(f"{num_runs} runs and {num_spans} spans for {num_tokens} tokens")
        if len(parts) < num_parts or len({column.name for column in columns}) < num_columns:
            raise ValueError("two reward parts or two columns have the same name")
        return cls(
            num_tokens=num_tokens,
            prompt_length=prompt_length,
            num_runs=num_runs,
            num_spans=num_spans,
            reward=reward,
            finish_reason=finish_reason,
            reward_parts=parts,
            columns=columns,
        )


def _read_layout(description: _Reader) -> _ColumnLayout:
    name = description.text()
    code, width = description.unpack(_COLUMN)
    if code >= len(_DTYPES):
        raise ValueError(f"column {name!r} has type {code}, which is unknown")
    return _ColumnLayout(name, _DTYPES[code], width)


def _open(data: bytes) -> tuple[_Reader, _Reader]:
    """Readers of the description and of the arrays, once header and checksum are right."""
    view = memoryview(data)
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
    if zlib.crc32(body) != crc:
        raise ValueError(
            "the checksum of a trajectory group does not agree: its bytes were damaged"
        )
    if flags & _COMPRESSED:
        body = memoryview(_decompress(body))
    if length > len(body):
        raise ValueError(f"a description of {length} bytes does not fit {len(body)} bytes")
    return _Reader(body[:length], 0), _Reader(body, length)


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
