"""The policy loss and its gradient against values worked out by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import Tensor

from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.algorithms.registry import Objective


def loss_of(
    *,
    trainer: Tensor,
    proximal: list[float],
    rollout: list[float],
    advantages: list[float],
    mask: list[float] | None = None,
) -> Objective:
    """Decoupled PPO of one row; probabilities instead of their logarithms, to be readable."""
    inputs = tokens(
        trainer=trainer,
        proximal=torch.tensor(proximal).log(),
        rollout=torch.tensor(rollout).log(),
        advantages=torch.tensor(advantages),
        mask=None if mask is None else torch.tensor(mask),
    )
    return algorithm("tis_token").objective(inputs, 1.0)


def logprobs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log().requires_grad_()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),  # inside the bounds: d(r A)/d(log p) = r A
        (1.5, 2.0, -2.56, 0.0),  # a good token already 1.28 times likelier: pushed no further
        (0.5, 2.0, -1.0, -1.0),  # a good token that became rarer is always pulled back
        (0.5, -2.0, 1.6, 0.0),  # a bad token already rarer than 0.8: pushed no further
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likelier is always pushed down
    ],
)
def test_ppo_clips_by_the_sign_of_the_advantage(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    trainer = logprobs(0.4 * ratio)
    result = loss_of(trainer=trainer, proximal=[0.4], rollout=[0.4], advantages=[advantage])
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert trainer.grad is not None
    assert trainer.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert result.diagnostics["clip_fraction"].item() == (gradient == 0)


def test_masked_positions_do_not_change_the_loss() -> None:
    trainer = torch.tensor([log(0.5), -1e4, 0.0], requires_grad=True)
    result = loss_of(
        trainer=trainer,
        proximal=[0.5, 0.5, 1e-38],
        rollout=[0.5, 1e-38, 1.0],
        advantages=[1.0, 5.0, float("inf")],
        mask=[1.0, 0.0, 0.0],
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1.0)
    assert trainer.grad is not None
    assert trainer.grad[0].item() == pytest.approx(-1.0)
    assert trainer.grad[1].item() == 0


@pytest.mark.parametrize(("log_ratio", "advantage"), [(25.0, -1.0), (-25.0, 1.0)])
def test_log_ratio_of_a_step_is_bounded_and_counted(log_ratio: float, advantage: float) -> None:
    trainer = torch.tensor([-30.0 + log_ratio, -1.0], requires_grad=True)
    result = loss_of(
        trainer=trainer,
        proximal=[exp(-30.0), exp(-1.0)],
        rollout=[exp(-30.0), exp(-1.0)],
        advantages=[advantage, 1.0],
    )
    result.loss.backward()
    bound = exp(20.0) if log_ratio > 0 else -exp(-20.0)
    assert result.loss.item() == pytest.approx(bound - 1.0, rel=1e-5)
    assert result.diagnostics["bounded_fraction"].tolist() == [True, False]
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [0.0, -1.0]


def test_log_ratio_of_staleness_is_bounded_and_counted() -> None:
    trainer = torch.tensor([-1.0, -120.0, -1.0], requires_grad=True)
    inputs = tokens(
        trainer=trainer,
        proximal=trainer.detach(),
        rollout=torch.tensor([-120.0, -1.0, -120.0]),
        advantages=torch.ones(3),
        mask=torch.tensor([1.0, 1.0, 0.0]),
    )
    uncapped = algorithm("tis_token", bounds={"tis_cap": 1e30})
    result = uncapped.objective(inputs, 1.0)
    assert result.loss.item() == pytest.approx(-exp(20.0) - exp(-20.0), rel=1e-5)
    assert result.diagnostics["bounded_fraction"].tolist() == [True, True, False]
