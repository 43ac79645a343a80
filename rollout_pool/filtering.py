"""Dynamic sampling: groups whose rewards are all equal teach nothing and may be left out (pure)."""

from __future__ import annotations

from enum import Enum

from buffer.types import TrajectoryGroup

SAVED_UP = 32
"""So many kept groups' worth of budget is saved at most: a run of luck must not let the trainer be
starved for long afterwards."""


class Verdict(Enum):
    keep = "keep"
    leave_out = "leave_out"
    keep_all_equal = "keep_all_equal"
    """Its rewards are all equal, but the budget is used up."""


class VarianceFilter:
    """Judges one worker's groups in their order. Setting: rollout.max_filtered_ratio.

    Each kept group adds `max_ratio` to a budget, each that is left out takes 1 from it.
    """

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._budget = max_ratio

    def judge(self, group: TrajectoryGroup, num_unscored: int) -> Verdict:
        """`num_unscored` episodes lack a part of their reward, which then counts as 0.

        A group with any of them is kept: that its rewards are equal may be the scorer's doing, and
        says nothing of the prompt.
        """
        all_equal = not num_unscored and has_zero_variance(group)
        if all_equal and self._budget >= 1:
            self._budget -= 1
            return Verdict.leave_out
        self._budget = min(self._budget + self._max_ratio, self._max_ratio * SAVED_UP)
        return Verdict.keep_all_equal if all_equal else Verdict.keep


def has_zero_variance(group: TrajectoryGroup) -> bool:
    """Whether all episodes have the same reward."""
    return len({trajectory.reward for trajectory in group.trajectories}) == 1
