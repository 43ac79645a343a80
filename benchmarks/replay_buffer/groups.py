"""Groups of a given size, as a rollout worker makes them."""

from __future__ import annotations

import numpy as np

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan

_PROMPT = PromptRef(task="bench", index=0)


class GroupMaker:
    """Makes groups of `size` trajectories of `num_tokens`, sampled wholly by version 0."""

    def __init__(self, num_tokens: int, size: int = 8) -> None:
        dice = np.random.default_rng(0)
        prompt_length = num_tokens // 8
        self._trajectories = tuple(
            _trajectory(dice, num_tokens, prompt_length, i) for i in range(size)
        )

    def make(self, group_id: str) -> TrajectoryGroup:
        return TrajectoryGroup(group_id=group_id, prompt=_PROMPT, trajectories=self._trajectories)


def _trajectory(
    dice: np.random.Generator, num_tokens: int, prompt_length: int, episode: int
) -> Trajectory:
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt_length] = 0
    logprobs = np.where(mask, -dice.exponential(0.5, num_tokens), 0).astype(np.float32)
    return Trajectory(
        tokens=dice.integers(0, 150_000, num_tokens).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        version_spans=(VersionSpan(version=0, start=prompt_length, end=num_tokens),),
        prompt_length=prompt_length,
        reward=1.0,
        finish_reason="stop",
        episode=episode,
    )
