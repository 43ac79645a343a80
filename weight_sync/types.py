"""What the two ends of a publish agree on: which tensors, in which buckets, through which group."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from typing import Protocol

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """One parameter by its Hugging Face name; `dtype` as torch spells it without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(kw_only=True, slots=True, frozen=True)
class Bucket:
    """Whole tensors that travel as one flat uint8 broadcast, in this order and without gaps."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors)


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupSpec:
    """A weight group: the sender is rank 0, the receivers follow in the order of the engines."""

    host: str
    port: int
    name: str
    world_size: int
    backend: str
    timeout_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class CommitReport:
    """One engine's account of one publish; times in seconds."""

    engine: str
    version: int
    pause_s: float
    """From the request to pause until generation went on."""
    served_version: int
    """What the engine says of itself after the commit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PublishReport:
    """One publish as the trainer saw it; times in seconds."""

    version: int
    num_bytes: int
    snapshot_s: float
    """Gathering the shards into host memory: all ranks stand still."""
    wire_s: float
    """Pause, broadcast, load and resume of every engine."""
    commits: tuple[CommitReport, ...]


class EnginePort(Protocol):
    """One inference engine as the checkpoint engine sees it. Calls return at once with a Future."""

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int:
        """Members that this engine brings to the weight group (its tensor-parallel size)."""
        ...

    def join_group(self, spec: GroupSpec, rank_offset: int) -> Future[None]: ...
    def pause(self) -> Future[None]: ...
    def receive(self, bucket: Bucket, spec: GroupSpec, version: int) -> Future[None]: ...
    def resume(self, version: int) -> Future[CommitReport]: ...


class VersionBoard(Protocol):
    """Where publishes and commits are recorded for everyone to see."""

    def record_commits(self, served_versions: Mapping[str, int]) -> None: ...
