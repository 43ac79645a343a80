"""The account of a step, of one rank, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.trainer.step_accounts import add_batch, add_tokens
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import Row, fill_up, pack
from trainer_pool.guard import Update
from trainer_pool.metrics import StepAccumulator, StepStats
from trainer_pool.speed import StepSpeed
from trainer_pool.step import nan_if_not_finite

SPEED = StepSpeed(device=torch.device("cpu"))


def two_turns(reward: float, finish_reason: str, version: int) -> Trajectory:
    """A prompt of 2 tokens, an answer of 3, the environment's words (4), and an answer of 1."""
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 0, 0, 1], np.uint8)
    return Trajectory(
        tokens=np.arange(10, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=-mask.astype(np.float32),
        version_spans=(
            VersionSpan(version=version, start=2, end=5),
            VersionSpan(version=version, start=9, end=10),
        ),
        prompt_length=2,
        reward=reward,
        finish_reason=finish_reason,
        episode=int(reward),
    )


def stats_of(ranks: Collectives, tally: StepAccumulator, *, norms: list[float | None]) -> StepStats:
    """A batch of one group that version 3 sampled, trained at version 4."""
    group = TrajectoryGroup(
        group_id="g",
        prompt=PromptRef(task="sums", index=0),
        trajectories=(two_turns(0.0, "length", 3), two_turns(1.0, "stop", 3)),
    )
    return tally.total(
        ranks,
        groups=[group],
        group_ids=["g"],
        version=4,
        num_minibatches=len(norms),
        updates=[Update(norm) for norm in norms],
        learning_rate=0.1,
        speed=SPEED,
    )


def test_length_of_an_answer_is_what_the_policy_wrote(ranks: Collectives) -> None:
    stats = stats_of(ranks, StepAccumulator(torch.device("cpu"), 1), norms=[0.5])
    assert stats.response_length_mean == stats.response_length_max == 4
    assert stats.truncated_fraction == 0.5


def test_longest_answer_and_parts_of_rewards_by_staleness_are_those_of_all_groups(
    ranks: Collectives,
) -> None:
    short = replace(two_turns(1.0, "stop", 3), reward_parts={"right": 1.0})
    long = replace(
        two_turns(0.0, "stop", 0),
        version_spans=(VersionSpan(version=0, start=2, end=10),),
        reward_parts={"right": 0.0},
    )
    groups = [
        TrajectoryGroup(group_id=name, prompt=PromptRef(task=task, index=0), trajectories=(one,))
        for name, task, one in (
            ("a", "sums", short),
            ("b", "sums", long),
            ("c", "words", replace(short, reward_parts={})),
        )
    ]
    stats = StepAccumulator(torch.device("cpu"), 3).total(
        ranks,
        groups=groups,
        group_ids=["c", "b", "a"],  # the batch's order, which is not the rank's
        version=4,
        num_minibatches=1,
        updates=[Update(0.5)],
        learning_rate=0.1,
        speed=SPEED,
    )
    assert stats.response_length_max == 8
    record = stats.record()
    assert {name: value for name, value in record.items() if name.startswith("reward/")} == {
        "reward/right": 0.5,
        "reward/right/staleness_1": 1.0,
        "reward/right/staleness_4-7": 0.0,
    }
    assert {name: value for name, value in record.items() if name.startswith("task/")} == {
        "task/sums/groups": 2.0,
        "task/sums/reward": 0.5,
        "task/sums/zero_variance": 1.0,
        "task/sums/response_length": 6.0,
        "task/words/groups": 1.0,
        "task/words/reward": 1.0,
        "task/words/zero_variance": 1.0,
        "task/words/response_length": 4.0,
    }


@pytest.mark.parametrize("lacks", ["is_current", "is_at_start"])
def test_differences_are_nan_without_a_token_of_the_trained_version(
    ranks: Collectives, lacks: str
) -> None:
    tally = StepAccumulator(torch.device("cpu"), 1)
    add_tokens(tally, **{lacks: False})
    stats = stats_of(ranks, tally, norms=[0.5])
    assert math.isnan(stats.logprob_diff_mean) and math.isnan(stats.logprob_diff_max)
    assert stats.logprob_diff_tokens == 0
    assert (stats.num_tokens, stats.num_bounded_tokens) == (4, 1)
    assert stats.not_finite_fraction == 0.25
    assert stats.ratio_max_abs_dev == pytest.approx(math.exp(1) - 1)


def test_means_of_tokens_are_reported_in_all_and_by_staleness(ranks: Collectives) -> None:
    tally = StepAccumulator(torch.device("cpu"), 1)
    add_tokens(tally)
    record = stats_of(ranks, tally, norms=[0.5]).record()
    assert record["entropy"] == 1.75
    assert record["entropy/staleness_0"] == 1.0
    assert record["entropy/staleness_2-3"] == 2.0
    assert record["mine"] == 0.5
    assert record["mine/staleness_2-3"] == pytest.approx(2 / 3)
    assert record["ratio_mean"] == pytest.approx((1 + 2 * math.exp(-1) + math.e) / 4)
    w = [math.exp(-1), math.exp(-1), math.e]
    assert record["ess/staleness_2-3"] == pytest.approx(sum(w) ** 2 / 3 / sum(x * x for x in w))
    assert record["ess/staleness_0"] == 1
    assert "entropy/staleness_1" not in record  # it has no token
    assert record["per_sequence"] == 2.5
    assert record["num_tokens"] == 4
    assert record["logprob_diff_mean"] == 0.75


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_gradient_is_nan_for_tokens_that_are_not_finite_and_for_no_others(bad: float) -> None:
    logprobs = torch.tensor([-1.0, bad], requires_grad=True)
    nan_if_not_finite(2 * logprobs[0], logprobs).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    good, other = logprobs.grad.tolist()
    assert good == 2 and math.isnan(other)


def test_gradient_of_finite_tokens_is_that_of_the_loss() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    nan_if_not_finite(2 * logprobs[0], logprobs).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [2, 0]


def test_logprobs_of_the_engine_that_are_not_finite_are_counted_by_version(
    ranks: Collectives,
) -> None:
    """Those of trained tokens alone, each by the version that sampled it."""
    odd = two_turns(0.0, "stop", 3)
    odd = replace(
        odd,
        version_spans=(
            VersionSpan(version=2, start=2, end=4),
            VersionSpan(version=3, start=4, end=10),
        ),
    )
    odd.rollout_logprobs[[1, 2, 3, 4, 6]] = math.nan
    group = TrajectoryGroup(
        group_id="g", prompt=PromptRef(task="sums", index=0), trajectories=(odd,)
    )
    stats = StepAccumulator(torch.device("cpu"), 1).total(
        ranks,
        groups=[group],
        group_ids=["g"],
        version=4,
        num_minibatches=1,
        updates=[Update(0.5)],
        learning_rate=0.1,
        speed=SPEED,
    )
    assert stats.rollout_not_finite == {2: 2, 3: 1}
    assert stats.record()["rollout_not_finite"] == '{"2": 2, "3": 1}'


def test_groups_of_rows_with_a_gradient_that_is_not_finite_are_named(ranks: Collectives) -> None:
    tally = StepAccumulator(torch.device("cpu"), 1)
    row = Row(
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        rollout_logprobs=np.zeros(4, np.float32),
    )
    (batch,) = pack([row, replace(row, group=0)], max_tokens=8)
    is_bad = torch.zeros(8, dtype=torch.bool)
    is_bad[2] = True  # a row of no group
    tally.add_culprits(batch, is_bad)
    assert stats_of(ranks, tally, norms=[None]).not_finite_groups == ()
    is_bad[6] = True
    tally.add_culprits(batch, is_bad)
    assert stats_of(ranks, tally, norms=[None]).not_finite_groups == ("g",)


def test_skipped_updates_are_counted_by_reason(ranks: Collectives) -> None:
    stats = stats_of(ranks, StepAccumulator(torch.device("cpu"), 1), norms=[0.5, None, 0.0])
    assert (stats.num_updates, stats.num_skipped_updates, stats.num_empty_updates) == (3, 1, 1)
    assert stats.grad_norm == 0.25
    stats = stats_of(ranks, StepAccumulator(torch.device("cpu"), 1), norms=[None])
    assert math.isnan(stats.grad_norm) and stats.token_means == {"ess": stats.token_means["ess"]}


def test_padding_is_the_share_of_tokens_without_a_trajectory(ranks: Collectives) -> None:
    row = Row(
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 0, 0, 0, 1], np.uint8),
        rollout_logprobs=np.zeros(6, np.float32),
    )
    tally = StepAccumulator(torch.device("cpu"), 1)
    for batch in fill_up(pack([row], max_tokens=8), 2):
        add_batch(tally, batch)
    stats = stats_of(ranks, tally, norms=[0.5])
    assert (stats.padding_fraction, stats.shared_fraction) == (2 / 8, 0)


def test_shared_tokens_are_those_of_trajectories_that_no_pass_computed(ranks: Collectives) -> None:
    row = Row(
        tokens=np.arange(20, dtype=np.int32),
        loss_mask=(np.arange(20) == 19).astype(np.uint8),
        rollout_logprobs=np.zeros(20, np.float32),
    )
    tally = StepAccumulator(torch.device("cpu"), 1)
    (batch,) = pack([row, row], max_tokens=40, should_share_prefixes=True)
    add_batch(tally, batch)
    stats = stats_of(ranks, tally, norms=[0.5])
    assert (stats.padding_fraction, stats.shared_fraction) == (0, 0.5)
