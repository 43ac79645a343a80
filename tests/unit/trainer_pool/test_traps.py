"""Mistakes that other systems have made: each is planted here, and must not happen."""

from __future__ import annotations

import pytest
import torch

from configs.load import load_config
from tests.support.trainer import made_up
from tests.support.trainer.step_accounts import add_batch
from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.data.packing import fill_up, pack
from trainer_pool.metrics import StepAccumulator


def ratios(*values: float) -> dict[str, torch.Tensor]:
    """Tokens of these ratios proximal / rollout, with advantage 1."""
    stale = torch.tensor(values).log()
    zeros = torch.zeros(len(values))
    return {
        "trainer": stale.clone().requires_grad_(),
        "proximal": stale,
        "rollout": zeros,
        "advantages": torch.ones(len(values)),
    }


def factors(kind: str, *values: float, **bounds: float) -> list[float]:
    """The factors of trajectories of one token each."""
    chosen = algorithm(kind, bounds=bounds)
    inputs = tokens(**ratios(*values), segments=range(len(values)))
    return [float(f) for f in chosen.corrections[0](inputs, chosen.config.correction[0]).factors_N]


@pytest.mark.parametrize("kind", ["geometric", "product"])
def test_bounds_that_are_not_symmetric_are_of_trainer_over_rollout(kind: str) -> None:
    """Bounds of the inverse ratio would keep 0.9 and 1.05, and reject 0.6."""
    bounds = {f"{kind}_low": 0.5, f"{kind}_high": 1.1}
    assert factors(f"{kind}_mask", 0.6, 1.05, 1.5, 0.4, **bounds) == [1, 1, 0, 0]
    assert factors("icepop", 0.6, 4.0, 6.0, icepop_low=0.5, icepop_high=5.0) == [
        pytest.approx(0.6),
        pytest.approx(4.0),
        0.0,
    ]


def test_staleness_is_not_ignored_by_recomputing_with_the_current_policy() -> None:
    """With one update the ratio to the recomputed policy is 1, however old the token."""
    settings = ["algorithm.correction=[]", "buffer.max_staleness=4"]
    with pytest.raises(ValueError, match="would treat tokens of older versions as the trained"):
        load_config(settings)
    inputs = tokens(**ratios(0.25, 1.0))
    losses = [algorithm(*kinds).objective(inputs, 1.0).loss for kinds in ((), ("tis_token",))]
    slopes = [
        torch.autograd.grad(loss, inputs.trainer_logprobs_N, retain_graph=True)[0]
        for loss in losses
    ]
    assert slopes[0].tolist() == [-1, -1]
    assert slopes[1].tolist() == pytest.approx([-0.25, -1])


def test_token_of_which_the_engine_said_nan_is_masked_with_a_finite_loss() -> None:
    """Its rollout log-probability reaches no ratio; test_rows.py says where it is masked, and
    test_metrics.py that it is counted by version."""
    inputs = tokens(
        trainer=torch.tensor([-1.0, -1.0], requires_grad=True),
        proximal=torch.tensor([-1.0, -1.0]),
        rollout=torch.tensor([-1.0, torch.nan]),
        advantages=torch.ones(2),
        mask=torch.tensor([1, 0]),
    )
    found = algorithm("tis_token").objective(inputs, 1.0)
    (slope,) = torch.autograd.grad(found.loss, inputs.trainer_logprobs_N)
    assert slope.tolist() == [-1, 0]


def test_pass_without_a_trained_token_is_made_and_counts_nothing() -> None:
    """Its backward pass on every rank is tested with ZeRO-3."""
    row = made_up.row([0, 0, 1, 1])
    batches = fill_up(pack([row], 4), 3)
    assert [batch.num_tokens for batch in batches] == [4, 0, 0]
    assert all(len(batch.mask_N) for batch in batches)
    tally = StepAccumulator(torch.device("cpu"), 1)
    for batch in batches:
        add_batch(tally, batch)
