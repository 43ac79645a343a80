"""The layout of a model: its tensors, each rank's pieces of them, and their safetensors file.

Every ZeRO-3 rank owns one contiguous piece of each tensor. A rank sends its stream: its pieces one
after the other. A receiver stages one safetensors file:

    stream of rank 0    [embed 0 | q 0 | k 0 | ...]
    stream of rank 1    [embed 1 | q 1 | k 1 | ...]
    file                header [embed 0 embed 1 | q 0 q 1 | k 0 k 1 | ...]

Pure: all of it follows from the tensors and the number of ranks, identically at both ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import prod
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, convert

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FILE_ALIGNMENT = 64
"""The data behind the header is aligned to it: a cache line, and the widest registers."""
_MAX_RANKS = 2**16
_RESERVED_NAME = "__metadata__"


class Part(NamedTuple):
    """A tensor of a checkpoint that is a consecutive range of a parameter's elements."""

    name: str
    shape: tuple[int, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """One parameter by its name in memory; `dtype` as torch spells it without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    """The tensors that it is in the file, one after the other; empty: one, of the same name. A
    mixture of experts has the weights of all experts in one parameter, and one by one in the file.
    """

    @property
    def file_parts(self) -> tuple[Part, ...]:
        return self.parts or (Part(self.name, self.shape),)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """The part of one tensor that one rank owns; never empty. Offsets and sizes in bytes."""

    tensor: int
    """Index into `Layout.tensors`."""
    stream_start: int
    file_start: int
    """Counted from the start of the file's data, behind its header."""
    num_bytes: int

    @property
    def stream_stop(self) -> int:
        return self.stream_start + self.num_bytes


@dataclass(kw_only=True, frozen=True)
class Layout:
    """A model's tensors, and how they are spread over the trainer's ranks.

    Tensors of wider items come first (otherwise in the given order), so that every piece is aligned
    to its dtype, in the streams and in the file, without padding.
    """

    tensors: tuple[TensorSpec, ...]
    num_ranks: int

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], num_ranks: int) -> Layout:
        """Raises ValueError naming a tensor that cannot be served, and for no tensor or rank."""
        specs = tuple(sorted(tensors, key=lambda t: -_item_bytes(t)))
        if not specs:
            raise ValueError("the model has no tensor to publish")
        counts = Counter(part.name for spec in specs for part in spec.file_parts)
        if doubled := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"tensors of the model share a name: {', '.join(doubled)}")
        if _RESERVED_NAME in counts:
            raise ValueError(f"a tensor is named {_RESERVED_NAME!r}, which safetensors reserves")
        for spec in specs:
            if sum(prod(part.shape) for part in spec.file_parts) != spec.num_elements:
                raise ValueError(f"the parts of tensor {spec.name!r} are not all of it")
        if not 1 <= num_ranks <= _MAX_RANKS:
            raise ValueError(f"num_ranks={num_ranks}: must lie between 1 and {_MAX_RANKS}")
        return cls(tensors=specs, num_ranks=num_ranks)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each rank, in the order of the tensors.

        As ZeRO-3 cuts them: each rank has ceil(n / num_ranks) of n elements, the last ones fewer.
        """
        return tuple(tuple(self._pieces_of(rank)) for rank in range(self.num_ranks))

    def _pieces_of(self, rank: int) -> Iterable[Piece]:
        stream_start = 0
        for index, (tensor, file_start) in enumerate(zip(self.tensors, self.offsets, strict=False)):
            share = -(-tensor.num_elements // self.num_ranks)
            start = min(rank * share, tensor.num_elements)
            num_elements = min(share, tensor.num_elements - start)
            if num_elements:
                item = ITEM_BYTES[tensor.dtype]
                yield Piece(
                    tensor=index,
                    stream_start=stream_start,
                    file_start=file_start + start * item,
                    num_bytes=num_elements * item,
                )
                stream_start += num_elements * item

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor in the file's data, and the end of the last one."""
        return tuple(accumulate((t.num_bytes for t in self.tensors), initial=0))

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def stream_bytes(self, rank: int) -> int:
        return self.pieces[rank][-1].stream_stop if self.pieces[rank] else 0

    @cached_property
    def file_header(self) -> bytes:
        """Header of a safetensors file of these tensors, padded to align the data."""
        entries, start = {}, 0
        for tensor in self.tensors:
            for part in tensor.file_parts:
                stop = start + prod(part.shape) * ITEM_BYTES[tensor.dtype]
                entries[part.name] = {
                    "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
                    "shape": list(part.shape),
                    "data_offsets": [start, stop],
                }
                start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _FILE_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def digest(self) -> str:
        """Equal at two ends if and only if their layouts are."""
        return sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        fields = {
            "num_ranks": self.num_ranks,
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
        }
        several = (tensor for tensor in self.tensors if tensor.parts)
        parts = {t.name: [[p.name, list(p.shape)] for p in t.parts] for t in several}
        return {**fields, "parts": parts} if parts else fields

    @classmethod
    def from_json(cls, fields: Any) -> Layout:
        """Raises ValueError naming what is wrong."""
        note = convert(fields, _LayoutNote)
        tensors = [
            TensorSpec(
                name=name,
                dtype=dtype,
                shape=shape,
                parts=tuple(Part(*part) for part in note.parts.get(name, ())),
            )
            for name, dtype, shape in note.tensors
        ]
        return cls.of(tensors, note.num_ranks)


@dataclass(kw_only=True, slots=True, frozen=True)
class _LayoutNote:
    num_ranks: Count
    tensors: tuple[tuple[str, str, tuple[Count, ...]], ...]
    parts: dict[str, tuple[tuple[str, tuple[Count, ...]], ...]] = field(default_factory=dict)


def _item_bytes(tensor: TensorSpec) -> int:
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(
            f"tensor {tensor.name!r} is of dtype {tensor.dtype!r}; "
            f"weights are served as {', '.join(ITEM_BYTES)}"
        )
    return ITEM_BYTES[tensor.dtype]
