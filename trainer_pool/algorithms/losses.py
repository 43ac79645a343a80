"""The policy-gradient loss with its off-policy corrections; pure, token by token.

Each token has three policies: the one that sampled it (`rollout`, measured by the inference
engine), the one at the start of the step (`proximal`) and the one being updated (`trainer`). Their
log-probabilities give two ratios, each bounded in its own way:

    trainer / proximal   how far this step has moved       PPO clips it
    proximal / rollout   staleness and engine mismatch     truncated at a cap, not differentiated

Log ratios are clamped to `MAX_LOG_RATIO`, so that a single token cannot dominate the loss.

Letters: B rows, T positions. Every tensor is [B, T]; positions with mask 0 are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The same bound as in verl (`trainer/ppo/core_algos.py`)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyLoss:
    """The loss to differentiate, and the corrections applied to each token."""

    loss: Tensor
    """Scalar: this micro-batch's share of the mean over all tokens of the batch."""
    is_clipped_BT: Tensor
    """Bool: PPO's clip removed this token's gradient."""
    is_truncated_BT: Tensor
    """Bool: the importance weight reached its cap."""
    is_bounded_BT: Tensor
    """Bool: one of the two log ratios exceeded MAX_LOG_RATIO."""


def policy_loss(
    *,
    trainer_logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    weights_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    num_tokens: float,
) -> PolicyLoss:
    """Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5) with a truncated importance weight.

        loss = - 1/num_tokens * sum of b * w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        r = trainer / proximal,   w = min(proximal / rollout, tis_cap), a constant

    over the tokens with mask 1. Their weight b, `weights_BT`, is 1, so that all tokens weigh the
    same (DAPO, arXiv 2503.14476, eq. 12, also the source of the asymmetric clip bounds), or 1/n for
    the n trajectories of one episode. `num_tokens` is the sum of b over all ranks and micro-batches
    of the batch, so the split makes no difference. A token whose log r exceeds MAX_LOG_RATIO counts
    with that ratio and has no gradient.
    """
    importance_BT = truncated_importance_weight(proximal_logprobs_BT, rollout_logprobs_BT, tis_cap)
    is_real_BT = mask_BT != 0
    # A masked position may contain any number; exp of it must not become inf (0 * inf is nan).
    moved_BT = (trainer_logprobs_BT - proximal_logprobs_BT).masked_fill(~is_real_BT, 0.0)
    ratio_BT = bounded(moved_BT).exp()
    free_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    surrogate_BT = weights_BT * importance_BT * torch.minimum(free_BT, clipped_BT)
    stale_BT = proximal_logprobs_BT - rollout_logprobs_BT
    return PolicyLoss(
        loss=-surrogate_BT.masked_fill(~is_real_BT, 0.0).sum() / num_tokens,
        is_clipped_BT=(clipped_BT < free_BT) & is_real_BT,
        is_truncated_BT=bounded(stale_BT).exp().gt(tis_cap) & is_real_BT,
        is_bounded_BT=((moved_BT.abs() > MAX_LOG_RATIO) | (stale_BT.abs() > MAX_LOG_RATIO))
        & is_real_BT,
    )


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` clamped to +-MAX_LOG_RATIO, without gradient where it was clamped."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_importance_weight(
    proximal_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, cap: float
) -> Tensor:
    """min(proximal / rollout, cap) without gradient (TIS; Yao et al. 2025; IMPALA's rho-bar)."""
    ratio_BT = bounded(proximal_logprobs_BT - rollout_logprobs_BT).detach().exp()
    return ratio_BT.clamp(max=cap)


def supervised_loss(logprobs_BT: Tensor, mask_BT: Tensor, num_tokens: float) -> Tensor:
    """Scalar: this micro-batch's share of the mean NLL over `num_tokens` tokens."""
    return -logprobs_BT.masked_fill(mask_BT == 0, 0.0).sum() / num_tokens
