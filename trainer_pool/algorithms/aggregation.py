"""From losses of tokens to the loss of an update: the weight of each trajectory's tokens; pure.

    loss = sum over trained tokens of weight x loss of the token / denominator

The denominator is summed over all ranks, so that neither the number of ranks nor that of
micro-batches changes the loss. Masked positions do not count; tokens that a correction rejects do.

Letters: R trajectories of one rank's part of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.advantages import AggregationConfig, SequenceMeanTokenSumNorm


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class AggregationInputs:
    """The trajectories with a trained token; those of a group are all on one rank."""

    num_tokens_R: NDArray[np.int64]
    """Trained tokens."""
    shares_R: NDArray[np.float64]
    """1, or 1/n for each of the n trajectories of one episode: an episode counts once."""
    groups_R: NDArray[np.int64]
    """The group of each trajectory, from 0."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Aggregation:
    """The weights of tokens in the loss of an update."""

    weights_R: NDArray[np.float64]
    """Weight of each token of the trajectory."""
    denominator: float | None
    """This rank's part of the denominator; None: the sum is not divided."""


def token_mean(inputs: AggregationInputs, config: AggregationConfig) -> Aggregation:
    """All tokens of the update weigh the same (DAPO, arXiv 2503.14476, eq. 12)."""
    num_tokens = float((inputs.shares_R * inputs.num_tokens_R).sum())
    return Aggregation(weights_R=inputs.shares_R, denominator=num_tokens)


def token_sum(inputs: AggregationInputs, config: AggregationConfig) -> Aggregation:
    """No mean: the gradient grows with the batch (Tinker)."""
    return Aggregation(weights_R=inputs.shares_R, denominator=None)


def sequence_mean_token_mean(inputs: AggregationInputs, config: AggregationConfig) -> Aggregation:
    """All episodes weigh the same: a token of a long one weighs less (GRPO, arXiv 2402.03300)."""
    return _sequence_mean(inputs, inputs.shares_R / inputs.num_tokens_R)


def sequence_mean_token_sum(inputs: AggregationInputs, config: AggregationConfig) -> Aggregation:
    """The tokens of an episode are summed, and the episodes averaged."""
    return _sequence_mean(inputs, inputs.shares_R)


def sequence_mean_token_sum_norm(
    inputs: AggregationInputs, config: SequenceMeanTokenSumNorm
) -> Aggregation:
    """As `sequence_mean_token_sum`, over a constant, `aggregation_length` (Dr. GRPO, arXiv
    2503.20783)."""
    assert config.aggregation_length is not None
    return _sequence_mean(inputs, inputs.shares_R / config.aggregation_length)


def _sequence_mean(inputs: AggregationInputs, weights_R: NDArray[np.float64]) -> Aggregation:
    return Aggregation(weights_R=weights_R, denominator=float(inputs.shares_R.sum()))


def prompt_mean(inputs: AggregationInputs, config: AggregationConfig) -> Aggregation:
    """The mean over the tokens of each group, averaged over the groups."""
    tokens_R = inputs.shares_R * inputs.num_tokens_R
    per_group = np.bincount(inputs.groups_R, weights=tokens_R)
    return Aggregation(
        weights_R=inputs.shares_R / per_group[inputs.groups_R],
        denominator=float(len(np.unique(inputs.groups_R))),
    )
