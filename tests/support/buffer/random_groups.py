"""Random trajectories, with columns of all types."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from buffer.types import MAX_VERSION, Trajectory, VersionSpan
from buffer.wire.header import COLUMN_TYPES


def random_trajectory(
    random: np.random.Generator, num_tokens: int, num_columns: int = 0
) -> Trajectory:
    """Its last token is trainable; the first half is by another version than the second."""
    mask = (random.random(num_tokens) < 0.6).astype(np.uint8)
    mask[-1] = 1
    bounds = sorted({0, num_tokens // 2, num_tokens})
    columns = {}
    for number in range(num_columns):
        dtype = COLUMN_TYPES[int(random.integers(len(COLUMN_TYPES)))]
        shape = (num_tokens,) if number % 2 else (num_tokens, 1 + number)
        columns[f"spalte größe {number}"] = random.integers(0, 100, shape).astype(dtype)
    return Trajectory(
        tokens=random.integers(0, 2**31 - 1, num_tokens).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=-random.random(num_tokens).astype(np.float32),
        version_spans=tuple(
            VersionSpan(version=int(random.integers(MAX_VERSION + 1)), start=start, end=end)
            for start, end in pairwise(bounds)
        ),
        prompt_length=int(random.integers(0, num_tokens + 1)),
        reward=float(random.random()),
        finish_reason="stop",
        reward_parts={"format": 1.0, "größe": -0.5},
        columns=columns,
    )
