"""A rank's part of the batches that the test left in its folder, and variants of their groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffer.types import ROUTES_COLUMN, Trajectory, TrajectoryGroup
from buffer.wire.codec import decode_group
from configs.algorithm_schema import TEACHER_COLUMN
from tests.support.experts import random_routes
from trainer_pool.data.rows import StepBatch
from trainer_pool.types import SupervisedExample


def read_batch(folder: Path, step: int, rank: int, num_ranks: int) -> StepBatch:
    groups = [decode_group(p.read_bytes()) for p in sorted(folder.glob(f"batch-{step}-*.group"))]
    shares = {
        1: [groups],
        2: [groups[:1], groups[1:]],
        4: [[group] for group in groups],
    }[num_ranks]
    return StepBatch(
        version=step, group_ids=tuple(g.group_id for g in groups), groups=tuple(shares[rank])
    )


def part_of(batch: StepBatch, group_ids: Collection[str]) -> StepBatch:
    return StepBatch(
        version=batch.version,
        group_ids=tuple(group_ids),
        groups=tuple(group for group in batch.groups if group.group_id in group_ids),
    )


def with_graded_rewards(group: TrajectoryGroup) -> TrajectoryGroup:
    """No two episodes have the same reward, which is its one part as well; and a teacher."""
    rewards = [t.reward + 0.1 * t.episode for t in group.trajectories]
    graded = (
        replace(
            t,
            reward=reward,
            reward_parts={"right": reward},
            columns={TEACHER_COLUMN: -1 - (t.tokens % 5).astype(np.float32)},
        )
        for t, reward in zip(group.trajectories, rewards, strict=True)
    )
    return replace(group, trajectories=tuple(graded))


def without_trained_tokens(group: TrajectoryGroup) -> TrajectoryGroup:
    """As if the engine had told NaN for each."""
    trajectories = (
        replace(trajectory, rollout_logprobs=np.full_like(trajectory.rollout_logprobs, np.nan))
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def less_likely(group: TrajectoryGroup) -> TrajectoryGroup:
    """As if the policy had come to prefer its tokens by e^3."""
    trajectories = (
        replace(t, rollout_logprobs=t.rollout_logprobs - 3 * t.loss_mask)
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def with_common_beginning(group: TrajectoryGroup) -> TrajectoryGroup:
    """Each trajectory behind the same 20 tokens, which are its own group's."""
    beginning = (np.arange(20) * (3 + int(group.group_id[-1])) % 251).astype(np.int32)
    return replace(
        group,
        trajectories=tuple(behind(trajectory, beginning) for trajectory in group.trajectories),
    )


def behind(trajectory: Trajectory, beginning: Sequence[int] | NDArray[np.int32]) -> Trajectory:
    """The trajectory behind these tokens, which belong to its prompt."""
    added = np.asarray(beginning, np.int32)
    return replace(
        trajectory,
        tokens=np.concatenate([added, trajectory.tokens]),
        loss_mask=np.pad(trajectory.loss_mask, (len(added), 0)),
        rollout_logprobs=np.pad(trajectory.rollout_logprobs, (len(added), 0)),
        prompt_length=trajectory.prompt_length + len(added),
        version_spans=tuple(
            replace(span, start=span.start + len(added), end=span.end + len(added))
            for span in trajectory.version_spans
        ),
    )


def with_routes(group: TrajectoryGroup) -> TrajectoryGroup:
    """With experts of `build_experts` for all tokens but the last."""
    trajectories = (
        replace(t, columns={ROUTES_COLUMN: random_routes(t.num_tokens)}) for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def examples() -> list[SupervisedExample]:
    dice = np.random.default_rng(5)
    lengths = [4, 30, 7, 12, 3, 21, 9]
    return [
        SupervisedExample(
            tokens=dice.integers(0, 256, length).astype(np.int32),
            loss_mask=np.array([0, 0] + [1] * (length - 2), np.uint8),
        )
        for length in lengths
    ]
