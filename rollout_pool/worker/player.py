"""Who plays an episode of a prompt: an environment with the model, or a program of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rollout_pool.episodes.env import Env
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.runner import EpisodeAsk, EpisodeFailed, EpisodeRunner
from rollout_pool.tasks.task import Prompt


class Player(Protocol):
    async def run(self, prompt: Prompt, ask: EpisodeAsk) -> Episode:
        """The finished episode. Raises SampleFailed, TimeoutError if no engine could be asked, and
        EpisodeFailed if there is nothing that could be scored."""
        ...


class EnvPlayer:
    """A fresh environment for each episode."""

    def __init__(self, runner: EpisodeRunner, make_env: Callable[[Prompt], Env]) -> None:
        self._runner = runner
        self._make_env = make_env

    async def run(self, prompt: Prompt, ask: EpisodeAsk) -> Episode:
        try:
            env = self._make_env(prompt)
        except Exception as error:  # a user's code: it costs its prompt, not the run
            raise EpisodeFailed(
                f"its environment could not be made: {type(error).__name__}: {error}"
            ) from error
        return await self._runner.run(env, ask)
