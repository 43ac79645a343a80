"""Corrections for tokens sampled by another policy than the trained one; pure.

They read p = proximal / rollout, which contains both staleness and the mismatch of engine and
trainer (`opsm` reads trainer / rollout), and give every token a factor: an importance weight, or 1
and 0 to keep and reject it. The factors of several corrections multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.algorithm_schema import AlgorithmConfig
from configs.corrections import (
    GeometricMask,
    Icepop,
    Kpop,
    M2po,
    Opsm,
    ProductMask,
    Truncated,
    Veto,
)
from trainer_pool.algorithms.losses import binary_kl
from trainer_pool.algorithms.types import BatchStatistics, Correction, LossInputs, bounded


def tis_token(inputs: LossInputs, config: Truncated) -> Correction:
    """min(p, tis_cap): a truncated importance weight (Yao et al. 2025; IMPALA's rho-bar)."""
    return _truncated(inputs.stale_N, config)


def tis_sequence(inputs: LossInputs, config: Truncated) -> Correction:
    """As `tis_token`, with the product of p over the trajectory for each of its tokens."""
    return _truncated(inputs.spread(_log_product(inputs)), config)


def tis_geometric(inputs: LossInputs, config: Truncated) -> Correction:
    """As `tis_token`, with the geometric mean of p over the trajectory."""
    return _truncated(inputs.spread(inputs.mean_by_segment(inputs.stale_N)), config)


def _truncated(log_weight_N: Tensor, config: Truncated) -> Correction:
    weight_N, cap = log_weight_N.exp(), config.tis_cap
    return Correction(
        factors_N=weight_N.clamp(max=cap), diagnostics={"tis_clipped_fraction": weight_N > cap}
    )


def _log_product(inputs: LossInputs) -> Tensor:
    return bounded(inputs.sum_by_segment(inputs.stale_N))


def icepop(inputs: LossInputs, config: Icepop) -> Correction:
    """p if icepop_low <= p <= icepop_high, else the token is rejected (IcePop, Ling team 2025)."""
    weight_N = inputs.stale_N.exp()
    low, high = config.icepop_low, config.icepop_high
    is_kept_N = (low <= weight_N) & (weight_N <= high)
    return _kept("icepop", is_kept_N, weight_N)


def geometric_mask(inputs: LossInputs, config: GeometricMask) -> Correction:
    """Rejects a trajectory whose geometric mean of p is outside geometric_low to geometric_high."""
    ratio_S = inputs.mean_by_segment(inputs.stale_N).exp()
    low, high = config.geometric_low, config.geometric_high
    return _kept("geometric_mask", inputs.spread((low <= ratio_S) & (ratio_S <= high)))


def product_mask(inputs: LossInputs, config: ProductMask) -> Correction:
    """Rejects a trajectory whose product of p is outside product_low to product_high."""
    ratio_S = _log_product(inputs).exp()
    low, high = config.product_low, config.product_high
    return _kept("product_mask", inputs.spread((low <= ratio_S) & (ratio_S <= high)))


def veto(inputs: LossInputs, config: Veto) -> Correction:
    """Rejects a trajectory with any token that the trainer finds unlikely: p < veto_below."""
    is_unlikely_N = inputs.stale_N.exp() < config.veto_below
    count_S = inputs.sum_by_segment(is_unlikely_N.to(inputs.stale_N.dtype))
    return _kept("veto", inputs.spread(count_S == 0))


def opsm(inputs: LossInputs, config: Opsm) -> Correction:
    """Rejects a bad trajectory that the policy has moved away from: its mean advantage is below 0,
    and its mean of log(rollout / trainer) above opsm_limit.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).
    """
    is_bad_S = inputs.mean_by_segment(inputs.advantages_N) < 0
    distance_S = inputs.mean_by_segment(-inputs.off_policy_N.detach())
    is_rejected_S = is_bad_S & (distance_S > config.opsm_limit)
    return _kept("opsm", inputs.spread(~is_rejected_S))


def m2po(inputs: LossInputs, config: M2po) -> Correction:
    """Rejects the tokens of the largest (log p)^2 of the whole update, until the mean of the others
    is at most m2po_limit (M2PO, arXiv 2510.01161)."""
    return _kept("m2po", inputs.stale_N.square().float() <= inputs.batch.largest_square)


def kpop(inputs: LossInputs, config: Kpop) -> Correction:
    """Rejects a token if the choice between it and any other one has diverged: the larger of
    KL(proximal | rollout) and KL(rollout | proximal) is above kpop_limit."""
    proximal_N, rollout_N = inputs.proximal_logprobs_N, inputs.rollout_logprobs_N
    there_N, back_N = binary_kl(proximal_N, rollout_N), binary_kl(rollout_N, proximal_N)
    return _kept("kpop", torch.maximum(there_N, back_N) <= config.kpop_limit)


def _kept(name: str, is_kept_N: Tensor, weight_N: Tensor | None = None) -> Correction:
    factors_N = is_kept_N.float() if weight_N is None else weight_N.masked_fill(~is_kept_N, 0.0)
    return Correction(factors_N=factors_N, diagnostics={f"{name}_fraction": ~is_kept_N})


# Statistics of a whole update ---------------------------------------------------------------------


def needs_batch(config: AlgorithmConfig) -> bool:
    """Returns whether a correction needs the proximal log-probabilities of the whole update."""
    return any(isinstance(one, M2po) for one in config.correction) or _has_mean_weight(config)


def _has_mean_weight(config: AlgorithmConfig) -> bool:
    return any(isinstance(one, Truncated) and one.normalize for one in config.correction)


def batch_statistics(
    parts: Sequence[LossInputs],
    config: AlgorithmConfig,
    weights_of: Callable[[LossInputs], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> BatchStatistics:
    """Statistics of an update whose micro-batches on this rank are `parts`; collective.

    `weights_of` gives the [N] importance weights. The number of collectives depends on `config`
    alone.
    """
    mean_weight, largest_square = 1.0, float("inf")
    if _has_mean_weight(config):
        sums = [torch.stack([weights_of(p)[p.mask_N].sum(), p.mask_N.sum()]) for p in parts]
        total, count = sum_over_ranks(torch.stack(sums).double().sum(0)).tolist()
        if count:  # none if only other streams have tokens in this update
            mean_weight = total / count
    for m2po in (one for one in config.correction if isinstance(one, M2po)):
        squares_N = torch.cat([part.stale_N[part.mask_N].square().float() for part in parts])
        largest_square = largest_square_kept(squares_N, m2po.m2po_limit, sum_over_ranks)
    return BatchStatistics(mean_weight=mean_weight, largest_square=largest_square)


def largest_square_kept(
    squares_N: Tensor, limit: float, sum_over_ranks: Callable[[Tensor], Tensor]
) -> float:
    """The largest float32 x such that the mean of all ranks' values <= x is at most `limit`.

    That mean grows with x, and floats that are not negative are ordered like their bits: 31 rounds
    of bisection find x exactly, where sorting would gather every token on every rank.
    """

    def is_kept(bits: int) -> bool:
        bound = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(squares_N.device)
        kept_N = squares_N[squares_N <= bound].double()
        total, count = sum_over_ranks(torch.stack([kept_N.sum(), kept_N.new_tensor(len(kept_N))]))
        return bool(total <= limit * count)

    low, high = 0, 0x7F7FFFFF  # 0, which holds for any limit, and the largest float
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_kept(middle) else (low, middle - 1)
    return float(torch.tensor(low, dtype=torch.int32).view(torch.float32))
