"""The description with which a group's bytes begin: all of it that is not an array.

group id, task                     texts: u16 bytes, then UTF-8
index u64, attempt u32, number of trajectories u32
temperature f64, top_p f64, top_k i64, min_p f64, frequency, presence, repetition penalty f64
of each trajectory
    tokens, prompt length, mask runs, version spans, episode u32; reward f64
    number of reward parts and of columns u16; finish reason
    parts: name, f64;    columns: name, type u8, width u32 (0 for one number a token)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from buffer.types import PromptRef, SamplingParams, TrajectoryGroup
from buffer.wire.masks import Array, FlatGroup, check_finite

COLUMN_DTYPES = ("<i1", "<u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""Types that a further column may have; the wire carries the index."""
MAX_TRAJECTORIES = 2**16
MAX_COLUMNS = 256
MAX_TEXT_BYTES = 2**16 - 1

_PROMPT = struct.Struct("<QII")
_SAMPLING = struct.Struct("<ddqdddd")
_TRAJECTORY = struct.Struct("<IIIIIdHH")
_COLUMN = struct.Struct("<BI")
_TEXT = struct.Struct("<H")
_NUMBER = struct.Struct("<d")
_DTYPES = tuple(np.dtype(name) for name in COLUMN_DTYPES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


# Writing -------------------------------------------------------------------------------------


def describe(group: TrajectoryGroup, flat: FlatGroup) -> tuple[bytes, list[Array]]:
    """The description, and the columns in wire order. Raises ValueError for what does not fit."""
    if len(group.trajectories) > MAX_TRAJECTORIES:
        raise ValueError(f"{len(group.trajectories)} trajectories, of at most {MAX_TRAJECTORIES}")
    prompt = group.prompt
    parts = [_text(group.group_id), _text(prompt.task)]
    try:
        parts.append(_PROMPT.pack(prompt.index, prompt.attempt, len(group.trajectories)))
    except struct.error as error:
        raise ValueError(f"{prompt} does not fit its fields: {error}") from None
    parts.append(_sampling(group.sampling))
    columns: list[Array] = []
    counts = zip(flat.lengths, flat.run_counts, flat.span_counts, strict=True)
    for number, (t, (length, num_runs, num_spans)) in enumerate(
        zip(group.trajectories, counts, strict=True)
    ):
        try:
            _check_described(t.reward, t.reward_parts, len(t.columns))
            sizes = (length, t.prompt_length, num_runs, num_spans, t.episode)
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
    _check_episodes([(t.episode, t.reward) for t in group.trajectories])
    return b"".join(parts), columns


def _sampling(sampling: SamplingParams) -> bytes:
    _check_sampling(sampling)
    try:
        return _SAMPLING.pack(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
    except struct.error as error:
        raise ValueError(f"{sampling} does not fit its fields: {error}") from None


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
    check_column(name, little)
    return little


# Reading -------------------------------------------------------------------------------------


class _Cursor:
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
        return self.take(length).decode()  # UnicodeDecodeError is a ValueError

    def take(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError(f"{length} bytes end after the description")
        return self._data[start : self._at]

    def expect_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many in the description")


@dataclass(slots=True, frozen=True)
class ColumnLayout:
    """A column before its numbers are read."""

    name: str
    dtype: np.dtype[np.generic]
    width: int
    """k of [T, k]; 0 of [T]."""


class Head(NamedTuple):
    """What the description says of one trajectory."""

    num_tokens: int
    prompt_length: int
    num_runs: int
    num_spans: int
    episode: int
    reward: float
    finish_reason: str
    reward_parts: Mapping[str, float]
    columns: Sequence[ColumnLayout]

    @classmethod
    def read(cls, cursor: _Cursor) -> Head:
        values = cursor.unpack(_TRAJECTORY)
        num_tokens, prompt_length, num_runs, num_spans, episode, *others = values
        reward, num_parts, num_columns = others
        finish_reason = cursor.text()
        parts = {cursor.text(): cursor.unpack(_NUMBER)[0] for _ in range(num_parts)}
        _check_described(reward, parts, num_columns)
        columns = [_read_layout(cursor) for _ in range(num_columns)]
        if prompt_length > num_tokens:
            raise ValueError(f"a prompt of {prompt_length} in {num_tokens} tokens")
        if num_runs > num_tokens + 1 or num_spans > num_tokens:
            raise ValueError(f"{num_runs} runs and {num_spans} spans for {num_tokens} tokens")
        if len(parts) < num_parts or len({column.name for column in columns}) < num_columns:
            raise ValueError("two reward parts or two columns have the same name")
        return cls(
            num_tokens,
            prompt_length,
            num_runs,
            num_spans,
            episode,
            reward,
            finish_reason,
            parts,
            columns,
        )


def _read_layout(cursor: _Cursor) -> ColumnLayout:
    name = cursor.text()
    code, width = cursor.unpack(_COLUMN)
    if code >= len(_DTYPES):
        raise ValueError(f"column {name!r} has type {code}, which is unknown")
    return ColumnLayout(name, _DTYPES[code], width)


@lru_cache(maxsize=16)
def _read_sampling(raw: bytes) -> SamplingParams:
    """Groups of a run are all sampled alike, so this is done once."""
    temperature, top_p, top_k, min_p, frequency, presence, repetition = _SAMPLING.unpack(raw)
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
    )
    _check_sampling(sampling)
    return sampling


@dataclass(kw_only=True, slots=True, frozen=True)
class Description:
    """What was read of one group."""

    group_id: str
    prompt: PromptRef
    sampling: SamplingParams
    heads: Sequence[Head]

    @classmethod
    def read(cls, data: bytes) -> Description:
        """Raises ValueError unless these bytes are one whole, valid description."""
        cursor = _Cursor(data)
        group_id, task = cursor.text(), cursor.text()
        index, attempt, num_trajectories = cursor.unpack(_PROMPT)
        sampling = _read_sampling(cursor.take(_SAMPLING.size))
        if not 0 < num_trajectories <= MAX_TRAJECTORIES:
            raise ValueError(f"a group of {num_trajectories} trajectories")
        heads = [Head.read(cursor) for _ in range(num_trajectories)]
        cursor.expect_end()
        _check_episodes([(head.episode, head.reward) for head in heads])
        prompt = PromptRef(task=task, index=index, attempt=attempt)
        return cls(group_id=group_id, prompt=prompt, sampling=sampling, heads=heads)


# Both ways -----------------------------------------------------------------------------------


def _check_described(reward: float, reward_parts: Mapping[str, float], num_columns: int) -> None:
    if not (math.isfinite(reward) and all(map(math.isfinite, reward_parts.values()))):
        raise ValueError(f"reward {reward} {dict(reward_parts)} is not finite")
    if num_columns > MAX_COLUMNS:
        raise ValueError(f"{num_columns} columns, of at most {MAX_COLUMNS}")


def _check_episodes(members: Sequence[tuple[int, float]]) -> None:
    """Of each trajectory its episode and its reward."""
    rewards: dict[int, float] = {}
    for episode, reward in members:
        if rewards.setdefault(episode, reward) != reward:
            raise ValueError(
                f"trajectories of episode {episode} have rewards {rewards[episode]} and {reward}: "
                "an episode has one (give each episode of a group its own number)"
            )
    if max(rewards) >= len(rewards):
        raise ValueError(
            f"episode {max(rewards)} among {len(rewards)}: they are numbered from 0 without a gap"
        )


def _check_sampling(sampling: SamplingParams) -> None:
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty,
    )
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{sampling} holds NaN or infinity")


def check_column(name: str, column: Array) -> None:
    """Raises ValueError for a column that holds NaN or infinity."""
    if column.dtype.kind == "f":
        check_finite(column, f"column {name!r}")
