"""Comparisons with verl."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.algorithms.batch import (
    CLIP,
    LENGTH,
    LONG,
    PARTS,
    ROWS,
    Batch,
    Comparison,
    Pair,
    Values,
    advantages_of,
    compared,
    distillation_of,
    gradient_of,
    kl_of,
    loss_of,
    with_gradient,
    with_wild_tokens,
)

VERL_MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "sequence_mean_token_mean": "seq-mean-token-mean",
}


def verl_comparisons() -> dict[str, Comparison]:
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

    def mask(batch: Batch, option: str, bounds: str) -> Any:
        return helper.compute_rollout_rejection_mask(stale(batch), batch.mask, option, bounds)[0]

    def clipped(given: Values) -> Any:
        return config(given["clip_low"], given["clip_high"], clip_ratio_c=given["dual_clip"])

    def ppo(given: Callable[[Batch, Values], Any], *kinds: str, **settings: Any) -> Pair:
        """With the weights that `given` makes of their bounds."""

        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            found = loss("vanilla", batch, "token-mean", clipped(theirs), given(batch, theirs))
            own = loss_of(batch, kinds, **settings, **ours)
            return with_gradient(own, batch), with_gradient(found, batch)

        return pair

    def weighted(kind: str, level: str, *bounds: str, is_normalized: bool = False) -> Comparison:
        def weights(batch: Batch, given: Values) -> Any:
            # One is the cap, two are those of IcePop.
            threshold = "_".join(str(given[name]) for name in bounds)
            return helper.compute_rollout_correction_weights(
                stale(batch), batch.mask, level, threshold, is_normalized
            )[0]

        settings = {"correction_normalize": True} if is_normalized else {}
        return compared(ppo(weights, kind, **settings), *CLIP, "dual_clip", *bounds)

    def rejected(kind: str, option: str) -> Comparison:
        low, high = (f"correction_{kind.removesuffix('mask')}{end}" for end in ("low", "high"))

        def kept(batch: Batch, given: Values) -> Any:
            # Theirs are bounds of rollout / trainer.
            return mask(batch, option, f"{1 / given[high]}_{1 / given[low]}")

        return compared(ppo(kept, kind), *CLIP, "dual_clip", low, high)

    def aggregated(name: str, mode: str) -> Pair:
        def pair(batch: Batch, *_: Values) -> tuple[Tensor, Tensor]:
            own = loss_of(batch, loss="supervised", aggregation=name)
            found = core.agg_loss(-batch.trainer, batch.mask, mode, loss_scale_factor=LONG)
            return with_gradient(own, batch), with_gradient(found, batch)

        return pair

    def divergent(name: str) -> Comparison:
        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            own = loss_of(batch, loss=name, log_ratio_penalty=0.0, **ours)
            settings = config(theirs["dppo_low"], theirs["dppo_high"], clip_ratio_c=1e9)
            found = loss(name, batch, "token-mean", settings)
            return gradient_of(own, batch), gradient_of(found, batch)

        return compared(pair, "dppo_low", "dppo_high")

    def gspo(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        batch = with_wild_tokens(batch)
        own = loss_of(batch, loss="gspo", aggregation="sequence_mean_token_mean", **ours)
        settings = config(theirs["clip_low"], theirs["clip_high"])
        found = loss("gspo", batch, "seq-mean-token-mean", settings)
        return with_gradient(own, batch), with_gradient(found, batch)

    def sapo(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        settings = config(0.2, 0.2, tau_pos=theirs["sapo_good"], tau_neg=theirs["sapo_bad"])
        own = loss_of(batch, loss="sapo", aggregation="sequence_mean_token_mean", **ours)
        found = loss("sapo", batch, "seq-mean-token-mean", settings)
        return with_gradient(own, batch), with_gradient(found, batch)

    def cispo(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        settings = config(theirs["clip_low"], theirs["clip_high"])
        own = loss_of(batch, loss="cispo", **ours)
        found = loss("cispo", batch, "token-mean", settings)
        return with_gradient(own, batch), with_gradient(found, batch)

    def unclipped(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        """-w A is PPO without its bounds, anchored at the rollout policy."""
        batch = with_wild_tokens(batch)
        settings = config(1e9, 1e9, clip_ratio_c=1e9)
        found = loss("vanilla", replace(batch, proximal=batch.rollout), "token-sum", settings)
        own = loss_of(batch, loss="importance_sampling", aggregation="token_sum", **ours)
        return with_gradient(own, batch), with_gradient(found, batch)

    def veto(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        """Theirs rejects for a large ratio, too: here all are at most 1."""
        batch = replace(batch, proximal=torch.minimum(batch.proximal, batch.rollout))

        def kept(batch: Batch, given: Values) -> Any:
            limit = 0.5 * math.log(given["correction_veto_below"]) ** 2
            return mask(batch, "seq_max_k2", str(limit))

        return ppo(kept, "veto")(batch, theirs, ours)

    def distilled(batch: Batch, *_: Values) -> tuple[Tensor, Tensor]:
        """Their dual clip, which cannot be set here, bounds ratios above 3: here all are below."""
        near = (batch.trainer.detach() - batch.rollout).clamp(-1, 1)
        batch = replace(batch, rollout=batch.trainer.detach() - near)
        theirs, _ = distillation.distillation_loss(
            config=config(0.2, 0.2),
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

    def reinforce(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        moved = (batch.trainer - batch.rollout).detach()
        found, _ = core.compute_policy_loss_reinforce(
            rollout_log_prob=batch.rollout,
            log_prob=batch.trainer,
            advantages=batch.advantages,
            response_mask=batch.mask,
            loss_agg_mode="token-mean",
            config=config(0.2, 0.2),
            rollout_is_weights=helper.compute_rollout_correction_weights(
                moved, batch.mask, "token", theirs["weight_cap"]
            )[0],
        )
        own = loss_of(batch, loss="reinforce", **ours)
        return with_gradient(own, batch), with_gradient(found, batch)

    def advantage(kind: str, function: str, *, more: Any = None, **settings: Any) -> Pair:
        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            rewards = torch.zeros_like(batch.mask)
            rewards[torch.arange(ROWS), batch.mask.cumsum(1).argmax(1)] = batch.rewards
            arguments: dict[str, Any] = {
                "token_level_rewards": rewards,
                "response_mask": batch.mask,
                **(more or {}),
                **theirs,
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
            found, _ = getattr(core, function)(**arguments)
            own = advantages_of(batch, kind, **settings, **ours).unsqueeze(1) * batch.mask
            return own, found

        return pair

    def kl(name: str, theirs: str) -> Pair:
        def pair(batch: Batch, _: Values, ours: Values) -> tuple[Tensor, Tensor]:
            own = kl_of(batch, name, **ours).sum()
            found = core.kl_penalty(batch.trainer, batch.reference, theirs) * batch.mask
            return with_gradient(own, batch), with_gradient(found.sum(), batch)

        return pair

    passk = {"config": {"norm_adv_by_std_in_grpo": True}}
    whitened = {"epsilon": 0.0}
    cap, dual = "correction_tis_cap", (*CLIP, "dual_clip")
    return {
        "ppo, dual clip": compared(ppo(lambda batch, given: None), *dual),
        "tis_token": weighted("tis_token", "token", cap),
        "tis_sequence": weighted("tis_sequence", "sequence", cap),
        "tis_token, normalized": weighted("tis_token", "token", cap, is_normalized=True),
        "icepop": weighted("icepop", "token", "correction_icepop_low", "correction_icepop_high"),
        "geometric_mask": rejected("geometric_mask", "seq_mean_k1"),
        "product_mask": rejected("product_mask", "seq_sum_k1"),
        "veto (seq_max_k2 of ratios up to 1)": compared(veto, *dual, "correction_veto_below"),
        "gspo": compared(gspo, *CLIP),
        "sapo": compared(sapo, "sapo_good", "sapo_bad"),
        "cispo": compared(cispo, *CLIP),
        "dppo_tv": divergent("dppo_tv"),
        "dppo_kl": divergent("dppo_kl"),
        "reinforce": compared(reinforce, "weight_cap"),
        "importance sampling (ppo without bounds)": compared(unclipped, "max_log_ratio"),
        "distillation": compared(distilled),
        **{f"aggregation {n}": compared(aggregated(n, mode)) for n, mode in VERL_MODES.items()},
        "grpo": compared(advantage("grpo", "compute_grpo_outcome_advantage"), "epsilon"),
        "dr_grpo": compared(
            advantage(
                "dr_grpo",
                "compute_grpo_outcome_advantage",
                more={"norm_adv_by_std_in_grpo": False},
            )
        ),
        "rloo": compared(advantage("rloo", "compute_rloo_outcome_advantage")),
        "reinforce_pp": compared(
            advantage(
                "reinforce_pp",
                "compute_reinforce_plus_plus_outcome_advantage",
                more={"config": SimpleNamespace(gamma=1.0)},
                **whitened,
            )
        ),
        "reinforce_pp_baseline": compared(
            advantage(
                "reinforce_pp_baseline",
                "compute_reinforce_plus_plus_baseline_outcome_advantage",
                **whitened,
            )
        ),
        # Any epsilon: their second one is 1e-8, and ours is that of the groups.
        "gdpo": compared(
            advantage(
                "gdpo", "compute_gdpo_outcome_advantage", more={"epsilon": 1e-12}, epsilon=1e-12
            )
        ),
        "pass_at_k": compared(
            advantage("pass_at_k", "compute_grpo_passk_outcome_advantage", more=passk), "epsilon"
        ),
        "kl k1": compared(kl("k1", "k1")),
        "kl k2": compared(kl("k2", "k2")),
        "kl k3": compared(kl("k3", "k3"), "kl_cap"),
        "kl absolute": compared(kl("absolute", "abs")),
    }
