"""Types and errors that both ends of a publish share, and what they need from other packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from msgspec import Meta, convert

from configs.run_files import Scalar
from tensors.layout import Count, Layout

NUM_SNAPSHOTS = 2
"""Copies of its share of the weights that a rank has in host memory."""
MANIFEST_NAME = "manifest.json"
"""The file of a manifest, beside its staged version."""

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
"""A timeout that one end accepts from the other."""


class WeightSyncError(RuntimeError):
    """A publish, a transfer or a member failed; the message names it and the step."""


class ReceiverUnreachable(WeightSyncError):
    """The receiver did not respond in time, or nothing listens at its URL."""


class TransferFailed(WeightSyncError):
    """A transfer stopped half-way; the next epoch continues after the buckets that arrived."""


class ChecksumMismatch(WeightSyncError):
    """A version did not arrive as it was sent; its receiver has discarded it."""


class UnknownVersion(WeightSyncError):
    """The receiver does not have this version, or does not have it whole."""


class UnknownLayout(WeightSyncError):
    """The receiver does not have the layout of this digest yet."""


class StoreFullError(WeightSyncError):
    """The file system of weight_sync.stage_dir has no room."""


class StoreBusyError(WeightSyncError):
    """No slot is free, or an earlier call has not ended; the message names the holders."""


BY_STATUS: dict[int, type[WeightSyncError]] = {
    404: UnknownVersion,
    409: WeightSyncError,
    412: UnknownLayout,
    422: ChecksumMismatch,
    423: StoreBusyError,
    502: TransferFailed,
    507: StoreFullError,
}
"""The error for each HTTP status of a receiver."""

REFUSALS = (StoreBusyError, StoreFullError, UnknownLayout, UnknownVersion)
"""A receiver that raises one of these cannot receive a version; other receivers may."""


@dataclass(kw_only=True, frozen=True)
class Transfer:
    """Describes a transfer before its first byte is sent."""

    version: Count
    base_version: Count | None
    """None: everything is sent. Otherwise only what differs from this version."""
    layout_digest: str
    wire_bytes: tuple[Count, ...]
    """Number of bytes that each rank sends: its stream, or its delta."""
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

    @property
    def tensor_checksums(self) -> dict[str, list[int]]:
        """The checksums of the pieces of each tensor in the file, by rank. One that did not change
        has the same; parts of one parameter have those of all of it."""
        found: list[list[int]] = [[] for _ in self.layout.tensors]
        for pieces, sums in zip(self.layout.pieces, self.checksums, strict=True):
            for piece, checksum in zip(pieces, sums, strict=True):
                found[piece.tensor].append(checksum)
        tensors = zip(self.layout.tensors, found, strict=True)
        return {part.name: sums for tensor, sums in tensors for part in tensor.file_parts}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the version that is staged there. Raises OSError, or ValueError."""
        return cls.from_json(json.loads((folder / MANIFEST_NAME).read_bytes()))

    def to_json(self) -> dict[str, Any]:
        """The note beside a staged file, which includes the layout."""
        return {**asdict(self.note), "layout": self.layout.to_json()}

    @property
    def note(self) -> ManifestNote:
        """The fields for the other end, which knows the layout by its digest."""
        return ManifestNote(
            version=self.version, layout_digest=self.layout.digest, checksums=self.checksums
        )

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


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupSpec:
    """One membership epoch, or one chain of it: a group of its senders and of all receivers.

    The trainer's ranks take turns: with two chains, ranks 0, 2, ... send in chain 0. In each
    chain's group its senders come first, and the receivers follow.
    """

    epoch: int
    host: str
    port: Annotated[int, Meta(gt=0, lt=2**16)]
    """The rendezvous store's, on trainer rank 0."""
    name: str
    num_senders: Annotated[int, Meta(ge=1)]
    """Trainer ranks of all chains together."""
    receivers: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names, in the order of their ranks: the chain that every bucket goes down."""
    backend: str
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)]
    """Bounds the rendezvous, and each silence of a member after it."""
    num_chains: Annotated[int, Meta(ge=1)] = 1
    chain: Annotated[int, Meta(ge=0)] = 0

    @property
    def senders(self) -> range:
        """The trainer's ranks that send in this chain, in the order of their ranks in its group."""
        return range(self.chain, self.num_senders, self.num_chains)

    @property
    def world_size(self) -> int:
        return len(self.senders) + len(self.receivers)

    @property
    def num_sharing(self) -> int:
        """Members whose buckets may share one link: those of all chains."""
        return self.world_size * self.num_chains


@dataclass(kw_only=True, slots=True, frozen=True)
class Captured:
    """A version in a snapshot buffer of each rank, with the times of one of them."""

    buffer: int
    """Index of the snapshot buffer."""
    version: int
    wait_s: float
    """Time that the training thread waited for the buffer."""
    snapshot_s: float
    """Time to copy the rank's shards. On a GPU, only the time to start that copy, which runs in
    parallel to training; its own duration is `copy_s` in the publish record."""
    snapshot_at: float
    """Unix time at which the copy began."""


class VersionBoard(Protocol):
    """The run's shared record of its weights; `buffer.run_state` satisfies it, and documents each
    method."""

    async def receivers(self) -> dict[str, str]: ...

    async def engine_versions(self) -> dict[str, int]: ...

    async def record_staged(self, receiver: str, version: int) -> None: ...

    async def mark_available(self, version: int) -> None: ...

    async def wait_engines_at(self, version: int, timeout_s: float) -> Mapping[str, int]: ...

    async def append_metrics(self, record: Mapping[str, Scalar], kind: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class MergeSpec:
    """How receivers make weights of the adapters that they get."""

    model_path: str
    """Folder or Hugging Face name of the base."""
    scale: float
    dtype: str
    """In which the trainer has the base's weights, as torch spells it without the prefix."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReceiverSpec:
    """Everything needed to build a receiver."""

    name: str
    host: str
    """Address that its HTTP API listens on, and no other."""
    folder: str
    """Its stage folder, on tmpfs."""
    num_slots: int
    num_buffers: int
    timeout_s: float
    min_bandwidth: float
    device: str = "cpu"
    """Its GPU ("cuda:0") where weight groups are nccl."""
    merge: MergeSpec | None = None
    """None: the versions are whole weights, and engines load them as they arrived."""
    key: str = field(repr=False)
    """Every request must carry it; the same for all receivers of a run."""

    def to_json(self) -> str:
        """Without the key, which goes through a pipe."""
        return json.dumps({k: v for k, v in asdict(self).items() if k != "key"})

    @classmethod
    def from_json(cls, text: str, key: str) -> ReceiverSpec:
        return convert({**json.loads(text), "key": key}, cls)
