"""The layout of a model on the wire and in the staged file, and the manifest of a version.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta, convert

from weight_sync.types import ITEM_BYTES, Count, TensorSpec

_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FILE_ALIGNMENT = 64
"""The data behind the header is aligned to it: a cache line, and the widest registers."""
_MAX_RANKS = 2**16
_RESERVED_NAME = "__metadata__"


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """The part of one tensor that one rank owns; never empty. Offsets and sizes in bytes."""

    tensor: int
    """Index into `Layout.tensors`."""
    stream_start: int
    file_start: int
    """From the start of the file's data, behind its header."""
    num_bytes: int

    @property
    def stream_stop(self) -> int:
        return self.stream_start + self.num_bytes

    def num_elements(self, tensor: TensorSpec) -> int:
        """`tensor` is the one that it is a part of."""
        return self.num_bytes // ITEM_BYTES[tensor.dtype]


@dataclass(kw_only=True, frozen=True)
class Layout:
    """Which tensors a model has and how they are spread over the trainer's ranks.

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
        counts = Counter(spec.name for spec in specs)
        if doubled := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"tensors of the model share a name: {', '.join(doubled)}")
        if _RESERVED_NAME in counts:
            raise ValueError(f"a tensor is named {_RESERVED_NAME!r}, which safetensors reserves")
        for spec in specs:
            if any(size < 0 for size in spec.shape):
                raise ValueError(f"tensor {spec.name!r} has the shape {list(spec.shape)}")
        if not 1 <= num_ranks <= _MAX_RANKS:
            raise ValueError(f"num_ranks={num_ranks}: must lie between 1 and {_MAX_RANKS}")
        return cls(tensors=specs, num_ranks=num_ranks)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """By rank, in the order of the tensors.

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
        """Size of all tensors."""
        return self.offsets[-1]

    def stream_bytes(self, rank: int) -> int:
        return self.pieces[rank][-1].stream_stop if self.pieces[rank] else 0

    @cached_property
    def file_header(self) -> bytes:
        """Header of a safetensors file of these tensors, padded to align the data."""
        entries = {
            tensor.name: {
                "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.num_bytes],
            }
            for tensor, start in zip(self.tensors, self.offsets, strict=False)
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _FILE_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def digest(self) -> str:
        """Equal at two ends if and only if their layouts are."""
        return sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
        }

    @classmethod
    def from_json(cls, fields: Any) -> Layout:
        """Raises ValueError naming what is wrong."""
        note = convert(fields, _LayoutNote)
        tensors = [
            TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in note.tensors
        ]
        return cls.of(tensors, note.num_ranks)


@dataclass(kw_only=True, slots=True, frozen=True)
class _LayoutNote:
    """A layout as JSON."""

    num_ranks: Count
    tensors: tuple[tuple[str, str, tuple[Count, ...]], ...]


def _item_bytes(tensor: TensorSpec) -> int:
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(
            f"tensor {tensor.name!r} is of dtype {tensor.dtype!r}; "
            f"weights are served as {', '.join(ITEM_BYTES)}"
        )
    return ITEM_BYTES[tensor.dtype]


@dataclass(kw_only=True, frozen=True)
class Transfer:
    """Describes a transfer before its first byte is sent."""

    version: Count
    base_version: Count | None
    """None: everything is sent. Otherwise only what differs from this version."""
    layout_digest: str
    wire_bytes: tuple[Count, ...]
    """Length of each rank's stream on the wire: its pieces, or its delta."""
    bucket_bytes: Annotated[int, Meta(gt=0)]

    @classmethod
    def full(cls, version: int, layout: Layout, bucket_bytes: int) -> Transfer:
        """All bytes of `version`."""
        return cls(
            version=version,
            base_version=None,
            layout_digest=layout.digest,
            wire_bytes=tuple(map(layout.stream_bytes, range(layout.num_ranks))),
            bucket_bytes=bucket_bytes,
        )

    @property
    def is_full(self) -> bool:
        return self.base_version is None

    @property
    def num_wire_bytes(self) -> int:
        return sum(self.wire_bytes)


@dataclass(kw_only=True, frozen=True)
class Manifest:
    """The checksums that a staged copy of a version must have."""

    version: int
    layout: Layout
    checksums: tuple[tuple[int, ...], ...]
    """CRC-32 of every piece, by rank and in the order of `Layout.pieces[rank]`. For a delta, too,
    of the whole piece after the delta is applied."""

    def to_json(self) -> dict[str, Any]:
        """With the layout itself, for the note beside a staged file."""
        return {**self.to_wire(), "layout": self.layout.to_json()}

    def to_wire(self) -> dict[str, Any]:
        """With the digest of the layout, which the other end knows."""
        return {
            "version": self.version,
            "layout_digest": self.layout.digest,
            "checksums": [list(sums) for sums in self.checksums],
        }

    @classmethod
    def of(cls, version: int, layout: Layout, checksums: tuple[tuple[int, ...], ...]) -> Manifest:
        """Raises ValueError unless `checksums` has one for each piece."""
        expected = [len(pieces) for pieces in layout.pieces]
        if [len(sums) for sums in checksums] != expected:
            raise ValueError(f"manifest of version {version}: checksums do not match its pieces")
        return cls(version=version, layout=layout, checksums=checksums)

    @classmethod
    def from_json(cls, fields: Any) -> Manifest:
        """Raises ValueError naming what is wrong."""
        note = convert(fields, ManifestNote)
        if note.layout is None:
            raise ValueError("a manifest without a layout")
        return cls.of(note.version, Layout.from_json(note.layout), note.checksums)


@dataclass(kw_only=True, slots=True, frozen=True)
class ManifestNote:
    """A manifest as JSON."""

    version: Count
    layout_digest: str
    checksums: tuple[tuple[Count, ...], ...]
    layout: dict[str, Any] | None = None
    """None on the wire, where the other end knows it."""


def mismatches(
    layout: Layout, expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> list[str]:
    """Names of the tensors that have a differing piece."""
    names = {
        layout.tensors[piece.tensor].name
        for pieces, wanted, got in zip(layout.pieces, expected, found, strict=True)
        for piece, a, b in zip(pieces, wanted, got, strict=True)
        if a != b
    }
    return sorted(names)
