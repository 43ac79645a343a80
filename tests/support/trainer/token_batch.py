"""Micro-batches of tokens for the tests of losses and corrections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from configs.algorithm_schema import AdvantageConfig, AlgorithmConfig, CorrectionConfig
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.types import LossInputs


def algorithm(
    *corrections: str,
    correction: CorrectionConfig | None = None,
    advantage: AdvantageConfig | None = None,
    **settings: object,
) -> Algorithm:
    """The algorithm with these settings, and no correction unless one is named."""
    correction = correction or CorrectionConfig()
    config = AlgorithmConfig(
        correction=replace(correction, kinds=[*corrections]),
        advantage=advantage or AdvantageConfig(),
        **settings,  # type: ignore[arg-type]
    )
    return Algorithm.load(config)


def tokens(
    *,
    trainer: Tensor,
    proximal: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    staleness: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
) -> LossInputs:
    """[N] each; one trajectory unless `segments` says otherwise."""
    mask = torch.ones(trainer.shape) if mask is None else mask
    segments = [0] * len(trainer) if segments is None else segments

    def real(values: Tensor) -> Tensor:
        return values.masked_fill(mask == 0, 0.0)

    return LossInputs(
        trainer_logprobs_N=real(trainer),
        proximal_logprobs_N=real(proximal),
        rollout_logprobs_N=real(rollout),
        advantages_N=real(advantages),
        weights_N=torch.ones_like(advantages) if weights is None else weights,
        mask_N=mask != 0,
        staleness_N=torch.tensor([0] * len(trainer) if staleness is None else staleness),
        segment_ids_N=torch.tensor(segments),
        num_segments=max(segments) + 1,
    )
