"""Comparisons with TRL."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.algorithms.batch import (
    CLIP,
    GROUP,
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
    kl_of,
    loss_of,
    overlong_of,
    with_gradient,
    with_wild_tokens,
)

LOGS = ("prompt", "completion", "advantages")
ONE_REWARD = {"reward_weights": torch.tensor([1.0, 0.0], dtype=torch.float64)}
SCORING = {
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "reward_weights": torch.tensor([*PARTS.values()], dtype=torch.float64),
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 2.0,
}


def trl_comparisons() -> dict[str, Comparison]:
    rewards = importlib.import_module("trl.rewards")
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer

    def loss(
        batch: Batch,
        loss_type: str,
        given: Values,
        *,
        level: str = "token",
        beta: float = 0.0,
        is_unbiased: bool = False,
        weights: Tensor | None = None,
    ) -> Tensor:
        """`GRPOTrainer._compute_loss` of one process, given the log-probabilities."""
        high = given.get("clip_high", 0.0)
        itself = SimpleNamespace(
            args=SimpleNamespace(
                delta=given.get("dual_clip"),
                use_bias_correction_kl=is_unbiased,
                sapo_temperature_pos=given.get("sapo_good"),
                sapo_temperature_neg=given.get("sapo_bad"),
                steps_per_generation=1,
            ),
            loss_type=loss_type,
            beta=beta,
            importance_sampling_level=level,
            epsilon_low=given.get("clip_low"),
            epsilon_high=1 + high if loss_type == "cispo" else high,
            off_policy_mask_threshold=given.get("correction_opsm_limit"),
            get_off_policy_mask=trainer.get_off_policy_mask,
            top_entropy_quantile=1.0,
            aux_loss_enabled=False,
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=weights is not None,
            max_completion_length=LONG,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            _entropy_bonus_enabled=False,
            _metrics=_Anything(),
            accelerator=SimpleNamespace(
                num_processes=1,
                gather=lambda values: values,
                reduce=lambda values, reduction: values,
            ),
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                batch.trainer,
                torch.zeros_like(batch.trainer),
                None,
            ),
        )
        ids = torch.zeros(ROWS, 1, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": ids,
            "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
            "completion_mask": batch.mask,
            "advantages": batch.advantages[:, 0],
            "old_per_token_logps": batch.proximal,
            "sampling_per_token_logps": batch.rollout,
            "ref_per_token_logps": batch.reference,
            "num_items_in_batch": batch.mask.sum(),
            "importance_sampling_ratio": weights,
        }
        found: Tensor = trainer._compute_loss(itself, None, inputs)
        return found

    def pair_of(loss_type: str, *kinds: str, level: str = "token", **settings: Any) -> Pair:
        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            if level == "sequence":
                batch = with_wild_tokens(batch)
            found = loss(batch, loss_type, theirs, level=level)
            own = loss_of(batch, kinds, **settings, **ours)
            return with_gradient(own, batch), with_gradient(found, batch)

        return pair

    def scored(batch: Batch, **settings: Any) -> dict[str, Tensor]:
        """`GRPOTrainer._generate_and_score_completions` of one process, given the answers."""
        ids = [[0] * LENGTH] * ROWS
        rollout = [[*row] for row in batch.rollout.numpy()]  # not Python's floats: torch.float64
        answers: tuple[Any, ...] = (
            [[0]] * ROWS,
            ids,
            batch.mask.long().tolist(),
            [""] * ROWS,
            rollout,
            {},
            None,
            None,
        )
        itself = SimpleNamespace(
            accelerator=SimpleNamespace(
                device=torch.device("cpu"), process_index=0, gather=lambda values: values
            ),
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            args=SimpleNamespace(
                per_device_train_batch_size=ROWS,
                steps_per_generation=1,
                gradient_accumulation_steps=1,
                gradient_checkpointing_kwargs=None,
            ),
            environment_factories=None,
            environments=None,
            tools=None,
            pad_to_multiple_of=None,
            mask_truncated_completions=False,
            num_iterations=1,
            num_generations=GROUP,
            beta=0.0,
            log_multimodal=False,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            reward_funcs=[*PARTS],
            reward_func_names=[*PARTS],
            _tokenizer=SimpleNamespace(pad_token_id=0),
            _generate=lambda prompts: answers,
            _calculate_rewards=lambda *_: torch.stack([getattr(batch, p) for p in PARTS], 1),
            _get_per_token_logps_and_entropies=lambda *_, **__: (batch.proximal, None, None),
            _metrics={"train": defaultdict(list)},
            _logs={"rewards": defaultdict(list), **{name: [] for name in LOGS}},
            _pending_extra_logs={},
            _pending_metrics={},
            **{**SCORING, **settings},
        )
        found: dict[str, Tensor] = trainer._generate_and_score_completions(
            itself, [{"prompt": ""}] * ROWS
        )
        return found

    def corrected(
        mode: str, low: str | None, high: str, *kinds: str, **settings: Any
    ) -> Comparison:
        """`low`, `high`: names of the bounds of its weights."""

        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            given = scored(
                batch,
                vllm_importance_sampling_mode=mode,
                vllm_importance_sampling_clip_min=low and theirs[low],
                vllm_importance_sampling_clip_max=theirs[high],
            )
            found = loss(batch, "dapo", theirs, weights=given["importance_sampling_ratio"])
            own = loss_of(batch, kinds, **settings, **ours)
            return with_gradient(own, batch), with_gradient(found, batch)

        return compared(pair, *CLIP, *filter(None, (low, high)))

    def advantage(kind: str, **given: Any) -> Comparison:
        def pair(batch: Batch, *_: Values) -> tuple[Tensor, Tensor]:
            # They normalize over answers, we over tokens: here every answer has one.
            is_first = (torch.arange(LENGTH) == 0).double().expand(ROWS, -1)
            batch = replace(batch, mask=is_first)
            return advantages_of(batch, kind, epsilon=1e-4), scored(batch, **given)["advantages"]

        return compared(pair)

    def overlong(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        end = theirs["overlong_end"]
        function = rewards.get_soft_overlong_punishment(end, end - theirs["overlong_start"])
        found = function([[0] * int(count) for count in batch.num_tokens])
        return overlong_of(batch, **ours), torch.tensor(found, dtype=torch.float64)

    def held(estimator: str, is_unbiased: bool) -> Comparison:
        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            # Its ratio is to the policy at the start of the step, ours to the rollout policy.
            batch = replace(batch, rollout=batch.proximal)
            found = loss(batch, "dapo", theirs, beta=0.1, is_unbiased=is_unbiased)
            near = (kl_of(batch, estimator) * batch.mask).sum() / batch.mask.sum()
            own = loss_of(batch, **ours) + 0.1 * near
            return with_gradient(own, batch), with_gradient(found, batch)

        return compared(pair, *CLIP)

    answers = {"aggregation": "sequence_mean_token_mean"}
    by_length = {"aggregation": "sequence_mean_token_sum_norm"}
    ice = ("correction_icepop_low", "correction_icepop_high")
    product = ("correction_product_low", "correction_product_high")
    cap = "correction_tis_cap"
    return {
        "dapo": compared(pair_of("dapo"), *CLIP),
        "grpo": compared(pair_of("grpo", **answers), *CLIP),
        "bnpo": compared(pair_of("bnpo"), *CLIP),
        "dr_grpo": compared(pair_of("dr_grpo", **by_length), *CLIP),
        "two-sided clipping (dual clip)": compared(pair_of("dapo"), *CLIP, "dual_clip"),
        "gspo": compared(pair_of("grpo", level="sequence", loss="gspo", **answers), *CLIP),
        "cispo": compared(pair_of("cispo", loss="cispo", clip_low=1.0), "clip_high"),
        "sapo": compared(pair_of("sapo", loss="sapo", **answers), "sapo_good", "sapo_bad"),
        "opsm": compared(pair_of("dapo", "opsm"), *CLIP, "correction_opsm_limit"),
        "tis_token": corrected("token_truncate", None, cap, "tis_token"),
        "tis_sequence": corrected("sequence_truncate", None, cap, "tis_sequence"),
        "icepop": corrected("token_mask", *ice, "icepop"),
        "product_mask with weights": corrected(
            "sequence_mask", *product, "product_mask", "tis_sequence", correction_tis_cap=1e9
        ),
        "grpo advantages": advantage("grpo", **ONE_REWARD, scale_rewards="group"),
        "dr_grpo advantages": advantage("dr_grpo", **ONE_REWARD, scale_rewards="none"),
        "batch_std": advantage("batch_std", **ONE_REWARD, scale_rewards="batch"),
        "gdpo": advantage("gdpo", multi_objective_aggregation="normalize_then_sum"),
        "overlong_penalty": compared(overlong, "overlong_start", "overlong_end"),
        "kl k3 in the loss": held("k3", False),
        "kl unbiased in the loss": held("unbiased", True),
    }


class _Anything:
    """Accepts the metrics that TRL records, which are not read."""

    def __getitem__(self, key: str) -> Any:
        return self

    def append(self, value: object) -> None:
        pass
