"""The critic's part of a training step: its values before, its updates beside the policy's.

    rows ─► values V at the start of the step ─► gae ─► advantages, returns R
    each minibatch: passes ─► max((V - R)^2, (V clipped to V at the start - R)^2) / 2 ─► update

A loss has the weights and the denominator of the policy's, so the number of ranks changes nothing.

Letters: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.advantages import CriticConfig
from configs.algorithm_schema import RETURN_COLUMN, VALUE_COLUMN
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch
from trainer_pool.model.critic import Critic


@dataclass(kw_only=True, slots=True, frozen=True)
class CriticStep:
    """The critic in one step."""

    critic: Critic
    config: CriticConfig
    learning_rate: float
    holds_policy: bool
    """The critic alone learns in this step (`warmup_steps`)."""


def value_loss(
    values_N: Tensor, start_N: Tensor, returns_N: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """[N] losses, and whether the clipped value is the worse one: then there is no gradient.

    As PPO's code has it (Engstrom et al. 2020, arXiv 2005.12729, section 3).
    """
    loss_N = (values_N - returns_N).square() / 2
    if clip_range is None:
        return loss_N, torch.zeros_like(loss_N, dtype=torch.bool)
    clipped_N = start_N + (values_N - start_N).clamp(-clip_range, clip_range)
    of_clipped_N = (clipped_N - returns_N).square() / 2
    return torch.maximum(loss_N, of_clipped_N), of_clipped_N > loss_N


def update_critic(
    step: CriticStep,
    minibatches: Iterable[tuple[Sequence[MicroBatch], float]],
    ranks: Collectives,
    before_update: Callable[[], None],
) -> dict[str, float]:
    """An update for each minibatch, of which every rank has the same number of micro-batches, and
    the denominator. Returns metrics of the step; collective."""
    sums = torch.zeros(7, dtype=torch.float64, device=step.critic.device)
    norms = []
    for micro_batches, denominator in minibatches:
        for micro_batch in micro_batches:
            sums += _accumulate(step, micro_batch.to(step.critic.device), denominator)
        before_update()
        norms.append(step.critic.step(step.learning_rate))
    return _metrics(ranks.gather(sums).sum(0).tolist(), [n for n in norms if n is not None])


def _accumulate(step: CriticStep, batch: MicroBatch, denominator: float) -> Tensor:
    """Add the gradient of one micro-batch; returns sums over its trained tokens."""
    values_N = step.critic.values(batch)
    mask_N = batch.mask_N != 0
    if not batch.num_tokens:  # backward all the same: other ranks wait for this pass
        step.critic.backward(values_N.masked_fill(~mask_N, 0.0).sum())
        return values_N.new_zeros(7, dtype=torch.float64)
    start_N, returns_N = (
        batch.columns[name].masked_fill(~mask_N, 0.0) for name in (VALUE_COLUMN, RETURN_COLUMN)
    )
    loss_N, is_clipped_N = value_loss(values_N, start_N, returns_N, step.config.clip_range)
    loss_N = loss_N.masked_fill(~mask_N, 0.0)
    step.critic.backward((batch.weights_N * loss_N).sum() / denominator)
    errors_N = returns_N - start_N
    columns = (
        mask_N,
        loss_N,
        is_clipped_N & mask_N,
        returns_N,
        returns_N**2,
        errors_N,
        errors_N**2,
    )
    return torch.stack([column.detach().double().sum() for column in columns])


def _metrics(sums: Sequence[float], norms: Sequence[float]) -> dict[str, float]:
    number, loss, clipped, returns, returns_squared, errors, errors_squared = sums
    if not number:
        return {}
    variance = returns_squared / number - (returns / number) ** 2
    unexplained = errors_squared / number - (errors / number) ** 2
    return {
        "value_loss": loss / number,
        "value_clip_fraction": clipped / number,
        # Of the values by which this step's advantages were estimated.
        "explained_variance": 1 - unexplained / variance if variance > 1e-12 else math.nan,
        "critic_grad_norm": sum(norms) / len(norms) if norms else math.nan,
    }
