"""An `EnginePort` over a Ray actor handle: the thin shell between the pools."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from weight_sync.types import Bucket, CommitReport, GroupSpec


@dataclass(kw_only=True, slots=True, frozen=True)
class ActorPort:
    """Calls the methods of the same names on the engine's actor. Can be sent to another actor."""

    handle: Any
    """Ray gives actor handles no useful static type."""
    name: str
    num_ranks: int

    def join_group(self, spec: GroupSpec, rank_offset: int) -> Future[None]:
        return cast(Future[None], self.handle.join_group.remote(spec, rank_offset).future())

    def pause(self) -> Future[None]:
        return cast(Future[None], self.handle.pause.remote().future())

    def receive(self, bucket: Bucket, spec: GroupSpec, version: int) -> Future[None]:
        return cast(Future[None], self.handle.receive.remote(bucket, spec, version).future())

    def resume(self, version: int) -> Future[CommitReport]:
        return cast(Future[CommitReport], self.handle.resume.remote(version).future())
