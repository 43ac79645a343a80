"""What a training step makes of a group, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from trainer_pool.step import rows_of_group


def trajectory(episode: int, reward: float, num_trained: int = 2) -> Trajectory:
    length = 2 + num_trained
    mask = np.array([0, 0] + [1] * num_trained, np.uint8)
    return Trajectory(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=-mask.astype(np.float32),
        version_spans=(VersionSpan(version=3, start=2, end=length),) if num_trained else (),
        prompt_length=2,
        reward=reward,
        finish_reason="stop",
        episode=episode,
        columns={"teacher_logprobs": np.zeros(length, np.float32)},
    )


def group(*trajectories: Trajectory, **changes: float) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id="g7",
        prompt=PromptRef(task="sums", index=0),
        trajectories=trajectories,
        sampling=replace(SamplingParams(), **changes),  # type: ignore[arg-type]
    )


def test_episode_counts_once_and_its_trajectories_share_its_weight() -> None:
    # Rewards by episode 1, 0, 0, 0: mean 0.25, deviation 0.5. Were each trajectory counted, the
    # mean would be 0.5.
    rows = rows_of_group(
        group(
            trajectory(0, 1.0),
            trajectory(0, 1.0, 5),
            trajectory(0, 1.0, 1),
            trajectory(1, 0.0),
            trajectory(2, 0.0),
            trajectory(3, 0.0),
        ),
        3,
        should_normalize_std=True,
    )
    assert [row.advantage for row in rows] == pytest.approx([1.5] * 3 + [-0.5] * 3, rel=1e-5)
    assert [row.weight for row in rows] == [1 / 3, 1 / 3, 1 / 3, 1, 1, 1]
    assert [row.num_trained for row in rows] == [2, 5, 1, 2, 2, 2]
    assert all(row.is_current for row in rows)


def test_episodes_may_be_in_any_order() -> None:
    rows = rows_of_group(
        group(trajectory(1, 4.0), trajectory(0, 2.0), trajectory(1, 4.0)),
        4,
        should_normalize_std=False,
    )
    assert [row.advantage for row in rows] == [1.0, -1.0, 1.0]
    assert [row.weight for row in rows] == [0.5, 1.0, 0.5]
    assert not any(row.is_current for row in rows)


def test_trajectory_without_a_trained_token_leaves_its_weight_to_the_others() -> None:
    some = group(trajectory(0, 1.0, 0), trajectory(0, 1.0), trajectory(1, 0.0))
    rows = rows_of_group(some, 3, should_normalize_std=False)
    assert [(row.advantage, row.weight) for row in rows] == [(0.5, 1.0), (-0.5, 1.0)]


def test_single_trajectory_of_an_episode_weighs_exactly_one() -> None:
    some = group(trajectory(0, 1.0), trajectory(1, 0.0))
    assert [row.weight for row in rows_of_group(some, 3, should_normalize_std=True)] == [1.0, 1.0]


def test_rows_keep_the_temperature_of_their_group() -> None:
    some = group(trajectory(0, 1.0), trajectory(1, 0.0), temperature=0.7)
    assert [r.temperature for r in rows_of_group(some, 3, should_normalize_std=True)] == [0.7, 0.7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, r"group g7: top_p=0\.9 .* sample with top_p=1\.0"),
        ({"top_k": 50}, r"group g7: top_k=50 .* sample with top_k=-1"),
        ({"min_p": 0.1}, r"group g7: min_p=0\.1"),
        ({"repetition_penalty": 1.1}, r"group g7: repetition_penalty=1\.1"),
        ({"frequency_penalty": 0.5}, r"group g7: frequency_penalty=0\.5"),
        ({"temperature": 0.0}, r"group g7: temperature=0\.0: greedy"),
    ],
)
def test_samples_not_drawn_from_the_policy_are_refused(
    changes: dict[str, float], message: str
) -> None:
    some = group(trajectory(0, 1.0), trajectory(1, 0.0), **changes)
    with pytest.raises(ValueError, match=message):
        rows_of_group(some, 3, should_normalize_std=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tokens_without_a_finite_logprob_of_the_engine_are_not_trained(bad: float) -> None:
    one, other, third = (trajectory(episode, float(episode == 0)) for episode in (0, 1, 2))
    one.rollout_logprobs[3] = bad
    other.rollout_logprobs[2:] = bad
    rows = rows_of_group(group(one, other, third), 3, should_normalize_std=False)
    assert [row.loss_mask.tolist() for row in rows] == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert rows[0].rollout_logprobs.tolist() == [0, 0, -1, 0]
    assert [row.advantage for row in rows] == pytest.approx([2 / 3, -1 / 3])
