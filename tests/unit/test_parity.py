"""The parity benchmark notices a bound that differs, and one that no token reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.algorithms.batch import (
    CLIP,
    TOLERANCE,
    Batch,
    Values,
    compared,
    examine,
    loss_of,
    random_batch,
    with_gradient,
)

BOUNDS = (*CLIP, "dual_clip", "correction_icepop_low", "correction_icepop_high")


def by_hand(batch: Batch, given: Values) -> Tensor:
    """PPO with two bounds and dual clip, weighted by IcePop."""
    ratio, A = (batch.trainer - batch.proximal).exp(), batch.advantages
    clipped = ratio.clamp(1 - given["clip_low"], 1 + given["clip_high"])
    gain = torch.minimum(ratio * A, clipped * A)
    gain = torch.where(A < 0, torch.maximum(gain, given["dual_clip"] * A), gain)
    p = (batch.proximal - batch.rollout).exp()
    is_kept = (p >= given["correction_icepop_low"]) & (p <= given["correction_icepop_high"])
    return -(gain * p * is_kept * batch.mask).sum() / batch.mask.sum()


def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
    own = loss_of(batch, ["icepop"], **ours)
    return with_gradient(own, batch), with_gradient(by_hand(batch, theirs), batch)


def test_comparison_has_every_bound_active_on_some_tokens_and_not_on_others() -> None:
    outcome = examine("ppo", compared(pair, *BOUNDS), num_batches=8)
    assert outcome.difference < 1e-12 and outcome.problems == []
    assert outcome.functions == ["icepop", "ppo", "token_mean"]
    assert [*outcome.active] == [*BOUNDS]
    assert all(3 < count < outcome.num_values / 2 for count in outcome.active.values())


@pytest.mark.parametrize(
    "planted",
    [
        {"clip_low": 0.28},
        {"clip_high": 0.28},  # a default of ours in place of the setting
        {"dual_clip": None},
        {"correction_icepop_low": 0.0},
        {"correction_icepop_high": 1e9},
    ],
)
def test_comparison_notices_a_bound_that_is_another_or_none(planted: dict[str, Any]) -> None:
    def wrong(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        return pair(batch, theirs, {**ours, **planted})

    outcome = examine("ppo", compared(wrong, *BOUNDS), num_batches=4)
    assert outcome.difference > 100 * TOLERANCE


def test_bound_that_no_token_reaches_is_a_problem_though_both_sides_agree() -> None:
    def near(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        step = 0.01 * (batch.trainer.detach() - batch.proximal)
        return pair(replace(batch, proximal=batch.trainer.detach() - step), theirs, ours)

    outcome = examine("ppo", compared(near, *BOUNDS), num_batches=8)
    assert outcome.difference < 1e-12
    assert outcome.active["dual_clip"] == 0 and outcome.unnoticed == [*sorted(BOUNDS[:3])]
    assert "dual_clip is not active on some and not on others" in outcome.problems


def test_batches_have_ratios_on_both_sides_of_every_bound() -> None:
    batches = [random_batch(seed) for seed in range(4)]
    moved = torch.cat([(b.trainer.detach() - b.proximal)[b.mask != 0] for b in batches])
    assert moved.min() < -1.5 and moved.max() > 1.1 and (moved.abs() < 0.2).float().mean() > 0.3
