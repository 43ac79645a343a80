"""What the verbs of the buffer hand out: credits, leases, and accounts of what they did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from buffer.types import TrajectoryGroup


class PushResult(Enum):
    """What became of a pushed group."""

    stored = "stored"
    duplicate = "duplicate"
    """It was pushed before: nothing changed. A retry of any push ends here."""
    stale = "stale"
    """Too old for every later step: counted as pushed and dropped, its prompt perhaps requeued."""
    abandoned_lineage = "abandoned_lineage"
    """Made by weights that a restore gave up: counted as pushed and dropped."""


@dataclass(kw_only=True, slots=True, frozen=True)
class QuarantinedPrompt:
    """A prompt that is not run any more until somebody releases it."""

    task: str
    index: int
    reason: str
    """failed (its groups, too often), or worker_died (twice, while it ran)."""
    times: int
    """How often that happened."""
    at: float
    """Unix time since when it is there."""


class Admission(NamedTuple):
    """A credit to generate one group."""

    group_id: str
    """The group's id from now on; with several shards it also names the shard."""
    version: int
    """The trainer's version now."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Lease:
    """What one rank holds of the batch of one step."""

    step: int
    version: int
    """Version of the weights that the step starts from."""
    owner: str
    """Token that fences the lease: without it consume and nack have no effect."""
    group_ids: tuple[str, ...]
    """The whole batch as it was formed, in the same order at every rank."""
    groups: tuple[TrajectoryGroup, ...]
    """This rank's share. Groups dropped since the batch was formed are missing."""
    oldest: int | None
    """Tokens sampled before this version are out of the loss; None unless on_stale=mask_tokens."""
    deadline: float
    """Unix time by the server's clock after which the groups may be given to somebody else."""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


@dataclass(kw_only=True, slots=True, frozen=True)
class Reconciled:
    """What became of the groups when a trainer took over at a checkpoint."""

    acked: int
    """In the checkpoint: done."""
    requeued: int
    """Were consumed or leased after it: ready again."""
    dropped: int
    """Made by weights that do not exist any more."""
    quarantined: int
    """Were leased too often to be tried again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class QuarantinedGroup:
    """A group that could not be trained and is kept for somebody to look at."""

    group_id: str
    at: float
    """Unix time at which it was put there."""
    reason: str
    attempts: int
    """How often it was leased."""
    num_tokens: int
