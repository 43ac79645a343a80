"""What an episode is worth, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from buffer.types import FloatArray
from rollout_pool.episodes.episode import Episode
from rollout_pool.tasks.task import Prompt


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Score:
    """Of one episode."""

    reward: float
    """The weighted sum of the parts."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted, by name."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Part -> why it could not be had; it counts as 0 in the sum."""
    is_unscored: bool = False
    """A service that the reward needs gave no usable answer: what the episode is worth is not
    known, and nothing may be learned from it. Where the completion itself is to blame (it broke its
    scorer, or took too long in it) the part is an honest 0."""
    columns: tuple[Mapping[str, FloatArray], ...] = ()
    """For each branch further per-token columns, such as a teacher's log-probabilities; empty if
    there are none."""

    @property
    def reasons(self) -> str:
        """Of all failures, by part."""
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items())


class Scorer(Protocol):
    """Scores episodes as they end, each by itself, while others still go on."""

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for what an episode or a remote service did: see `Score.failures`."""
        ...
