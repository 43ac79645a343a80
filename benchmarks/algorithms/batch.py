"""Random batches, our functions of them, and how far apart two results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.algorithm_schema import (
    REFERENCE_COLUMN,
    TEACHER_COLUMN,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
)
from trainer_pool.algorithms.advantages import AdvantageInputs, overlong_penalty
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.registry import FAMILIES, Algorithm
from trainer_pool.algorithms.types import BatchStatistics, LossInputs

BATCHES, ROWS, GROUP, LENGTH = 20, 6, 3, 11
LONG = 40
"""`aggregation_length`, and its namesakes."""
WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
NARROW: dict[str, Any] = {"clip_low": 0.04, "clip_high": 0.05}
PARTS = {"rewards": 1.0, "other_rewards": 0.5}
"""The parts of the reward, and their weights."""

OURS = {*chain(*FAMILIES.values()), "log_linear", "overlong_penalty"}
"""Names of all our functions: those of the families, and two that belong to none."""
called: set[str] = set()
"""Those that a comparison has called: read and cleared by `difference`."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Batch:
    """[B, T] each; values of tokens whose mask is 0 mean nothing."""

    trainer: Tensor
    proximal: Tensor
    rollout: Tensor
    reference: Tensor
    mask: Tensor
    advantages: Tensor
    """The same for all tokens of an answer."""
    rewards: Tensor
    """[B]"""
    other_rewards: Tensor
    """[B] a second part of the reward, for functions that take several."""
    groups: np.ndarray

    @property
    def num_tokens(self) -> Tensor:
        return self.mask.sum(1)


def random_batch(seed: int) -> Batch:
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    rollout = -normal(ROWS, LENGTH).abs() - 0.05
    proximal = (rollout + 0.4 * normal(ROWS, LENGTH)).clamp(max=-0.01)
    trainer = (proximal + 0.3 * normal(ROWS, LENGTH)).clamp(max=-0.01)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=dice)
    mask = (torch.arange(LENGTH) < lengths) & (torch.arange(LENGTH) != 1)  # a tool's word at 1
    return Batch(
        trainer=trainer.requires_grad_(),
        proximal=proximal,
        rollout=rollout,
        reference=(trainer.detach() + 0.5 * normal(ROWS, LENGTH)).clamp(max=-0.01),
        mask=mask.double(),
        advantages=normal(ROWS, 1).expand(-1, LENGTH).contiguous(),
        rewards=torch.randint(0, 4, (ROWS,), generator=dice).double(),
        other_rewards=torch.randint(0, 3, (ROWS,), generator=dice).double(),
        groups=np.repeat([0, 1], GROUP),
    )


def inputs_of(batch: Batch, weights: Tensor, algorithm: Algorithm) -> LossInputs:
    is_real = batch.mask.flatten() != 0

    def real(values: Tensor) -> Tensor:
        return values.flatten()[is_real]

    return LossInputs(
        trainer_logprobs_N=real(batch.trainer),
        proximal_logprobs_N=algorithm.proximal(
            real(batch.proximal), real(batch.rollout), torch.ones(int(is_real.sum()))
        ),
        rollout_logprobs_N=real(batch.rollout),
        advantages_N=real(batch.advantages),
        weights_N=real(weights.unsqueeze(1).expand_as(batch.mask)),
        mask_N=torch.ones(int(is_real.sum()), dtype=torch.bool),
        staleness_N=torch.ones(int(is_real.sum()), dtype=torch.int64),
        segment_ids_N=real(torch.arange(ROWS).unsqueeze(1).expand_as(batch.mask)),
        num_segments=ROWS,
        columns=dict.fromkeys([REFERENCE_COLUMN, TEACHER_COLUMN], real(batch.reference)),
    )


def loss_of(batch: Batch, corrections: Sequence[str] = (), **settings: Any) -> Tensor:
    """Our loss; `settings` of the correction are prefixed with `correction_`."""
    own = {k.removeprefix("correction_"): v for k, v in settings.items() if k[:11] == "correction_"}
    rest = {k: v for k, v in settings.items() if k[:11] != "correction_"}
    config = AlgorithmConfig(
        correction=CorrectionConfig(kinds=[*corrections], **own),
        aggregation_length=LONG,
        **rest,
    )
    called.update([config.loss, *corrections, config.aggregation])
    algorithm = Algorithm.load(config)
    found = algorithm.aggregate(
        AggregationInputs(
            num_tokens_R=batch.num_tokens.numpy().astype(np.int64),
            shares_R=np.ones(ROWS),
            groups_R=batch.groups,
        )
    )
    inputs = inputs_of(batch, torch.from_numpy(found.weights_R), algorithm)
    statistics = BatchStatistics()
    if algorithm.needs_batch:
        statistics = algorithm.statistics([inputs], lambda sums: sums)
    inputs = replace(inputs, batch=statistics)
    return algorithm.objective(inputs, found.denominator or 1.0).loss


def advantages_of(batch: Batch, kind: str, **settings: Any) -> Tensor:
    """[B] our advantages."""
    called.add(kind)
    config = AlgorithmConfig(advantage=AdvantageConfig(kind=kind, part_weights=PARTS, **settings))
    inputs = AdvantageInputs(
        rewards_E=batch.rewards.numpy(),
        groups_E=batch.groups,
        num_tokens_E=batch.num_tokens.numpy(),
        parts={name: getattr(batch, name).numpy() for name in PARTS},
        trajectories=[SimpleNamespace(num_tokens=1)] * ROWS,  # type: ignore[list-item]
        episodes=range(ROWS),
    )
    return torch.tensor(
        np.concatenate(Algorithm.load(config).advantages(inputs)), dtype=torch.float64
    )


def overlong_of(batch: Batch, start: int, end: int) -> Tensor:
    """[B] what is added to the rewards."""
    called.add("overlong_penalty")
    config = AdvantageConfig(overlong_start=start, overlong_end=end)
    return torch.tensor(
        [-overlong_penalty(int(count), config) for count in batch.num_tokens], dtype=torch.float64
    )


def distillation_of(batch: Batch, weight_cap: float) -> Tensor:
    """The mean of `teacher_kl` over the tokens, with the reference as teacher."""
    called.add("teacher_kl")
    config = AlgorithmConfig(weight_cap=weight_cap)
    function = FAMILIES["algorithm.streams.*.loss"]["teacher_kl"]
    inputs = inputs_of(batch, torch.ones(ROWS), Algorithm.load(config))
    found: Tensor = function(inputs, config).loss_N.mean()
    return found


def kl_of(batch: Batch, name: str) -> Tensor:
    """[B, T]"""
    called.add(name)
    config = AlgorithmConfig()
    function = FAMILIES["algorithm.kl.estimator"][name]
    values_N: Tensor = function(inputs_of(batch, torch.ones(ROWS), Algorithm.load(config)), config)
    return torch.zeros_like(batch.mask).masked_scatter(batch.mask != 0, values_N)


def with_gradient(loss: Tensor, batch: Batch) -> Tensor:
    """[1 + B T] the loss and its gradient."""
    (gradient,) = torch.autograd.grad(loss, batch.trainer)
    return torch.cat([loss.detach().view(1), gradient.flatten()])


def gradient_of(loss: Tensor, batch: Batch) -> Tensor:
    return with_gradient(loss, batch)[1:]


Pair = Callable[[Batch], tuple[Tensor, Tensor]]


def difference(pair: Pair) -> tuple[float, list[str]]:
    """The largest over all batches, relative to the largest of their values if that is above 1, and
    the functions of ours that it is of."""
    called.clear()
    worst = 0.0
    for seed in range(BATCHES):
        ours, theirs = (values.detach() for values in pair(random_batch(seed)))
        assert ours.shape == theirs.shape  # else one would be broadcast
        scale = theirs.abs().max().clamp(min=1.0)
        worst = max(worst, float((ours - theirs).abs().max() / scale))
    return worst, sorted(called)
