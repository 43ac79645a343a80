"""The description of a group in the wire format: everything but its arrays.

It is one MessagePack map with the fields of `Description` in order. Bytes that `describe` would not
have written are rejected, so that the encoding is unique.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from operator import attrgetter
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from buffer.types import PromptRef, SamplingParams, TrajectoryGroup
from buffer.wire.masks import Array, FlatGroup, check_finite

ColumnType = Literal["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
COLUMN_TYPES: tuple[str, ...] = get_args(ColumnType)
"""Types of further columns, all little-endian."""
MAX_TRAJECTORIES = 2**16
MAX_COLUMNS = 256
MAX_PICTURES = 2**12

Count = Annotated[int, Meta(ge=0, lt=2**32)]
Text = Annotated[str, Meta(max_length=2**16 - 1)]


class Column(Struct, frozen=True, forbid_unknown_fields=True):
    """A further column; its values are among the arrays."""

    name: Text
    type: ColumnType
    width: Count
    """k for [T, k]; 0 for [T]."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<{self.type}")


class PictureFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A picture of a group; its bytes are among the arrays."""

    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    num_bytes: Annotated[int, Meta(gt=0, lt=2**32)]


class Head(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One trajectory without its arrays."""

    num_tokens: Count
    prompt_length: Count
    num_runs: Count
    """Runs of equal values in the loss mask."""
    num_spans: Count
    """Version spans."""
    episode: Count
    reward: float
    finish_reason: Text
    reward_parts: dict[Text, float]
    columns: Annotated[list[Column], Meta(max_length=MAX_COLUMNS)]
    pictures: Annotated[list[Count], Meta(max_length=MAX_PICTURES)] = []
    """Its pictures' places among those of the group; not written without any."""
    role: Text = ""
    """Not written if empty."""

    def check(self) -> None:
        """Raises ValueError for what the types leave open."""
        if not all(map(math.isfinite, (self.reward, *self.reward_parts.values()))):
            raise ValueError(f"reward {self.reward} {self.reward_parts} is not finite")
        if self.prompt_length > self.num_tokens:
            raise ValueError(f"a prompt of {self.prompt_length} in {self.num_tokens} tokens")
        if len({column.name for column in self.columns}) < len(self.columns):
            raise ValueError("two columns have the same name")


class Description(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One group without its arrays."""

    group_id: Text
    task: Text
    index: Annotated[int, Meta(ge=0)]
    attempt: Count
    sampling: SamplingParams
    trajectories: Annotated[list[Head], Meta(min_length=1, max_length=MAX_TRAJECTORIES)]
    pictures: Annotated[list[PictureFile], Meta(max_length=MAX_PICTURES)] = []
    """In the order of their digests; not written without any."""

    @classmethod
    def read(cls, data: bytes) -> Description:
        """Raises ValueError unless these bytes are one whole, valid description."""
        said = _DECODER.decode(data)
        if _ENCODER.encode(said) != data:
            raise ValueError("the description is not written as Leash writes it")
        said.check()
        return said

    @property
    def prompt(self) -> PromptRef:
        return PromptRef(task=self.task, index=self.index, attempt=self.attempt)

    def check(self) -> None:
        """Raises ValueError for what the types leave open."""
        if not all(map(math.isfinite, _FLOATS(self.sampling))):
            raise ValueError(f"{self.sampling} holds NaN or infinity")
        rewards: dict[tuple[int, str], float] = {}
        for number, head in enumerate(self.trajectories):
            try:
                head.check()
            except ValueError as error:
                raise ValueError(f"trajectory {number}: {error}") from None
            player = (head.episode, head.role)
            if rewards.setdefault(player, head.reward) != head.reward:
                raise ValueError(
                    f"trajectories of episode {head.episode} have rewards {rewards[player]} "
                    f"and {head.reward}: an episode has one, or one for each role (give each "
                    "episode of a group its own number)"
                )
        episodes = {head.episode for head in self.trajectories}
        if max(episodes) >= len(episodes):
            raise ValueError(
                f"episode {max(episodes)} among {len(episodes)}: number them from 0 without gaps"
            )
        digests = [picture.digest for picture in self.pictures]
        if digests != sorted({*digests}):
            raise ValueError("its pictures are not in the order of their digests, each once")
        shown = {place for head in self.trajectories for place in head.pictures}
        if shown != {*range(len(digests))}:
            raise ValueError(
                f"its trajectories show the pictures {sorted(shown)} of {len(digests)}; keep those "
                "that they show, and no others"
            )


_FLOATS = attrgetter(*(f.name for f in fields(SamplingParams) if f.type == "float"))
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Description)


def describe(group: TrajectoryGroup, flat: FlatGroup) -> tuple[bytes, list[Array]]:
    """The description, and the columns and pictures in wire order. Raises ValueError for what does
    not fit."""
    columns: list[Array] = []
    heads = []
    pictures = {digest: place for place, digest in enumerate(sorted(group.pictures))}
    counts = zip(flat.lengths, flat.run_counts, flat.span_counts, strict=True)
    for t, (num_tokens, num_runs, num_spans) in zip(group.trajectories, counts, strict=True):
        laid_out = []
        for name, column in t.columns.items():
            little = _little_endian(name, column)
            width = little.shape[1] if little.ndim == 2 else 0
            laid_out.append(Column(name, cast("ColumnType", little.dtype.str[1:]), width))
            columns.append(little)
        head = Head(
            num_tokens,
            int(t.prompt_length),
            num_runs,
            num_spans,
            int(t.episode),
            float(t.reward),
            t.finish_reason,
            {name: float(value) for name, value in t.reward_parts.items()},
            laid_out,
            [pictures.get(digest, len(pictures)) for digest in t.pictures],
            t.role,
        )
        heads.append(head)
    prompt = group.prompt
    description = Description(
        *(group.group_id, prompt.task, prompt.index, prompt.attempt, group.sampling, heads),
        pictures=[PictureFile(digest, len(group.pictures[digest])) for digest in pictures],
    )
    try:
        # Decoding checks the types, and turns integers into floats where floats belong.
        read = _DECODER.decode(_ENCODER.encode(description))
    except msgspec.ValidationError as error:
        raise ValueError(_with_value(error, description)) from None
    except OverflowError as error:
        raise ValueError(f"{prompt} or {group.sampling} does not fit: {error}") from None
    read.check()
    columns += [np.frombuffer(group.pictures[digest], np.uint8) for digest in pictures]
    return _ENCODER.encode(read), columns


def _with_value(error: msgspec.ValidationError, value: Any) -> str:
    """The error's text with the value that it refers to."""
    problem, _, place = str(error).rpartition(" - at `$.")
    place = place.rstrip("`")
    for number, name in re.findall(r"\[(\d+)\]|(\w+)", place):
        value = getattr(value, name) if name else value[int(number)]
    return f"{place}={shortened(value)} does not fit: {problem}"


def _little_endian(name: str, column: Array) -> Array:
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    is_known = little.dtype.str[1:] in COLUMN_TYPES
    if not is_known or little.ndim not in (1, 2) or 0 in little.shape[1:]:
        raise ValueError(
            f"column {name!r} is {column.dtype}{list(column.shape)}: use [T] or [T, k] of one of "
            f"{', '.join(COLUMN_TYPES)}"
        )
    check_column(name, little)
    return little


def check_column(name: str, column: Array) -> None:
    """Raises ValueError for a column that holds NaN or infinity."""
    if column.dtype.kind == "f":
        check_finite(column, f"column {name!r}")
