"""The updates that are skipped, and the end of a run in which too many are."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from configs.schema import TrainerConfig
from tests.support.trainer.step_accounts import add_tokens
from trainer_pool.collectives import Collectives
from trainer_pool.guard import MIN_NORMS, EffectiveSampleSize, SkipReason, Update, UpdateGuard
from trainer_pool.metrics import StepAccumulator


def test_limit_is_a_multiple_of_the_usual_norm() -> None:
    guard = UpdateGuard(TrainerConfig(max_grad_spike=5.0))
    for norm in range(1, MIN_NORMS):
        guard.note(Update(float(norm)))
        guard.note(Update(0.0))  # nothing to learn, which says nothing about the usual
    assert guard.norm_limit is None
    guard.note(Update(1e6))
    # Of 1 to 9 and a million: 5.5.
    assert guard.norm_limit == 5 * 5.5
    guard.note(Update(1e9, SkipReason.spike))
    assert guard.norm_limit == 5 * 6
    assert UpdateGuard(TrainerConfig(max_grad_spike=None)).norm_limit is None


def test_run_ends_after_too_many_in_a_row_with_their_reasons() -> None:
    guard = UpdateGuard(TrainerConfig(max_skipped_updates=3))
    for _ in range(MIN_NORMS):
        guard.note(Update(1.0))
    guard.note(Update(None, SkipReason.not_finite))
    guard.note(Update(200.0, SkipReason.spike))
    guard.note(Update(1.0))
    guard.note(Update(200.0, SkipReason.spike))
    guard.note(Update(None, SkipReason.not_finite))
    with pytest.raises(
        RuntimeError,
        match=r"trainer\.max_skipped_updates=3: .* far above the usual \(2\), its gradient was not "
        r"finite \(1, see not_finite_groups .*\.jsonl\)\. .*lower trainer\.learning_rate or "
        r"buffer\.max_staleness",
    ):
        guard.note(Update(200.0, SkipReason.spike))
    patient = UpdateGuard(TrainerConfig(max_skipped_updates=None, max_grad_spike=2.0))
    for _ in range(MIN_NORMS):
        patient.note(Update(1.0))
    for _ in range(MIN_NORMS):
        assert patient.norm_limit is not None and patient.norm_limit < 200
        patient.note(Update(200.0, SkipReason.spike))
    assert patient.norm_limit == 201  # half of the norms are so large: they are not unusual
    for _ in range(100):
        patient.note(Update(None, SkipReason.not_finite))


def test_run_that_ends_names_the_staleness_of_its_last_low_effective_sample_size() -> None:
    guard = UpdateGuard(TrainerConfig(min_ess=0.5, max_skipped_updates=2))
    assert guard.is_ess_too_low(EffectiveSampleSize(9, 0.1, "4-7"))
    guard.note(Update(1.0, SkipReason.low_ess))
    assert guard.is_ess_too_low(EffectiveSampleSize(9, 0.1, "2-3"))
    assert not guard.is_ess_too_low(EffectiveSampleSize(9, 0.6, "16+"))
    with pytest.raises(
        RuntimeError, match=r"size was low \(2, in the last one lowest at staleness 2-3\)\. "
    ):
        guard.note(Update(1.0, SkipReason.low_ess))


def test_low_effective_sample_size_is_logged_with_its_staleness(
    ranks: Collectives, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights 1 at staleness 0, and 1/e, 1/e and e at 2 to 3: see `add_tokens`."""
    tally = StepAccumulator(torch.device("cpu"), 1)
    add_tokens(tally, is_current=True)
    found = tally.ess_of_update(ranks)
    e = 2.718281828
    share = (1 + 2 / e + e) ** 2 / (4 * (1 + 2 / e**2 + e**2))
    assert found == EffectiveSampleSize(4, pytest.approx(share), "2-3")  # type: ignore[arg-type]
    # The next update begins anew.
    assert tally.ess_of_update(ranks).num_tokens == 0
    add_tokens(tally, is_current=True)
    assert tally.ess_of_update(ranks).share == pytest.approx(share)
    guard = UpdateGuard(TrainerConfig(min_ess=0.6))
    with caplog.at_level(logging.WARNING):
        assert guard.is_ess_too_low(found)
    assert "it is lowest at staleness 2-3" in caplog.text
    assert not UpdateGuard(TrainerConfig(min_ess=0.4)).is_ess_too_low(found)
    assert guard.watches_ess and not UpdateGuard(TrainerConfig()).watches_ess


def test_nan_weight_is_no_low_effective_sample_size_and_does_not_reach_the_next_update(
    ranks: Collectives,
) -> None:
    tally, guard = StepAccumulator(torch.device("cpu"), 1), UpdateGuard(TrainerConfig(min_ess=0.4))
    add_tokens(tally, first=math.nan)
    bad = tally.ess_of_update(ranks)
    assert bad.num_tokens == 4 and math.isnan(bad.share)
    assert not guard.is_ess_too_low(bad)  # its gradient is not finite: it is skipped for that
    add_tokens(tally)
    healthy = tally.ess_of_update(ranks)
    assert 0.4 < healthy.share < 0.6
    assert not guard.is_ess_too_low(healthy)
    assert UpdateGuard(TrainerConfig(min_ess=0.6)).is_ess_too_low(healthy)
