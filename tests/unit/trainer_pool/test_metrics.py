"""The account of a step, of one rank, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from buffer.types import Trajectory, TrajectoryGroup, VersionSpan
from configs.run_files import Scalar
from tests.support.trainer import made_up
from tests.support.trainer.step_accounts import add_batch, add_tokens
from trainer_pool.algorithms.load_balancing import RouterSums, sums_of_layer
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import fill_up, pack
from trainer_pool.guard import Update
from trainer_pool.metrics import StepAccumulator, check_engines_agree
from trainer_pool.speed import StepSpeed
from trainer_pool.step import nan_if_not_finite

SPEED = StepSpeed(device=torch.device("cpu"))


def two_turns(reward: float, finish_reason: str, version: int) -> Trajectory:
    """A prompt of 2 tokens, an answer of 3, the environment's words (4), and an answer of 1."""
    mask = [0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    return made_up.trajectory(
        mask, version=version, reward=reward, finish_reason=finish_reason, episode=int(reward)
    )


def stats_of(
    ranks: Collectives,
    tally: StepAccumulator | None = None,
    groups: Sequence[TrajectoryGroup] = (),
    *,
    norms: Sequence[float | None] = (0.5,),
) -> dict[str, Scalar]:
    """A batch trained at version 4; of one group that version 3 sampled, unless it is another."""
    both = two_turns(0.0, "length", 3), two_turns(1.0, "stop", 3)
    groups = groups or [made_up.group(*both, group_id="g")]
    tally = tally or StepAccumulator(torch.device("cpu"), len(groups))
    return tally.total(
        ranks,
        groups=groups,
        group_ids=[group.group_id for group in groups][::-1],  # the batch's order is not the rank's
        version=4,
        num_minibatches=len(norms),
        updates=[Update(norm) for norm in norms],
        learning_rate=0.1,
        speed=SPEED,
    )


def test_length_of_an_answer_is_what_the_policy_wrote(ranks: Collectives) -> None:
    stats = stats_of(ranks)
    assert stats["response_length_mean"] == stats["response_length_max"] == 4
    assert stats["truncated_fraction"] == 0.5


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
        made_up.group(one, group_id=name, task=task)
        for name, task, one in (
            ("a", "sums", short),
            ("b", "sums", long),
            ("c", "words", replace(short, reward_parts={})),
        )
    ]
    stats = stats_of(ranks, groups=groups)
    assert stats["response_length_max"] == 8
    assert {name: value for name, value in stats.items() if name.startswith("reward/")} == {
        "reward/right": 0.5,
        "reward/right/staleness_1": 1.0,
        "reward/right/staleness_4-7": 0.0,
    }
    assert {name: value for name, value in stats.items() if name.startswith("task/")} == {
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
    stats = stats_of(ranks, tally)
    assert all(math.isnan(float(stats[f"logprob_diff_{of}"])) for of in ("mean", "max"))
    assert stats["logprob_diff_tokens"] == 0
    assert (stats["num_tokens"], stats["num_bounded_tokens"]) == (4, 1)
    assert stats["not_finite_fraction"] == 0.25
    assert stats["ratio_max_abs_dev"] == pytest.approx(math.exp(1) - 1)


def test_means_of_tokens_are_reported_in_all_and_by_staleness(ranks: Collectives) -> None:
    tally = StepAccumulator(torch.device("cpu"), 1)
    add_tokens(tally)
    record = stats_of(ranks, tally)
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


def test_load_of_experts_is_reported_where_there_are_any(ranks: Collectives) -> None:
    """Two layers of three experts, one expert a token; the last pass has no trained token."""
    names = {"router_entropy", "router_max_load", "router_dead_experts", "load_balancing_loss"}
    tally = StepAccumulator(torch.device("cpu"), 1)
    assert not names & stats_of(ranks, tally, norms=[0.5]).keys()
    p_NE = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [math.nan] * 3])
    is_trained_N = torch.tensor([True, True, False])
    for chosen, mask_N in (([0, 1, 2], is_trained_N), ([0, 0, 2], ~is_trained_N & False)):
        first = sums_of_layer(p_NE, torch.tensor(chosen)[:, None], mask_N)
        second = sums_of_layer(p_NE, torch.tensor([[1], [1], [0]]), mask_N)
        tally.add_routers(RouterSums.of_pass([first, second]))
    record = stats_of(ranks, tally, norms=[0.5])
    # Experts of the first layer: 1, 1, 0 tokens and 3/8, 4/8, 1/8; all of the second's to one.
    assert {name: record[name] for name in names} == pytest.approx(
        {
            "router_entropy": (math.log(2) + (2 * math.log(4) + 2 * math.log(2)) / 4) / 2,
            "router_max_load": 3,
            "router_dead_experts": 1 + 2,
            "load_balancing_loss": 3 * ((3 / 8 + 4 / 8) / 2 + 4 / 8) / 2,
        }
    )


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_gradient_is_nan_for_tokens_that_are_not_finite_and_for_no_others(bad: float) -> None:
    logprobs = torch.tensor([-1.0, bad], requires_grad=True)
    nan_if_not_finite(2 * logprobs[0], logprobs).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    good, other = logprobs.grad.tolist()
    assert good == 2 and math.isnan(other)


def test_logprobs_of_the_engine_that_are_not_finite_are_counted_by_version(
    ranks: Collectives,
) -> None:
    """Trained tokens alone count, each by the version that sampled it."""
    odd = two_turns(0.0, "stop", 3)
    odd = replace(
        odd,
        version_spans=(
            VersionSpan(version=2, start=2, end=4),
            VersionSpan(version=3, start=4, end=10),
        ),
    )
    odd.rollout_logprobs[[1, 2, 3, 4, 6]] = math.nan
    stats = stats_of(ranks, groups=[made_up.group(odd)])
    assert stats["rollout_not_finite"] == '{"2": 2, "3": 1}'


def test_groups_of_rows_with_a_gradient_that_is_not_finite_are_named(ranks: Collectives) -> None:
    tally = StepAccumulator(torch.device("cpu"), 1)
    row = made_up.row([0, 0, 1, 1])
    (batch,) = pack([row, replace(row, group=0)], max_tokens=8)
    is_bad = torch.zeros(8, dtype=torch.bool)
    is_bad[2] = True  # a row of no group
    tally.add_culprits(batch, is_bad)
    assert stats_of(ranks, tally, norms=[None])["not_finite_groups"] == "[]"
    is_bad[6] = True
    tally.add_culprits(batch, is_bad)
    assert stats_of(ranks, tally, norms=[None])["not_finite_groups"] == '["g"]'


def test_skipped_updates_are_counted_by_reason(ranks: Collectives) -> None:
    stats = stats_of(ranks, norms=[0.5, None, 0.0])
    names = ("num_updates", "num_skipped_updates", "num_empty_updates")
    assert [stats[name] for name in names] == [3, 1, 1]
    assert stats["grad_norm"] == 0.25
    stats = stats_of(ranks, norms=[None])
    assert math.isnan(float(stats["grad_norm"])) and math.isnan(float(stats["ess"]))
    assert "entropy" not in stats


def test_padding_is_the_share_of_tokens_without_a_trajectory(ranks: Collectives) -> None:
    row = made_up.row([0, 0, 0, 0, 0, 1])
    tally = StepAccumulator(torch.device("cpu"), 1)
    for batch in fill_up(pack([row], max_tokens=8), 2):
        add_batch(tally, batch)
    stats = stats_of(ranks, tally)
    assert (stats["padding_fraction"], stats["shared_fraction"]) == (2 / 8, 0)


def test_shared_tokens_are_those_of_trajectories_that_no_pass_computed(ranks: Collectives) -> None:
    row = made_up.row([*[0] * 19, 1])
    tally = StepAccumulator(torch.device("cpu"), 1)
    (batch,) = pack([row, row], max_tokens=40, should_share_prefixes=True)
    add_batch(tally, batch)
    stats = stats_of(ranks, tally)
    assert (stats["padding_fraction"], stats["shared_fraction"]) == (0, 0.5)


def test_engines_that_serve_other_weights_are_an_error_with_names() -> None:
    check_engines_agree(0.05, 200, ["a.0.weight"], 1.0)
    with pytest.raises(RuntimeError, match=r"200 tokens .* 2\.5 nats .* \(a\.\*\.weight \(2\)\)"):
        check_engines_agree(2.5, 200, ["a.0.weight", "a.1.weight"], 1.0)
    with pytest.raises(RuntimeError, match=r"by 0\.06 nats on average, more than 0\.001"):
        check_engines_agree(0.06, 200, ["a.0.weight"], 0.001)
