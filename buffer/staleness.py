"""Staleness arithmetic: how old a token is, and whether it may still be trained.

    staleness(token) = version being trained - version that sampled the token

A group is as old as its oldest trainable token. The Lua scripts apply the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from buffer.types import Trajectory, TrajectoryGroup


def is_fresh(version: int, min_version: int, max_staleness: int) -> bool:
    """Returns whether a group may be trained at `version`. Later versions are only stricter."""
    return version - min_version <= max_staleness


@dataclass(kw_only=True, slots=True, frozen=True)
class Leash:
    """`max_staleness` and the rollbacks, which decide whether a token may still be trained.

    A rollback (last, resume) goes back to the weights of version `last` and publishes them as
    `resume`. Example: after (5, 9) a token of version 4 counts as one of 8, and those of versions 6
    to 8 are gone with their weights.
    """

    max_staleness: int
    rollbacks: tuple[tuple[int, int], ...] = ()
    """Oldest first."""

    def current(self, version: int) -> int | None:
        """The number now of the `version` that an engine reported; None if it is gone."""
        for last, resume in self.rollbacks:
            if version <= last:
                version += resume - last
            elif version < resume:
                return None
        return version

    def is_fresh(self, version: int, sampled_by: int) -> bool:
        """Returns whether a token may be trained at `version`."""
        current = self.current(sampled_by)
        return current is not None and is_fresh(version, current, self.max_staleness)


def parse_rollbacks(text: str) -> tuple[tuple[int, int], ...]:
    """Reads the run's setting `rollbacks`: 'last:resume last:resume'."""
    pairs = re.findall(r"(-?\d{1,16}):(\d{1,16})", text)
    return tuple((int(last), int(resume)) for last, resume in pairs)


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
