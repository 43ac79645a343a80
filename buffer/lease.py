"""A lease: one step's global batch in the hands of the trainer ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from buffer.types import TrajectoryGroup


class PushResult(Enum):
    """What became of a pushed group."""

    stored = "stored"
    duplicate = "duplicate"
    """It was pushed before: nothing changed. A retry of any push ends here."""
    stale = "stale"
    """Too old for every later step: counted as pushed and dropped, its prompt perhaps requeued."""


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
    deadline: float
    """Unix time by the server's clock after which the groups may be given to somebody else."""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)
