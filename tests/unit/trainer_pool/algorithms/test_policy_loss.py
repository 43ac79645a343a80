"""The policy loss and its gradient against values worked out by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import Tensor

from configs.algorithm_schema import CorrectionConfig
from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.algorithms.registry import Objective


def loss_of(
    *,
    trainer: Tensor,
    proximal: list[float],
    rollout: list[float],
    advantages: list[float],
    mask: list[float] | None = None,
    weights: list[float] | None = None,
    tis_cap: float = 2.0,
    num_tokens: float = 1.0,
) -> Objective:
    """Decoupled PPO of one row; probabilities instead of their logarithms, to be readable."""
    inputs = tokens(
        trainer=trainer,
        proximal=torch.tensor(proximal).log(),
        rollout=torch.tensor(rollout).log(),
        advantages=torch.tensor(advantages),
        weights=None if weights is None else torch.tensor(weights),
        mask=None if mask is None else torch.tensor(mask),
    )
    decoupled_ppo = algorithm("tis_token", correction=CorrectionConfig(tis_cap=tis_cap))
    return decoupled_ppo.objective(inputs, num_tokens)


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


def test_importance_weight_is_proximal_over_rollout_up_to_the_cap() -> None:
    trainer = logprobs(0.3, 0.5, 0.2)
    result = loss_of(
        trainer=trainer,
        proximal=[0.3, 0.5, 0.2],
        rollout=[0.2, 0.1, 0.4],  # weights 1.5, 5 -> 2, 0.5
        advantages=[1.0, 1.0, -1.0],
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.5 + 2.0 - 0.5), rel=1e-5)
    assert result.diagnostics["tis_clipped_fraction"].tolist() == [False, True, False]
    assert trainer.grad is not None
    # The weight is a constant: the gradient is - w * A, though proximal and trainer are equal.
    torch.testing.assert_close(trainer.grad, torch.tensor([-1.5, -2.0, 0.5]))


def test_decoupled_ratio_clips_movement_of_the_step_and_not_staleness() -> None:
    # The rollout policy is far away (weight 4, cap 10), the step itself has moved by 1.1 only.
    trainer = logprobs(0.44)
    result = loss_of(trainer=trainer, proximal=[0.4], rollout=[0.1], advantages=[1.0], tis_cap=10.0)
    assert result.loss.item() == pytest.approx(-4 * 1.1, rel=1e-5)
    assert not result.diagnostics["clip_fraction"].item()


def test_loss_is_normalized_by_the_tokens_of_the_whole_batch() -> None:
    first, second = logprobs(0.3), logprobs(0.4)
    both = loss_of(
        trainer=torch.cat([first, second]),
        proximal=[0.3, 0.2],
        rollout=[0.3, 0.2],
        advantages=[1.0, -2.0],
        num_tokens=2,
    )
    parts = [
        loss_of(trainer=first, proximal=[0.3], rollout=[0.3], advantages=[1.0], num_tokens=2),
        loss_of(trainer=second, proximal=[0.2], rollout=[0.2], advantages=[-2.0], num_tokens=2),
    ]
    assert both.loss.item() == pytest.approx(sum(part.loss.item() for part in parts))
    assert both.loss.item() == pytest.approx((-1.0 + 4.0) / 2)


def test_trajectories_of_one_episode_share_the_weight_of_one() -> None:
    # An episode of one trajectory with a token, and one of two with a token and two of them: the
    # weights are 1, 1/2 and 1/2, 1/2; their sum is 2.5.
    trainer = logprobs(0.3, 0.4, 0.5, 0.6)
    result = loss_of(
        trainer=trainer,
        proximal=[0.3, 0.4, 0.5, 0.6],
        rollout=[0.3, 0.4, 0.5, 0.3],  # the last one's importance weight is 2
        advantages=[1.0, -2.0, -2.0, -2.0],
        weights=[1.0, 0.5, 0.5, 0.5],
        num_tokens=2.5,
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.0 - 1.0 - 1.0 - 2.0) / 2.5)
    assert trainer.grad is not None
    torch.testing.assert_close(trainer.grad, torch.tensor([-0.4, 0.4, 0.4, 0.8]))


def test_without_branches_loss_and_gradient_are_the_unweighted_ones_bit_for_bit() -> None:
    torch.manual_seed(0)
    proximal, rollout = -torch.rand(150), -torch.rand(150)
    advantages, mask = torch.randn(150), (torch.rand(150) < 0.7).float()
    values = [(proximal + 0.3 * torch.randn(150)).requires_grad_()]
    values.append(values[0].detach().clone().requires_grad_())
    inputs = tokens(
        trainer=values[0], proximal=proximal, rollout=rollout, advantages=advantages, mask=mask
    )
    result = algorithm("tis_token").objective(inputs, float(mask.sum()))
    ratio = (values[1] - proximal).masked_fill(mask == 0, 0.0).exp()
    surrogate = (proximal - rollout).exp().clamp(max=2.0) * torch.minimum(
        ratio * advantages, ratio.clamp(0.8, 1.28) * advantages
    )
    expected = -surrogate.masked_fill(mask == 0, 0.0).sum() / int(mask.sum())
    assert torch.equal(result.loss, expected)
    result.loss.backward()
    expected.backward()
    assert values[0].grad is not None and values[1].grad is not None
    assert torch.equal(values[0].grad, values[1].grad)


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
    uncapped = algorithm("tis_token", correction=CorrectionConfig(tis_cap=1e30))
    result = uncapped.objective(inputs, 1.0)
    assert result.loss.item() == pytest.approx(-exp(20.0) - exp(-20.0), rel=1e-5)
    assert result.diagnostics["bounded_fraction"].tolist() == [True, True, False]


def test_supervised_loss_is_mean_negative_log_likelihood_of_learnt_tokens() -> None:
    trainer = logprobs(0.5, 0.25, 0.1)
    inputs = tokens(
        trainer=trainer,
        proximal=trainer.detach(),
        rollout=trainer.detach(),
        advantages=torch.tensor([-3.0, 0.0, 3.0]),
        mask=torch.tensor([1.0, 1.0, 0.0]),
    )
    loss = algorithm(loss="supervised").objective(inputs, 2).loss
    assert loss.item() == pytest.approx((log(2) + log(4)) / 2)
