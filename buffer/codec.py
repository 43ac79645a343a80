"""The wire format of a trajectory group: flat arrays behind a versioned header, no pickle.

    offset  header
    0       4s   magic b"LSHG"
    4       u16  format version (1)
    6       u16  flags (0)
    8       u32  CRC-32 of everything after the header
    12      u32  bytes of the description that follows
    16      description: group and prompt; for each trajectory lengths, reward, names (_describe)
    ...     arrays, each padded to start at a multiple of 8: for each trajectory
              tokens i32[T], rollout_logprobs f32[T], mask runs u32[r], spans u32[s, 3], columns

Numbers are little-endian. `loss_mask` is stored as the lengths of its runs, the first one of zeros
(which may be empty); version spans as (version, start, end). That makes 8 bytes a token.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from buffer.types import MaskArray, PromptRef, Trajectory, TrajectoryGroup, VersionSpan

MAGIC = b"LSHG"
FORMAT_VERSION = 1
COLUMN_DTYPES = ("<i1", "<u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""Types that a further column may have; the wire carries the index."""

_HEADER = struct.Struct("<4sHHII")
_ALIGNMENT = 8
_CODES = {np.dtype(name): code for code, name in enumerate(COLUMN_DTYPES)}
Array = NDArray[np.generic]


def encode_group(group: TrajectoryGroup) -> bytes:
    """Bytes of a group. Raises ValueError naming what of it the format cannot carry."""
    description = _Writer()
    arrays: list[Array] = []
    description.text(group.group_id)
    description.text(group.prompt.task)
    description.pack("<QII", group.prompt.index, group.prompt.attempt, len(group.trajectories))
    for number, trajectory in enumerate(group.trajectories):
        try:
            _check_values(trajectory)
            arrays += _describe(trajectory, description)
        except ValueError as error:
            raise ValueError(f"group {group.group_id}, trajectory {number}: {error}") from None
    if not any(t.loss_mask.any() for t in group.trajectories):
        raise ValueError(f"group {group.group_id}: no trainable token in any trajectory")
    return _seal(description.parts, arrays)


def decode_group(data: bytes) -> TrajectoryGroup:
    """The group of these bytes, its arrays read-only views of them.

    Whatever the bytes, raises ValueError and nothing else if they are not one whole, valid group.
    """
    description, arrays = _open(data)
    group_id, task = description.text(), description.text()
    index, attempt, num_trajectories = description.unpack("<QII")
    if num_trajectories == 0:
        raise ValueError("a group without trajectories")
    trajectories = tuple(_read_trajectory(description, arrays) for _ in range(num_trajectories))
    description.expect_end("description")
    arrays.expect_end("arrays")
    if not any(t.loss_mask.any() for t in trajectories):
        raise ValueError(f"group {group_id!r}: no trainable token in any trajectory")
    prompt = PromptRef(task=task, index=index, attempt=attempt)
    return TrajectoryGroup(group_id=group_id, prompt=prompt, trajectories=trajectories)


# Writing -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    parts: list[bytes] = field(default_factory=list)

    def pack(self, layout: str, *values: float) -> None:
        try:
            self.parts.append(struct.pack(layout, *values))
        except struct.error as error:
            raise ValueError(f"{values} do not fit their fields: {error}") from None

    def text(self, value: str) -> None:
        raw = value.encode()
        self.pack("<H", len(raw))
        self.parts.append(raw)


def _describe(trajectory: Trajectory, out: _Writer) -> list[Array]:
    """Writes a trajectory's description; returns its arrays in wire order."""
    runs = _runs_of(trajectory.loss_mask)
    spans = np.array([(s.version, s.start, s.end) for s in trajectory.version_spans], dtype="<i8")
    if spans.size and spans.max() >= 2**32:
        raise ValueError(f"version or position {spans.max()} does not fit 32 bits")
    out.pack("<IIII", trajectory.num_tokens, trajectory.prompt_length, len(runs), len(spans))
    out.pack("<d", trajectory.reward)
    out.text(trajectory.finish_reason)
    out.pack("<H", len(trajectory.reward_parts))
    for name, value in trajectory.reward_parts.items():
        out.text(name)
        out.pack("<d", value)
    out.pack("<H", len(trajectory.columns))
    columns = [_describe_column(name, column, out) for name, column in trajectory.columns.items()]
    tokens = trajectory.tokens.astype("<i4", copy=False)
    logprobs = trajectory.rollout_logprobs.astype("<f4", copy=False)
    return [tokens, logprobs, runs, spans.astype("<u4"), *columns]


def _describe_column(name: str, column: Array, out: _Writer) -> Array:
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    if little.dtype not in _CODES or little.ndim not in (1, 2) or 0 in little.shape[1:]:
        raise ValueError(
            f"column {name!r} is {column.dtype}{list(column.shape)}: use [T] or [T, k] of one of "
            f"{', '.join(COLUMN_DTYPES)}"
        )
    out.text(name)
    out.pack("<BI", _CODES[little.dtype], little.shape[1] if little.ndim == 2 else 0)
    return little


def _runs_of(mask: MaskArray) -> NDArray[np.uint32]:
    """Lengths of the runs of equal values, the first one of zeros."""
    edges = np.flatnonzero(np.diff(mask, prepend=0)) if len(mask) else np.empty(0, np.int64)
    return np.diff(np.concatenate(([0], edges, [len(mask)]))).astype("<u4")


def _seal(description: list[bytes], arrays: list[Array]) -> bytes:
    text = b"".join(description)
    parts: list[bytes | memoryview] = [text]
    size = _HEADER.size + len(text)
    for array in arrays:
        padding = -size % _ALIGNMENT
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts += [bytes(padding), raw]
        size += padding + raw.nbytes
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([_HEADER.pack(MAGIC, FORMAT_VERSION, 0, crc, len(text)), *parts])


# Reading -------------------------------------------------------------------------------------


class _Reader:
    """A cursor over bytes [at, end) of the message that never steps past its end."""

    __slots__ = ("_at", "_data", "_end")

    def __init__(self, data: memoryview, at: int, end: int) -> None:
        self._data, self._at, self._end = data, at, end

    def take(self, num_bytes: int) -> memoryview:
        start = self._at
        if num_bytes > self._end - start:
            raise ValueError(
                f"{num_bytes} bytes wanted at {start}, but the part ends at {self._end}"
            )
        self._at = start + num_bytes
        return self._data[start : self._at]

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def number(self) -> float:
        return float(struct.unpack("<d", self.take(8))[0])

    def text(self) -> str:
        (length,) = self.unpack("<H")
        return str(self.take(length), "utf-8")  # UnicodeDecodeError is a ValueError

    def array(self, dtype: str, count: int) -> Array:
        self.take(-self._at % _ALIGNMENT)
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)

    def expect_end(self, part: str) -> None:
        if self._at != self._end:
            raise ValueError(f"{self._end - self._at} bytes too many after the {part}")


def _open(data: bytes) -> tuple[_Reader, _Reader]:
    """Readers of the description and of the arrays, once header and checksum are right."""
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise ValueError(f"{len(view)} bytes are too few for a trajectory group")
    magic, version, flags, crc, length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise ValueError(f"these bytes begin with {magic!r} and are no trajectory group")
    if version != FORMAT_VERSION or flags:
        raise ValueError(
            f"trajectory group in format {version} with flags {flags:#x}; "
            f"this program reads format {FORMAT_VERSION}: update it"
        )
    if zlib.crc32(view[_HEADER.size :]) != crc:
        raise ValueError(
            "the checksum of a trajectory group does not agree: its bytes were damaged"
        )
    middle = _HEADER.size + length
    if middle > len(view):
        raise ValueError(f"a description of {length} bytes does not fit {len(view)} bytes")
    return _Reader(view, _HEADER.size, middle), _Reader(view, middle, len(view))


def _read_trajectory(description: _Reader, arrays: _Reader) -> Trajectory:
    num_tokens, prompt_length, num_runs, num_spans = description.unpack("<IIII")
    reward, finish_reason = description.number(), description.text()
    parts = dict(_read_parts(description))
    (num_columns,) = description.unpack("<H")
    layouts = [_read_column_layout(description) for _ in range(num_columns)]
    if prompt_length > num_tokens:
        raise ValueError(f"a prompt of {prompt_length} in {num_tokens} tokens")
    tokens = arrays.array("<i4", num_tokens)
    logprobs = arrays.array("<f4", num_tokens)
    mask = _expand(arrays.array("<u4", num_runs), num_tokens)
    spans = _read_spans(arrays.array("<u4", 3 * num_spans))
    columns: dict[str, Array] = {}
    for name, dtype, width in layouts:
        flat = arrays.array(dtype, num_tokens * max(1, width))
        columns[name] = flat.reshape(num_tokens, width) if width else flat
    if len(columns) != num_columns:
        raise ValueError("two columns of one name")
    trajectory = Trajectory(
        tokens=tokens.view(np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs.view(np.float32),
        version_spans=spans,
        prompt_length=prompt_length,
        reward=reward,
        finish_reason=finish_reason,
        reward_parts=parts,
        columns=columns,
    )
    _check_values(trajectory)
    return trajectory


def _read_parts(description: _Reader) -> Iterator[tuple[str, float]]:
    (count,) = description.unpack("<H")
    for _ in range(count):
        yield description.text(), description.number()


def _read_column_layout(description: _Reader) -> tuple[str, str, int]:
    name = description.text()
    code, width = description.unpack("<BI")
    if code >= len(COLUMN_DTYPES):
        raise ValueError(f"column {name!r} has type {code}, which is unknown")
    return name, COLUMN_DTYPES[code], width


def _expand(runs: Array, num_tokens: int) -> MaskArray:
    lengths = runs.astype(np.int64)
    # Compared before expanding: a forged run must not ask for more memory than the tokens took.
    if int(lengths.sum()) != num_tokens:
        raise ValueError(f"mask of {int(lengths.sum())} for {num_tokens} tokens")
    mask = np.repeat((np.arange(len(lengths)) % 2).astype(np.uint8), lengths)
    mask.flags.writeable = False
    return mask


def _read_spans(flat: Array) -> tuple[VersionSpan, ...]:
    rows = flat.reshape(-1, 3).tolist()
    if any(start >= end for _, start, end in rows):
        raise ValueError("a version span without tokens")
    return tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in rows)


# Both ways -----------------------------------------------------------------------------------


def _check_values(trajectory: Trajectory) -> None:
    """What holds of every trajectory beyond its shapes; ValueError otherwise."""
    mask = trajectory.loss_mask
    if mask.size and mask.max() > 1:
        raise ValueError("loss_mask holds something else than 0 and 1")
    if trajectory.tokens.size and trajectory.tokens.min() < 0:
        raise ValueError(f"token id {trajectory.tokens.min()} is negative")
    if not np.isfinite(trajectory.rollout_logprobs).all():
        raise ValueError("rollout_logprobs holds NaN or infinity")
    if not np.isfinite([trajectory.reward, *trajectory.reward_parts.values()]).all():
        raise ValueError(
            f"reward {trajectory.reward} {dict(trajectory.reward_parts)} is not finite"
        )
    _check_spans(trajectory)


def _check_spans(trajectory: Trajectory) -> None:
    uncovered, end = 0, 0
    for span in trajectory.version_spans:
        if span.start < end or span.end > trajectory.num_tokens:
            raise ValueError(f"{span} overlaps the one before or ends after the tokens")
        uncovered += int(trajectory.loss_mask[end : span.start].sum())
        end = span.end
    uncovered += int(trajectory.loss_mask[end:].sum())
    if uncovered:
        raise ValueError(f"{uncovered} trainable tokens are in no version span")
