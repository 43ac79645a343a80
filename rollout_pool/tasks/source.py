"""The interface of whatever runs a prompt's episodes."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from rollout_pool.episodes.episode import Episode, EpisodeRequest
from rollout_pool.tasks.task import Prompt


class GroupEnd(Enum):
    """How a group ended."""

    pushed = "pushed"
    """It is in the buffer."""
    filtered = "filtered"
    """Its rewards are all equal (rollout.filter_zero_variance)."""
    dropped = "dropped"
    """The buffer refused it: too old, or sampled from weights that a rollback discarded."""
    too_old = "too_old"
    idle = "idle"
    """No request came while other groups needed its credit."""
    given_up = "given_up"
    """An episode failed, or its program left."""
    stopped = "stopped"
    """The run, or its worker, ended."""


class EpisodeSource(Protocol):
    """Runs episodes.

    Implementations: EnvEpisodes (tasks/env_episodes.py) with an environment, AgentRunner
    (endpoint/agents.py) with a user's agent, ExternalGroup (endpoint/groups.py) with an external
    program.
    """

    is_external: bool = False
    """True if external programs run them: their failures do not count against the prompt."""
    is_repeatable: bool = False
    """True if episodes that run again may begin with kept tokens (sampling/kept_tokens.py)."""

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        """The finished episode. Raises SampleFailed, TimeoutError if no engine was available, and
        EpisodeFailed if there is nothing to score."""
        ...

    def give_up(self, why: str) -> None:
        """Called before the episodes are cancelled because their group is given up."""
        return

    def ended(self, end: GroupEnd, why: str | None) -> None:
        """Called once the group has ended, with the reason if it is not in the buffer."""
        return
