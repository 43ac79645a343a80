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
    GROUP,
    LENGTH,
    LONG,
    NARROW,
    PARTS,
    ROWS,
    WIDE,
    Batch,
    Pair,
    advantages_of,
    kl_of,
    loss_of,
    overlong_of,
    with_gradient,
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


def trl_pairs() -> dict[str, Pair]:
    rewards = importlib.import_module("trl.rewards")
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer

    def theirs(batch: Batch, loss_type: str, **settings: Any) -> Tensor:
        """`GRPOTrainer._compute_loss` of one process, given the log-probabilities."""
        beta = settings.pop("beta", 0.0)
        opsm = settings.pop("opsm", None)
        level = settings.pop("level", "token")
        low, high = settings.pop("low", 0.2), settings.pop("high", 0.28)
        weights = settings.pop("weights", None)
        args = {
            "delta": None,
            "use_bias_correction_kl": False,
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
            "steps_per_generation": 1,
            **settings,
        }
        itself = SimpleNamespace(
            args=SimpleNamespace(**args),
            loss_type=loss_type,
            beta=beta,
            importance_sampling_level=level,
            epsilon_low=low,
            epsilon_high=high,
            off_policy_mask_threshold=opsm,
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

    def pair_of(loss_type: str, given: dict[str, Any], *kinds: str, **settings: Any) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            found = theirs(batch, loss_type, **given)
            ours = loss_of(batch, kinds, **settings)
            return with_gradient(ours, batch), with_gradient(found, batch)

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

    def corrected(mode: str, low: float | None, high: float, *kinds: str, **settings: Any) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            given = scored(
                batch,
                vllm_importance_sampling_mode=mode,
                vllm_importance_sampling_clip_min=low,
                vllm_importance_sampling_clip_max=high,
            )
            found = theirs(batch, "dapo", weights=given["importance_sampling_ratio"])
            ours = loss_of(batch, kinds, **WIDE, **settings)
            return with_gradient(ours, batch), with_gradient(found, batch)

        return pair

    def advantage(kind: str, **theirs: Any) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            # They normalize over answers, we over tokens: here every answer has one.
            is_first = (torch.arange(LENGTH) == 0).double().expand(ROWS, -1)
            batch = replace(batch, mask=is_first)
            return advantages_of(batch, kind, epsilon=1e-4), scored(batch, **theirs)["advantages"]

        return pair

    def overlong(batch: Batch) -> tuple[Tensor, Tensor]:
        function = rewards.get_soft_overlong_punishment(9, 4)
        found = function([[0] * int(count) for count in batch.num_tokens])
        return overlong_of(batch, 5, 9), torch.tensor(found, dtype=torch.float64)

    def held(estimator: str, unbiased: bool) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            # Its ratio is to the policy at the start of the step, ours to the rollout policy.
            batch = replace(batch, rollout=batch.proximal)
            found = theirs(batch, "dapo", beta=0.1, use_bias_correction_kl=unbiased)
            ours = loss_of(batch, **WIDE)
            near = (kl_of(batch, estimator) * batch.mask).sum() / batch.mask.sum()
            return with_gradient(ours + 0.1 * near, batch), with_gradient(found, batch)

        return pair

    answers = "sequence_mean_token_mean"
    return {
        "dapo": pair_of("dapo", {}, **WIDE),
        "grpo": pair_of("grpo", {}, aggregation=answers, **WIDE),
        "bnpo": pair_of("bnpo", {}, **WIDE),
        "dr_grpo": pair_of("dr_grpo", {}, aggregation="sequence_mean_token_sum_norm", **WIDE),
        "two-sided clipping (dual clip)": pair_of("dapo", {"delta": 3.0}, dual_clip=3.0, **WIDE),
        "gspo": pair_of(
            "grpo",
            {"level": "sequence", "low": 0.04, "high": 0.05},
            loss="gspo",
            aggregation=answers,
            **NARROW,
        ),
        "cispo": pair_of("cispo", {"high": 1.28}, loss="cispo", clip_low=1.0, clip_high=0.28),
        "sapo": pair_of("sapo", {}, loss="sapo", aggregation=answers),
        "opsm": pair_of("dapo", {"opsm": 0.1}, "opsm", **WIDE),
        "tis_token": corrected("token_truncate", None, 2.0, "tis_token"),
        "tis_sequence": corrected("sequence_truncate", None, 2.0, "tis_sequence"),
        "icepop": corrected("token_mask", 0.5, 5.0, "icepop"),
        "product_mask with weights": corrected(
            "sequence_mask", 0.5, 2.0, "product_mask", "tis_sequence", correction_tis_cap=1e9
        ),
        "grpo advantages": advantage("grpo", **ONE_REWARD, scale_rewards="group"),
        "dr_grpo advantages": advantage("dr_grpo", **ONE_REWARD, scale_rewards="none"),
        "batch_std": advantage("batch_std", **ONE_REWARD, scale_rewards="batch"),
        "gdpo": advantage("gdpo", multi_objective_aggregation="normalize_then_sum"),
        "overlong_penalty": overlong,
        "kl k3 in the loss": held("k3", False),
        "kl unbiased in the loss": held("unbiased", True),
    }


class _Anything:
    """Accepts the metrics that TRL records, which are not read."""

    def __getitem__(self, key: str) -> Any:
        return self

    def append(self, value: object) -> None:
        pass
