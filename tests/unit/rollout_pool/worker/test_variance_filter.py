"""Which groups without variance are left out, and how many."""

from __future__ import annotations

import numpy as np

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from rollout_pool.worker.finish import MAX_SAVED_GROUPS, VarianceFilter, has_zero_variance
from rollout_pool.worker.group_run import Verdict

KEEP, OUT, ALL_EQUAL = Verdict.keep, Verdict.leave_out, Verdict.keep_all_equal


def _group(*rewards: float, branches: int = 1) -> TrajectoryGroup:
    trajectories = [
        Trajectory(
            tokens=np.array([1, 2], np.int32),
            loss_mask=np.array([0, 1], np.uint8),
            rollout_logprobs=np.array([0, -1], np.float32),
            version_spans=(VersionSpan(version=0, start=1, end=2),),
            prompt_length=1,
            reward=reward,
            finish_reason="stop",
            episode=episode,
        )
        for episode, reward in enumerate(rewards)
        for _ in range(branches)
    ]
    prompt = PromptRef(task="sums", index=0)
    return TrajectoryGroup(group_id="g", prompt=prompt, trajectories=tuple(trajectories))


SAME, MIXED = _group(0.0, 0.0), _group(0.0, 1.0)


def test_group_has_variance_if_any_episode_differs() -> None:
    assert has_zero_variance(_group(0.5, 0.5, 0.5))
    assert not has_zero_variance(_group(0.5, 0.5, 0.4))
    assert has_zero_variance(_group(1.0, 1.0, branches=3))
    assert not has_zero_variance(_group(1.0, 0.0, branches=3))


def test_filter_keeps_and_reports_groups_beyond_its_budget() -> None:
    judge = VarianceFilter(max_ratio=2.0).judge
    assert [judge(SAME, 0) for _ in range(6)] == [OUT, OUT, ALL_EQUAL, OUT, OUT, ALL_EQUAL]


def test_filter_budget_below_one_per_group_adds_up() -> None:
    judge = VarianceFilter(max_ratio=0.5).judge
    assert [judge(SAME, 0) for _ in range(4)] == [ALL_EQUAL, OUT, ALL_EQUAL, ALL_EQUAL]
    assert [VarianceFilter(max_ratio=0.0).judge(SAME, 0) for _ in range(3)] == [ALL_EQUAL] * 3


def test_filter_budget_is_limited() -> None:
    variance = VarianceFilter(max_ratio=2.0)
    for _ in range(1000):
        variance.judge(MIXED, 0)
    verdicts = [variance.judge(SAME, 0) for _ in range(2 * MAX_SAVED_GROUPS + 1)]
    assert verdicts == [OUT] * 2 * MAX_SAVED_GROUPS + [ALL_EQUAL]
