"""The quickstart's reward as a function of its own, so that a scoring process gives it."""

from __future__ import annotations

from rollout_pool.rewards.types import EpisodeView
from rollout_pool.tasks.task import Prompt


def backward(prompt: Prompt, episode: EpisodeView) -> float:
    """The bare word and ` =` are the prompt."""
    word = prompt.text.removesuffix(" =").strip()
    return float(episode.answer.strip() == word[::-1])
