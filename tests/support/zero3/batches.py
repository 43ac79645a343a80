"""A rank's part of the batches that the test left in its folder, and variants of their groups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from buffer.types import TrajectoryGroup
from buffer.wire.codec import decode_group
from configs.algorithm_schema import TEACHER_COLUMN
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
        trajectories=tuple(
            replace(
                trajectory,
                tokens=np.concatenate([beginning, trajectory.tokens]),
                loss_mask=np.pad(trajectory.loss_mask, (20, 0)),
                rollout_logprobs=np.pad(trajectory.rollout_logprobs, (20, 0)),
                prompt_length=trajectory.prompt_length + 20,
                version_spans=tuple(
                    replace(span, start=span.start + 20, end=span.end + 20)
                    for span in trajectory.version_spans
                ),
            )
            for trajectory in group.trajectories
        ),
    )


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
