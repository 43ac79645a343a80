"""Comparisons with verl."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.algorithms.batch import (
    LENGTH,
    LONG,
    NARROW,
    PARTS,
    ROWS,
    WIDE,
    Batch,
    Pair,
    advantages_of,
    distillation_of,
    gradient_of,
    kl_of,
    loss_of,
    with_gradient,
)

VERL_MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "sequence_mean_token_mean": "seq-mean-token-mean",
}


def verl_pairs() -> dict[str, Pair]:
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    distillation = importlib.import_module("verl.trainer.distillation.losses")
    actor = importlib.import_module("verl.workers.config").ActorConfig

    def config(low: float, high: float, **more: Any) -> Any:
        extra = {"strategy": "fsdp", "rollout_n": 1, "use_dynamic_bsz": True}
        return actor(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, **extra, **more)

    def loss(name: str, batch: Batch, mode: str, settings: Any, weights: Any = None) -> Tensor:
        function = core.get_policy_loss_fn(name)
        anchor = batch.rollout if name.startswith("dppo") else batch.proximal
        found: Tensor
        found, _ = function(
            old_log_prob=anchor,
            log_prob=batch.trainer,
            advantages=batch.advantages,
            response_mask=batch.mask,
            loss_agg_mode=mode,
            config=settings,
            rollout_is_weights=weights,
        )
        return found

    def stale(batch: Batch) -> Tensor:
        return batch.proximal - batch.rollout

    def weights(batch: Batch, level: str, threshold: float | str, normalize: bool = False) -> Any:
        return helper.compute_rollout_correction_weights(
            stale(batch), batch.mask, level, threshold, normalize
        )[0]

    def mask(batch: Batch, option: str, bounds: str) -> Any:
        return helper.compute_rollout_rejection_mask(stale(batch), batch.mask, option, bounds)[0]

    wide = config(0.2, 0.28, clip_ratio_c=3.0)

    def ppo(batch: Batch, theirs: Any, *kinds: str, **settings: Any) -> tuple[Tensor, Tensor]:
        ours = loss_of(batch, kinds, **{**WIDE, "dual_clip": 3.0, **settings})
        found = loss("vanilla", batch, "token-mean", wide, theirs)
        return with_gradient(ours, batch), with_gradient(found, batch)

    def aggregated(name: str, mode: str) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            ours = loss_of(batch, loss="supervised", aggregation=name)
            losses = -batch.trainer
            theirs = core.agg_loss(losses, batch.mask, mode, loss_scale_factor=LONG)
            return with_gradient(ours, batch), with_gradient(theirs, batch)

        return pair

    def divergent(name: str) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            ours = loss_of(batch, loss=name, dppo_low=0.1, dppo_high=0.15, log_ratio_penalty=0.0)
            settings = config(0.1, 0.15, clip_ratio_c=20.0)
            theirs = loss(name, batch, "token-mean", settings)
            return gradient_of(ours, batch), gradient_of(theirs, batch)

        return pair

    def plain(name: str, mode: str, settings: Any, aggregation: str, **own: Any) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            ours = loss_of(batch, loss=name, aggregation=aggregation, **own)
            theirs = loss(name, batch, mode, settings)
            return with_gradient(ours, batch), with_gradient(theirs, batch)

        return pair

    def unclipped(batch: Batch) -> tuple[Tensor, Tensor]:
        """-w A is PPO without its bounds, anchored at the rollout policy."""
        settings = config(1e9, 1e9, clip_ratio_c=1e9)
        theirs = loss("vanilla", replace(batch, proximal=batch.rollout), "token-sum", settings)
        ours = loss_of(batch, loss="importance_sampling", aggregation="token_sum")
        return with_gradient(ours, batch), with_gradient(theirs, batch)

    def veto(batch: Batch) -> tuple[Tensor, Tensor]:
        """Theirs rejects for a large ratio, too: here all are at most 1."""
        batch = replace(batch, proximal=torch.minimum(batch.proximal, batch.rollout))
        limit = 0.5 * math.log(0.5) ** 2
        kept = mask(batch, "seq_max_k2", str(limit))
        return ppo(batch, kept, "veto", correction_veto_below=0.5)

    def distilled(batch: Batch) -> tuple[Tensor, Tensor]:
        """Their dual clip, which cannot be set here, bounds ratios above 3: here all are below."""
        near = (batch.trainer.detach() - batch.rollout).clamp(-1, 1)
        batch = replace(batch, rollout=batch.trainer.detach() - near)
        theirs, _ = distillation.distillation_loss(
            config=wide,
            distillation_config=SimpleNamespace(
                distillation_loss=distillation.DistillationLossConfig(
                    loss_mode="k1",
                    loss_max_clamp=None,
                    clip_ratio=1e9,
                    clip_ratio_low=1e9,
                    clip_ratio_high=1e9,
                )
            ),
            # Their packed rows: one token of prompt, whose position predicts the first of the
            # answer.
            model_output={"log_probs": pad(batch.trainer, (0, 1)).flatten()},
            data={
                "teacher_logprobs": pad(batch.reference, (0, 1)).flatten().unsqueeze(1),
                "old_log_probs": batch.rollout,
                "response_mask": batch.mask,
                "prompts": torch.zeros(ROWS, 1),
                "responses": batch.mask,
                "attention_mask": torch.ones(ROWS, 1 + LENGTH, dtype=torch.int64),
                "dp_size": 1,
                "batch_num_tokens": batch.mask.sum(),
                "global_batch_size": ROWS,
            },
        )
        return gradient_of(distillation_of(batch, 1e9), batch), gradient_of(theirs, batch)

    def reinforce(batch: Batch) -> tuple[Tensor, Tensor]:
        moved = (batch.trainer - batch.rollout).detach()
        theirs, _ = core.compute_policy_loss_reinforce(
            rollout_log_prob=batch.rollout,
            log_prob=batch.trainer,
            advantages=batch.advantages,
            response_mask=batch.mask,
            loss_agg_mode="token-mean",
            config=wide,
            rollout_is_weights=helper.compute_rollout_correction_weights(
                moved, batch.mask, "token", 2.0
            )[0],
        )
        ours = loss_of(batch, loss="reinforce", weight_cap=2.0)
        return with_gradient(ours, batch), with_gradient(theirs, batch)

    def advantage(kind: str, function: str, *, more: Any = None, **settings: Any) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            rewards = torch.zeros_like(batch.mask)
            rewards[torch.arange(ROWS), batch.mask.cumsum(1).argmax(1)] = batch.rewards
            arguments: dict[str, Any] = {
                "token_level_rewards": rewards,
                "response_mask": batch.mask,
                **(more or {}),
            }
            if kind != "reinforce_pp":
                arguments["index"] = batch.groups
            if kind == "gdpo":
                arguments |= {
                    "config": {
                        "gdpo_reward_keys": [*PARTS],
                        "gdpo_reward_weights": [*PARTS.values()],
                    },
                    "non_tensor_batch": {name: getattr(batch, name).numpy() for name in PARTS},
                    "batch": {
                        "prompts": torch.zeros(ROWS, 1),
                        "attention_mask": pad(batch.mask, (1, 0), value=1).long(),
                    },
                }
            theirs, _ = getattr(core, function)(**arguments)
            ours = advantages_of(batch, kind, **settings).unsqueeze(1) * batch.mask
            return ours, theirs

        return pair

    def kl(name: str, theirs: str) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            found = core.kl_penalty(batch.trainer, batch.reference, theirs) * batch.mask
            return with_gradient(kl_of(batch, name).sum(), batch), with_gradient(found.sum(), batch)

        return pair

    passk = {"config": {"norm_adv_by_std_in_grpo": True}}
    whitened = {"epsilon": 0.0}
    narrow = config(0.04, 0.05)
    return {
        "ppo, dual clip": lambda b: ppo(b, None),
        "tis_token": lambda b: ppo(b, weights(b, "token", 2.0), "tis_token"),
        "tis_sequence": lambda b: ppo(b, weights(b, "sequence", 2.0), "tis_sequence"),
        "tis_token, normalized": lambda b: ppo(
            b, weights(b, "token", 2.0, True), "tis_token", correction_normalize=True
        ),
        "icepop": lambda b: ppo(b, weights(b, "token", "0.5_5.0"), "icepop"),
        "geometric_mask": lambda b: ppo(
            b,
            mask(b, "seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}"),
            "geometric_mask",
            correction_geometric_low=0.9,
            correction_geometric_high=1.1,
        ),
        "product_mask": lambda b: ppo(b, mask(b, "seq_sum_k1", "0.5_2.0"), "product_mask"),
        "veto (seq_max_k2 of ratios up to 1)": veto,
        "gspo": plain("gspo", "seq-mean-token-mean", narrow, "sequence_mean_token_mean", **NARROW),
        "sapo": plain(
            "sapo",
            "seq-mean-token-mean",
            config(0.2, 0.28, tau_pos=1.0, tau_neg=1.05),
            "sequence_mean_token_mean",
        ),
        "cispo": plain("cispo", "token-mean", wide, "token_mean", **WIDE),
        "dppo_tv": divergent("dppo_tv"),
        "dppo_kl": divergent("dppo_kl"),
        "reinforce": reinforce,
        "importance sampling (ppo without bounds)": unclipped,
        "distillation": distilled,
        **{f"aggregation {n}": aggregated(n, mode) for n, mode in VERL_MODES.items()},
        "grpo": advantage("grpo", "compute_grpo_outcome_advantage"),
        "dr_grpo": advantage(
            "dr_grpo",
            "compute_grpo_outcome_advantage",
            more={"norm_adv_by_std_in_grpo": False},
        ),
        "rloo": advantage("rloo", "compute_rloo_outcome_advantage"),
        "reinforce_pp": advantage(
            "reinforce_pp",
            "compute_reinforce_plus_plus_outcome_advantage",
            more={"config": SimpleNamespace(gamma=1.0)},
            **whitened,
        ),
        "reinforce_pp_baseline": advantage(
            "reinforce_pp_baseline",
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            **whitened,
        ),
        # Any epsilon: their second one is 1e-8, and ours is that of the groups.
        "gdpo": advantage(
            "gdpo", "compute_gdpo_outcome_advantage", more={"epsilon": 1e-12}, epsilon=1e-12
        ),
        "pass_at_k": advantage("pass_at_k", "compute_grpo_passk_outcome_advantage", more=passk),
        "kl k1": kl("k1", "k1"),
        "kl k2": kl("k2", "k2"),
        "kl k3": kl("k3", "k3"),
        "kl absolute": kl("absolute", "abs"),
    }
