"""Staleness arithmetic: how old a token is, and whether it may still be trained.

    staleness(token) = version being trained - version that sampled the token

A group is as old as its oldest trainable token. The Lua scripts apply the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from buffer.types import Trajectory, TrajectoryGroup


def is_fresh(version: int, min_version: int, max_staleness: int) -> bool:
    """Whether a group may be trained at `version`. Later versions are only stricter."""
    return version - min_version <= max_staleness


def mask_over_age(group: TrajectoryGroup, oldest: int) -> TrajectoryGroup:
    """Masks all tokens sampled before version `oldest`; the group itself if there are none."""
    trajectories = tuple(_masked(trajectory, oldest) for trajectory in group.trajectories)
    if all(new is old for new, old in zip(trajectories, group.trajectories, strict=True)):
        return group
    return replace(group, trajectories=trajectories)


def _masked(trajectory: Trajectory, oldest: int) -> Trajectory:
    too_old = [s for s in trajectory.version_spans if s.version < oldest]
    if not any(trajectory.loss_mask[s.start : s.end].any() for s in too_old):
        return trajectory
    mask, logprobs = trajectory.loss_mask.copy(), trajectory.rollout_logprobs.copy()
    for span in too_old:
        mask[span.start : span.end] = 0
        logprobs[span.start : span.end] = 0
    return replace(trajectory, loss_mask=mask, rollout_logprobs=logprobs)


def renumber(group: TrajectoryGroup, numbers: Sequence[int]) -> TrajectoryGroup:
    """The group with its versions renumbered after a rollback.

    `numbers` are the new numbers of the versions with trainable tokens, in ascending order of the
    old. Spans without a trainable token keep their version, which nothing uses.
    """
    renamed = dict(zip(group.tokens_by_version, numbers, strict=True))
    trajectories = (
        replace(
            trajectory,
            version_spans=tuple(
                replace(span, version=renamed.get(span.version, span.version))
                for span in trajectory.version_spans
            ),
        )
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))
