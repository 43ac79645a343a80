"""A slow reward, so that a scorer is killed while it works."""

from __future__ import annotations

import time

from rollout_pool.rewards.types import EpisodeView
from rollout_pool.tasks.task import Prompt

SECONDS = 0.01


def share_of_vowels(_: Prompt, episode: EpisodeView) -> float:
    """Something that differs between the answers of a model that has learnt nothing."""
    time.sleep(SECONDS)
    return sum(letter in "aeiou" for letter in episode.answer) / max(1, len(episode.answer))
