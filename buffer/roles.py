"""The verbs of `ReplayBuffer` by role; its docstrings describe them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Protocol

from buffer.results import (
    Admission,
    BufferStats,
    Failure,
    GroupEvent,
    Lease,
    PushResult,
    QuarantinedGroup,
    Reconciled,
    TaskProgress,
)
from buffer.staleness import Leash
from buffer.types import PromptRef, Rerun, TrajectoryGroup
from configs.schema import BufferConfig


class WorkerBuffer(Protocol):
    """A rollout worker: takes credits, records its prompts, and pushes groups."""

    async def admit(self, group_id: str, timeout_s: float) -> Admission: ...

    async def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool: ...

    async def take_retry(self, group_id: str | None = None) -> PromptRef | None: ...

    async def renew_credits(self, group_ids: Collection[str]) -> int: ...

    async def keep_tokens(
        self, group_id: str, oldest: int | None, parts: Mapping[str, bytes]
    ) -> bool: ...

    async def kept_tokens(self, group_id: str, prompt: PromptRef) -> dict[str, bytes]: ...

    async def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult: ...

    async def flush(self, timeout_s: float) -> bool: ...

    async def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> Failure | None: ...

    async def abandon(
        self,
        group_id: str,
        reason: str,
        rerun: Rerun = Rerun.never,
        prompt: PromptRef | None = None,
    ) -> bool: ...

    async def reclaim(self, worker: int) -> int: ...

    async def group_state(self, group_id: str) -> str | None: ...

    async def stats(self) -> BufferStats: ...

    async def get_max_staleness(self) -> int: ...

    async def get_leash(self) -> Leash: ...

    async def close(self) -> None: ...


class TrainerBuffer(Protocol):
    """A trainer rank: takes the buffer over, leases batches, and acknowledges them."""

    async def reconcile(
        self,
        lineage: str,
        *,
        step: int,
        version: int,
        resume_version: int,
        consumed_group_ids: Collection[str] = (),
        durable_step: int | None = None,
    ) -> Reconciled: ...

    async def are_consumed(self, group_ids: Collection[str]) -> bool: ...

    async def lease(
        self,
        *,
        step: int,
        version: int,
        num_groups: int,
        share: int,
        num_shares: int,
        timeout_s: float,
        min_groups: int | None = None,
        batch_timeout_s: float = inf,
        pair_cost: float = 0.0,
    ) -> Lease: ...

    async def validate(self, lease: Lease, version: int) -> frozenset[str]: ...

    async def renew(self, lease: Lease) -> int: ...

    async def keep_renewed(self, lease: Lease) -> None: ...

    async def publish_version(self, version: int) -> None: ...

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int: ...

    async def ack(self, upto_step: int, lineage: str | None = None) -> int: ...

    async def task_progress(self, step: int) -> TaskProgress: ...

    async def stats(self) -> BufferStats: ...

    async def nack(self, lease: Lease, reason: str) -> int: ...

    async def close(self) -> None: ...


class OperatorBuffer(Protocol):
    """The controller and the command line: open, sweep, tune, inspect, and empty the quarantine."""

    async def open(
        self,
        settings: BufferConfig,
        groups_per_step: int,
        oversampling: float = 1.0,
        replaced: Collection[str] = (),
        gradient_accumulation_steps: int = 1,
    ) -> None: ...

    async def reclaim(self, worker: int, *, counts_as_death: bool = True) -> int: ...

    async def restore_progress(self, progress: TaskProgress) -> None: ...

    async def sweep(self) -> int: ...

    async def stats(self) -> BufferStats: ...

    async def events(self, group_id: str) -> list[GroupEvent]: ...

    async def quarantined(self) -> list[QuarantinedGroup]: ...

    async def release(self, group_id: str) -> bool: ...

    async def discard(self, group_id: str) -> bool: ...

    async def change_settings(self, values: Mapping[str, str | int]) -> None: ...

    async def get_max_staleness(self) -> int: ...

    async def close(self) -> None: ...
