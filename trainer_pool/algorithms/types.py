"""The inputs and results of losses, corrections and KL estimators.

Letters: N tokens of one micro-batch, S trajectories in it. Tokens that are not trained (their mask
is false) have finite log-probabilities, and what a function returns for them is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.algorithm_schema import REFERENCE_COLUMN, TEACHER_COLUMN
from trainer_pool.algorithms.load_balancing import RouterSums

MAX_LOG_RATIO = 20.0
"""The same bound as in verl (`trainer/ppo/core_algos.py`)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchStatistics:
    """Statistics of all tokens of an update, on all ranks, for what needs them."""

    mean_weight: float = 1.0
    """Mean of the importance weights, by which batch-normalised ones are divided."""
    largest_square: float = float("inf")
    """The largest squared log ratio that M2PO keeps."""
    routers: RouterSums | None = None
    """The sums of its tokens for load balancing, by the policy at the start of the step."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class LossInputs:
    """The tokens of one micro-batch; a trajectory is never split over micro-batches.

    Example: two trajectories of three and two trained tokens.

        segment_ids_N        0    0    0    1    1
        advantages_N         1.2  1.2  1.2 -0.8 -0.8
        staleness_N          1    1    0    0    0      a commit came before the third token
    """

    trainer_logprobs_N: Tensor
    """By the policy being updated; only these and the entropy have a gradient."""
    proximal_logprobs_N: Tensor
    """By the policy at the start of the step, or by the one that `algorithm.proximal` names."""
    rollout_logprobs_N: Tensor
    """By the policies that sampled the tokens, as the engines measured them."""
    advantages_N: Tensor
    weights_N: Tensor
    """Weight of each token in the sum that becomes the loss; from the aggregation."""
    mask_N: Tensor
    """Bool: the token is trained."""
    staleness_N: Tensor
    """int64: versions between the one that sampled the token and the one being trained."""
    segment_ids_N: Tensor
    """int64: the trajectory that a token belongs to, from 0."""
    num_segments: int
    entropy_N: Tensor | None = None
    """The entropy of the policy being updated, in nats."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: the columns of the trajectories, such as a teacher's log-probabilities, and the
    reference's log-probabilities."""
    batch: BatchStatistics = BatchStatistics()

    def __post_init__(self) -> None:
        assert self.mask_N.dtype == torch.bool and self.mask_N.ndim == 1
        assert self.segment_ids_N.shape == self.trainer_logprobs_N.shape == self.mask_N.shape

    @property
    def reference_logprobs_N(self) -> Tensor:
        return self._column(REFERENCE_COLUMN, "algorithm.kl.weight above 0 computes it")

    @property
    def teacher_logprobs_N(self) -> Tensor:
        return self._column(TEACHER_COLUMN, "a part of task.rewards with kind=teacher brings it")

    def _column(self, name: str, source: str) -> Tensor:
        if name not in self.columns:
            raise ValueError(f"the batch has no column {name}: {source}")
        return self.columns[name]

    def log_ratio(self, numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
        """[N] the difference, clamped to +-MAX_LOG_RATIO so that no single token dominates the
        loss; a clamped one has no gradient."""
        return bounded((numerator_N - denominator_N).masked_fill(~self.mask_N, 0.0))

    @property
    def moved_N(self) -> Tensor:
        """log(trainer / proximal); its gradient is that of `trainer_logprobs_N`."""
        return self.log_ratio(self.trainer_logprobs_N, self.proximal_logprobs_N)

    @property
    def stale_N(self) -> Tensor:
        """log(proximal / rollout): staleness and the mismatch of engine and trainer; a constant."""
        return self.log_ratio(self.proximal_logprobs_N, self.rollout_logprobs_N).detach()

    @property
    def off_policy_N(self) -> Tensor:
        """log(trainer / rollout); its gradient is that of `trainer_logprobs_N`."""
        return self.log_ratio(self.trainer_logprobs_N, self.rollout_logprobs_N)

    def sum_by_segment(self, values_N: Tensor) -> Tensor:
        """[S] sums over the trained tokens of each trajectory."""
        zeros_S = torch.zeros(self.num_segments, dtype=values_N.dtype, device=values_N.device)
        return zeros_S.index_add(0, self.segment_ids_N, values_N.masked_fill(~self.mask_N, 0.0))

    def mean_by_segment(self, values_N: Tensor) -> Tensor:
        """[S] means over the trained tokens of each trajectory; 0 if it has none."""
        lengths_S = self.sum_by_segment(torch.ones_like(values_N))
        return self.sum_by_segment(values_N) / lengths_S.clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """[N] the value of each token's trajectory."""
        return values_S[self.segment_ids_N]


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` clamped to +-MAX_LOG_RATIO, without gradient where it was clamped."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class LossOutputs:
    """The loss of each token, before it is weighted, corrected and summed."""

    loss_N: Tensor
    """To be minimised."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each. A step's metrics contain their means over the trained tokens, overall and by
    staleness."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """A sum and a count each; a step's metrics contain sum / count over all ranks."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Correction:
    """The factor by which a correction multiplies the loss of each token; no gradient.

    A token with factor 0 is rejected. It still counts in the denominator of the loss; otherwise
    every rejected token would raise the weight of those that remain.
    """

    factors_N: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
