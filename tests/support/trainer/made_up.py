"""Trajectories, groups and rows that are made up of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from trainer_pool.data.packing import Row

Mask = Sequence[int] | NDArray[np.uint8]


def trajectory(mask: Mask, *, version: int = 3, **changes: Any) -> Trajectory:
    """Tokens 0, 1, 2 ...; the trained ones are by this version, with log-probability -1."""
    mask_T = np.array(mask, np.uint8)
    borders = np.flatnonzero(np.diff(mask_T, prepend=0, append=0)).tolist()
    spans = zip(borders[::2], borders[1::2], strict=True)
    fields: dict[str, Any] = {
        "tokens": np.arange(len(mask_T), dtype=np.int32),
        "loss_mask": mask_T,
        "rollout_logprobs": -mask_T.astype(np.float32),
        "version_spans": tuple(VersionSpan(version=version, start=a, end=b) for a, b in spans),
        "prompt_length": borders[0] if borders else len(mask_T),
        "reward": 0.0,
        "finish_reason": "stop",
    }
    return Trajectory(**{**fields, **changes})


def group(
    *trajectories: Trajectory, group_id: str = "g7", task: str = "sums", **sampling: Any
) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id,
        prompt=PromptRef(task=task, index=0),
        trajectories=trajectories,
        sampling=SamplingParams(**sampling),
    )


def row(mask: Mask, **changes: Any) -> Row:
    """Tokens 0, 1, 2 ...; each was sure when it was sampled."""
    fields: dict[str, Any] = {
        "tokens": np.arange(len(mask), dtype=np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "rollout_logprobs": np.zeros(len(mask), np.float32),
    }
    return Row(**{**fields, **changes})
