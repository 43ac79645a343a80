"""Small groups whose tokens encode the version that sampled them, independent of the buffer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan

_PROMPT_TOKENS = 3


def synthetic_group(group_id: str, prompt: PromptRef, versions: Sequence[int]) -> TrajectoryGroup:
    """Deterministic in its arguments. `versions` ascend."""
    dice = random.Random(group_id)
    trajectories = tuple(_trajectory(dice, versions, i) for i in range(dice.randint(1, 3)))
    return TrajectoryGroup(group_id=group_id, prompt=prompt, trajectories=trajectories)


def _trajectory(dice: random.Random, versions: Sequence[int], episode: int) -> Trajectory:
    lengths = [dice.randint(1, 6) for _ in versions]
    length = _PROMPT_TOKENS + sum(lengths)
    tokens, mask = np.zeros(length, np.int32), np.zeros(length, np.uint8)
    spans, start = [], _PROMPT_TOKENS
    for version, number in zip(versions, lengths, strict=True):
        tokens[start : start + number] = version
        spans.append(VersionSpan(version=version, start=start, end=start + number))
        start += number
    mask[_PROMPT_TOKENS:] = 1
    return Trajectory(
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_spans=tuple(spans),
        prompt_length=_PROMPT_TOKENS,
        reward=dice.random(),
        finish_reason="stop",
        episode=episode,
    )


def written_by(group: TrajectoryGroup) -> set[int]:
    """Versions that sampled the group's trainable tokens, as recorded by its producer."""
    return {
        int(version) for t in group.trajectories for version in np.unique(t.tokens[t.loss_mask > 0])
    }
