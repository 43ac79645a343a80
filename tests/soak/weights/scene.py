"""The parameters of one soak, shared by all its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from configs.schema import WeightSyncConfig
from tensors.layout import Layout, TensorSpec
from tests.soak.weights.model import BUCKET_BYTES, ODD

SILENCE_S = 3.0
"""weight_sync.timeout_s: a member that is silent for longer is lost."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Scene:
    url: str
    """URL of Redis."""
    run: str = field(default_factory=lambda: f"weights-{uuid4().hex[:8]}")
    folder: Path
    bucket_bytes: int = BUCKET_BYTES
    tensors: tuple[TensorSpec, ...] = ODD
    num_ranks: int = 2
    full_every: int = 3
    commit_timeout_s: float = 20.0
    key: str = "k3y-of-the-play"

    @property
    def layout(self) -> Layout:
        return Layout.of(self.tensors, self.num_ranks)

    @property
    def config(self) -> WeightSyncConfig:
        return WeightSyncConfig(
            bucket_bytes=self.bucket_bytes,
            full_every=self.full_every,
            timeout_s=SILENCE_S,
            commit_timeout_s=self.commit_timeout_s,
        )
