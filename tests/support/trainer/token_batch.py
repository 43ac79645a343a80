"""Micro-batches of tokens for the tests of losses and corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from configs.advantages import ADVANTAGES, AGGREGATIONS, AdvantageConfig
from configs.algorithm_schema import AlgorithmConfig
from configs.checks import FunctionConfig
from configs.corrections import CORRECTIONS
from configs.losses import LOSSES
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.types import LossInputs


def algorithm(
    *corrections: str,
    loss: str = "ppo",
    aggregation: str = "token_mean",
    advantage: AdvantageConfig | None = None,
    bounds: Mapping[str, object] = MappingProxyType({}),
    **settings: object,
) -> Algorithm:
    """The algorithm with these settings, and no correction unless one is named. Of `bounds`, each
    correction gets those that it has; of `settings`, loss and aggregation get theirs."""
    chosen = {
        "loss": of_kind(LOSSES, loss, settings),
        "aggregation": of_kind(AGGREGATIONS, aggregation, settings),
        "advantage": advantage or ADVANTAGES["grpo"](kind="grpo"),
        "correction": [of_kind(CORRECTIONS, kind, dict(bounds)) for kind in corrections],
    }
    return Algorithm.load(AlgorithmConfig(**chosen, **settings))  # type: ignore[arg-type]


F = TypeVar("F", bound=FunctionConfig)


def of_kind(kinds: Mapping[str, type[F]], kind: str, settings: dict[str, object]) -> F:
    """The settings of a function of this kind, taken from `settings`."""
    names = {item.name for item in fields(kinds[kind])} & settings.keys()
    own = {name: settings.pop(name) for name in names}
    return kinds[kind](kind=kind, **own)  # type: ignore[arg-type]


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
