"""Who plays the episodes of a prompt."""

from __future__ import annotations

from typing import Protocol

from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.request import EpisodeRequest
from rollout_pool.tasks.task import Prompt


class EpisodeSource(Protocol):
    """Plays episodes: an environment with the model, a user's agent, or a program elsewhere."""

    is_external: bool = False
    """Whether programs elsewhere play: how long they take, and that they fail, says nothing about
    the prompt or the model."""

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        """The finished episode. Raises SampleFailed, TimeoutError if no engine could be asked, and
        EpisodeFailed if there is nothing that could be scored."""
        ...

    def give_up(self, why: str) -> None:
        """The group of its episodes will not be finished; they are about to be cancelled."""
        return
