"""The interface of whatever runs a prompt's episodes."""

from __future__ import annotations

from typing import Protocol

from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.request import EpisodeRequest
from rollout_pool.tasks.task import Prompt


class EpisodeSource(Protocol):
    """Runs episodes: an environment, a user's agent, or an external program."""

    is_external: bool = False
    """Whether external programs run them: their failures do not count against the prompt."""
    is_repeatable: bool = False
    """Whether episodes that run again may begin with answers sampled before (worker/keep.py)."""

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        """The finished episode. Raises SampleFailed, TimeoutError if no engine was available, and
        EpisodeFailed if there is nothing to score."""
        ...

    def give_up(self, why: str) -> None:
        """Called before the episodes are cancelled because their group is given up."""
        return
