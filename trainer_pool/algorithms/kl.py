"""Estimators of the KL divergence from a reference, token by token; pure.

With d = log(trainer / reference) (Schulman, "Approximating KL divergence", 2020):

    k1 = d     k2 = d^2/2     k3 = exp(-d) - 1 + d     absolute = |d|

As a term of the loss, k2 has the divergence's own gradient, in expectation over tokens that the
policy samples; k1's gradient has the mean 0, and k3's is biased.
"""

from __future__ import annotations

from torch import Tensor

from configs.algorithm_schema import KLConfig
from trainer_pool.algorithms.types import LossInputs


def k1(inputs: LossInputs, config: KLConfig) -> Tensor:
    return _apart(inputs)


def k2(inputs: LossInputs, config: KLConfig) -> Tensor:
    return _apart(inputs).square() / 2


def k3(inputs: LossInputs, config: KLConfig) -> Tensor:
    """Never negative, and of less variance than k1."""
    apart_N = _apart(inputs)
    return (-apart_N).expm1() + apart_N


def absolute(inputs: LossInputs, config: KLConfig) -> Tensor:
    return _apart(inputs).abs()


def unbiased(inputs: LossInputs, config: KLConfig) -> Tensor:
    """k3 weighted by trainer / rollout (DeepSeek-V3.2, arXiv 2512.02556): unbiased also for
    tokens of an older policy, and so is its gradient."""
    return inputs.off_policy_N.exp() * k3(inputs, config)


def _apart(inputs: LossInputs) -> Tensor:
    return inputs.log_ratio(inputs.trainer_logprobs_N, inputs.reference_logprobs_N)
