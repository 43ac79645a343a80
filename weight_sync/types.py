"""Types that both ends of a publish share, and the interface they need from the other packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Annotated, Protocol

from msgspec import Meta

NUM_SNAPSHOTS = 2
"""Copies of its share of the weights that a rank has in host memory."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
"""A timeout that one end accepts from the other."""

Record = Mapping[str, float | int | str]
"""Flat JSON: one record of metrics.jsonl."""


class WeightSyncError(RuntimeError):
    """A publish, a transfer or a member failed; the message names it and the step."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """One parameter by its Hugging Face name; `dtype` as torch spells it without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupSpec:
    """One membership epoch: the senders are ranks 0 to num_senders - 1, the receivers follow."""

    epoch: int
    host: str
    port: Annotated[int, Meta(gt=0, lt=2**16)]
    """Of the rendezvous store on trainer rank 0."""
    name: str
    num_senders: Annotated[int, Meta(ge=1)]
    receivers: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names, in the order of their ranks: the chain that every bucket goes down."""
    backend: str
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)]
    """For the rendezvous, and for each silence of a member after it."""

    @property
    def world_size(self) -> int:
        return self.num_senders + len(self.receivers)


@dataclass(kw_only=True, slots=True, frozen=True)
class PublishReport:
    """One publish as the trainer saw it: how long it waited, and how many bytes will be sent."""

    version: int
    num_bytes: int
    """Size of this rank's shards."""
    snapshot_s: float
    """Time to copy them into host memory. On a GPU, only the time to start that copy, which runs in
    parallel to training; its own duration is `copy_s` in the publish record."""
    wait_s: float
    """Time spent waiting for a free snapshot buffer before that."""


class VersionBoard(Protocol):
    """The run's shared record of its weights; `buffer.run_state` satisfies it."""

    async def receivers(self) -> dict[str, str]:
        """URL of each registered receiver, by name."""
        ...

    async def engine_versions(self) -> dict[str, int]:
        """The version that each live engine serves, without engines that are starting or lost."""
        ...

    async def record_staged(self, receiver: str, version: int) -> None: ...

    async def publish_weights(self, version: int) -> None:
        """Publish `version`, which at least one receiver holds whole."""
        ...

    async def wait_engines_at(self, version: int, timeout_s: float) -> Mapping[str, int]:
        """Wait until every live engine (at least one) serves `version` or a later one.

        Returns engine_versions. Raises TimeoutError naming the engines that do not.
        """
        ...

    async def append_metrics(self, record: Record, kind: str) -> None: ...

    async def close(self) -> None: ...


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
    key: str = field(repr=False)
    """Every request must carry it; the same for all receivers of a run."""

    def to_json(self) -> str:
        """Without the key, which goes through a pipe."""
        return json.dumps({k: v for k, v in asdict(self).items() if k != "key"})

    @classmethod
    def from_json(cls, text: str, key: str) -> ReceiverSpec:
        return cls(**json.loads(text), key=key)
