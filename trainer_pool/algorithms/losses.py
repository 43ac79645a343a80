"""Policy losses, one pure function each, token by token.

Each token has three policies: the one that sampled it (`rollout`, measured by the inference
engine), the one at the start of the step (`proximal`) and the one being updated (`trainer`).

    r = trainer / proximal   how far this step has moved the policy
    w = trainer / rollout    the same, with staleness and the mismatch of engine and trainer

Losses with r leave proximal / rollout to a correction (`corrections.py`): PPO with one is decoupled
PPO (AReaL, arXiv 2505.24298, eq. 5). Losses with w need none. `algorithm.proximal=rollout` makes r
equal to w.

A is the advantage, sg stops the gradient. All log ratios are bounded (`LossInputs.log_ratio`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.checks import FunctionConfig
from configs.losses import ClippedLoss, Dppo, Gspo, Ppo, Reinforce, Sapo, TeacherKl
from trainer_pool.algorithms.types import LossInputs, LossOutputs, bounded


def ppo(inputs: LossInputs, config: Ppo) -> LossOutputs:
    """- min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    PPO (arXiv 1707.06347, eq. 7); its two bounds may differ (DAPO's clip-higher, arXiv 2503.14476).
    With `dual_clip` c the loss of a bad token is at most -c A (arXiv 1912.09729).
    """
    return _clipped(inputs, inputs.moved_N.exp(), config)


def gspo(inputs: LossInputs, config: Gspo) -> LossOutputs:
    """The loss of PPO with s = exp(mean of log r over the trajectory) for r.

    GSPO-token (arXiv 2507.18071): s is that of the whole trajectory, and the gradient of
    each token is its own, so that tokens may have advantages of their own. Bounded is the mean, and
    not the log r of each token in it.
    """
    free_N = inputs.trainer_logprobs_N - inputs.proximal_logprobs_N
    whole_N = inputs.spread(inputs.mean_by_segment(free_N.detach()))
    ratio_N = bounded(free_N - free_N.detach() + whole_N).exp()
    return _clipped(inputs, ratio_N, config)


def _clipped(inputs: LossInputs, ratio_N: Tensor, config: Ppo) -> LossOutputs:
    advantages_N = inputs.advantages_N
    free_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    gain_N = torch.minimum(free_N, clipped_N)
    diagnostics = {"clip_fraction": clipped_N < free_N}
    if config.dual_clip is not None:
        floor_N = config.dual_clip * advantages_N
        is_bad_N = advantages_N < 0
        diagnostics["dual_clip_fraction"] = is_bad_N & (gain_N < floor_N)
        gain_N = torch.where(is_bad_N, torch.maximum(gain_N, floor_N), gain_N)
    return LossOutputs(loss_N=-gain_N, diagnostics=diagnostics)


def cispo(inputs: LossInputs, config: ClippedLoss) -> LossOutputs:
    """- sg(clip(r, 1 - clip_low, 1 + clip_high)) A log(trainer)

    CISPO (MiniMax-M1, arXiv 2506.13585): a clipped token keeps its gradient.
    """
    ratio_N = inputs.moved_N.detach().exp()
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return LossOutputs(
        loss_N=-clipped_N * inputs.advantages_N * inputs.trainer_logprobs_N,
        diagnostics={"clip_fraction": clipped_N != ratio_N},
    )


def sapo(inputs: LossInputs, config: Sapo) -> LossOutputs:
    """- 4/t sigmoid(t (r - 1)) A, with t = `sapo_good` where A > 0 and else `sapo_bad`.

    SAPO (arXiv 2511.20347): a soft gate in place of the clip, whose slope at r = 1 is 1.
    """
    ratio_N = inputs.moved_N.exp()
    steepness_N = torch.full_like(ratio_N, config.sapo_bad)
    steepness_N = steepness_N.masked_fill(inputs.advantages_N > 0, config.sapo_good)
    gate_N = 4 / steepness_N * torch.sigmoid(steepness_N * (ratio_N - 1))
    return LossOutputs(loss_N=-gate_N * inputs.advantages_N)


def reinforce(inputs: LossInputs, config: Reinforce) -> LossOutputs:
    """- sg(min(w, weight_cap)) A log(trainer): REINFORCE with an importance weight.

    The weight of PipelineRL (arXiv 2509.19128); with `weight_cap` 1 that of ROLL.
    """
    weight_N = inputs.off_policy_N.detach().exp()
    capped_N = weight_N.clamp(max=config.weight_cap)
    return LossOutputs(
        loss_N=-capped_N * inputs.advantages_N * inputs.trainer_logprobs_N,
        diagnostics={"clip_fraction": capped_N != weight_N},
    )


def importance_sampling(inputs: LossInputs, config: FunctionConfig) -> LossOutputs:
    """- w A; Tinker sums it over the tokens (`algorithm.aggregation=token_sum`)."""
    return LossOutputs(loss_N=-inputs.off_policy_N.exp() * inputs.advantages_N)


def dppo_tv(inputs: LossInputs, config: Dppo) -> LossOutputs:
    """- M w A + `log_ratio_penalty` (log w)^2, where M is 0 for a token whose probability has moved
    in the direction of its advantage by more than `dppo_high` (up) or `dppo_low` (down).

    DPPO (arXiv 2602.04879) with the total variation of the binary choice of this token or another.
    The penalty, which also holds for masked tokens, is Kimi K2.5's; prime-rl trains with 1e-3.
    """
    moved_N = inputs.trainer_logprobs_N.detach().exp() - inputs.rollout_logprobs_N.exp()
    return _dppo(inputs, moved_N, moved_N.abs(), config)


def dppo_kl(inputs: LossInputs, config: Dppo) -> LossOutputs:
    """As `dppo_tv`, with the divergence KL(rollout | trainer) of the binary choice."""
    trainer_N, rollout_N = inputs.trainer_logprobs_N.detach(), inputs.rollout_logprobs_N
    return _dppo(inputs, trainer_N - rollout_N, binary_kl(rollout_N, trainer_N), config)


def _dppo(inputs: LossInputs, moved_N: Tensor, divergence_N: Tensor, config: Dppo) -> LossOutputs:
    advantages_N = inputs.advantages_N
    is_too_high_N = (advantages_N > 0) & (moved_N > 0) & (divergence_N > config.dppo_high)
    is_too_low_N = (advantages_N < 0) & (moved_N < 0) & (divergence_N > config.dppo_low)
    is_masked_N = is_too_high_N | is_too_low_N
    log_weight_N = inputs.off_policy_N
    gain_N = (log_weight_N.exp() * advantages_N).masked_fill(is_masked_N, 0.0)
    return LossOutputs(
        loss_N=config.log_ratio_penalty * log_weight_N.square() - gain_N,
        diagnostics={"clip_fraction": is_masked_N},
    )


def binary_kl(logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """[N] KL(p | q) of the choice of this token or another; finite also where p or q is 1, or by an
    engine's rounding above."""
    p_N, q_N = logprobs_N.exp().clamp(max=1), other_logprobs_N.exp().clamp(max=1)
    others_N = (1 - p_N) * torch.log((1 - p_N + 1e-8) / (1 - q_N + 1e-8))
    return p_N * (logprobs_N - other_logprobs_N) + others_N


def supervised(inputs: LossInputs, config: FunctionConfig) -> LossOutputs:
    """- log(trainer): imitates every trained token, whatever its advantage."""
    return LossOutputs(loss_N=-inputs.trainer_logprobs_N)


def teacher_kl(inputs: LossInputs, config: TeacherKl) -> LossOutputs:
    """sg(min(w, weight_cap) log(trainer / teacher)) log(trainer): on-policy distillation.

    Its gradient is that of KL(trainer | teacher) at each token, estimated by the token that was
    sampled (Thinking Machines, "On-Policy Distillation", 2025; MiniLLM, arXiv 2306.08543), and
    weighted as in `reinforce` where an older policy sampled it.
    """
    apart_N = inputs.log_ratio(inputs.trainer_logprobs_N, inputs.teacher_logprobs_N).detach()
    weight_N = inputs.off_policy_N.detach().exp()
    capped_N = weight_N.clamp(max=config.weight_cap)
    return LossOutputs(
        loss_N=capped_N * apart_N * inputs.trainer_logprobs_N,
        diagnostics={"kl": capped_N * apart_N, "clip_fraction": capped_N != weight_N},
    )
