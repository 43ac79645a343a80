"""Mistakes that other systems have made: each is planted here, and must not happen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from configs.algorithm_schema import CorrectionConfig
from configs.load import load_config
from tests.support.trainer.step_accounts import add_batch
from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.data.packing import Row, fill_up, pack
from trainer_pool.metrics import StepAccumulator
from trainer_pool.model.head import Candidates, score_tokens


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
    """Of trajectories of one token each."""
    chosen = algorithm(kind, correction=CorrectionConfig(**bounds))  # type: ignore[arg-type]
    inputs = tokens(**ratios(*values), segments=range(len(values)))
    return [float(f) for f in chosen.corrections[0](inputs, chosen.config).factors_N]


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
    settings = ["algorithm.correction.kinds=[]", "buffer.max_staleness=4"]
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


def test_staleness_does_not_count_twice() -> None:
    for settings in (["algorithm.loss=reinforce"], ["algorithm.proximal=rollout"]):
        kinds = "algorithm.correction.kinds=[tis_token]"
        with pytest.raises(ValueError, match="a second weight would count staleness twice"):
            load_config([*settings, kinds])


def test_tokens_that_stay_weigh_no_more_when_others_are_rejected() -> None:
    inputs = tokens(**ratios(1.0, 1.0, 9.0, 9.0), segments=[0, 1, 2, 3])
    found = algorithm("icepop").objective(inputs, 4.0)
    (slope,) = torch.autograd.grad(found.loss, inputs.trainer_logprobs_N)
    assert slope.tolist() == [-0.25, -0.25, 0, 0]
    assert found.diagnostics["rejected_fraction"].tolist() == [False, False, True, True]


def test_head_in_tiles_has_the_gradients_of_plain_logits_where_they_usually_part() -> None:
    """Of the entropy, over the candidates that top-k left, at a temperature."""
    dice = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 8, generator=dice, dtype=torch.float64)
    weight = torch.randn(23, 8, generator=dice, dtype=torch.float64)
    candidate_ids = [torch.randperm(23, generator=dice)[:6] for _ in range(5)]
    targets = torch.stack([ids[0] for ids in candidate_ids])
    temperature = torch.full((5,), 0.7, dtype=torch.float64)
    candidates = Candidates(ids_K=torch.cat(candidate_ids), ends_N=torch.arange(6, 36, 6))
    mine = [part.clone().requires_grad_() for part in (hidden, weight)]
    logprobs, entropy, _ = score_tokens(
        *mine, None, targets, temperature, candidates=candidates, tile=(2, 10)
    )
    plain = [part.clone().requires_grad_() for part in (hidden, weight)]
    outside = torch.ones(5, 23, dtype=torch.bool)
    for row, ids in enumerate(candidate_ids):
        outside[row, ids] = False
    logits = (plain[0] @ plain[1].T / 0.7).masked_fill(outside, -torch.inf)
    every = logits.log_softmax(-1)
    expected = every.gather(1, targets[:, None])[:, 0]
    spread = -(every.exp() * every.masked_fill(outside, 0.0)).sum(-1)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, spread)
    pull = torch.randn(5, generator=dice, dtype=torch.float64)
    (logprobs + pull * entropy).sum().backward()  # type: ignore[no-untyped-call]
    (expected + pull * spread).sum().backward()  # type: ignore[no-untyped-call]
    for found, part in zip(mine, plain, strict=True):
        torch.testing.assert_close(found.grad, part.grad)


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
    row = Row(
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        rollout_logprobs=np.zeros(4, np.float32),
    )
    batches = fill_up(pack([row], 4), 3)
    assert [batch.num_tokens for batch in batches] == [4, 0, 0]
    assert all(len(batch.mask_N) for batch in batches)
    tally = StepAccumulator(torch.device("cpu"), 1)
    for batch in batches:
        add_batch(tally, batch)
