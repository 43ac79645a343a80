"""Comparisons with OpenRLHF."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.algorithms.batch import (
    GROUP,
    NARROW,
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


def openrlhf_pairs(folder: Path) -> dict[str, Pair]:
    # Its packages import flash-attn and vLLM, which have no build for a CPU; what is compared here
    # does not.
    for name in ("", ".models", ".utils", ".trainer", ".trainer.ppo_utils", ".trainer.ray"):
        package = ModuleType(f"openrlhf{name}")
        package.__path__ = [str(folder / f"openrlhf{name}".replace(".", "/"))]
        sys.modules[package.__name__] = package
    launcher = ModuleType("openrlhf.trainer.ray.launcher")
    launcher.RayActorGroup = object  # type: ignore[attr-defined]  # only an annotation
    sys.modules[launcher.__name__] = launcher
    losses = importlib.import_module("openrlhf.models.loss")
    making = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    lengths = importlib.import_module("openrlhf.trainer.ppo_utils.length_penalty")
    utils = importlib.import_module("openrlhf.models.utils")

    def pair_of(theirs: dict[str, Any], kinds: Sequence[str] = (), **settings: Any) -> Pair:
        function = losses.PolicyLoss(**theirs)

        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            found, *_ = function(
                batch.trainer, batch.proximal, batch.advantages, batch.mask, batch.rollout
            )
            ours = loss_of(batch, kinds, **settings)
            return with_gradient(ours, batch), with_gradient(found, batch)

        return pair

    def kl(name: str) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            # Theirs is in float32.
            found = utils.compute_approx_kl(batch.trainer, batch.reference, kl_estimator=name)
            found = (found.double() * batch.mask).sum()
            return with_gradient(kl_of(batch, name).sum(), batch), with_gradient(found, batch)

        return pair

    def advantage(kind: str, estimator: str, **settings: Any) -> Pair:
        def pair(batch: Batch) -> tuple[Tensor, Tensor]:
            maker = object.__new__(making.RemoteExperienceMaker)
            maker.advantage_estimator = estimator
            maker.kl_ctl = SimpleNamespace(value=0.0)
            of_advantage = SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=False)
            maker.strategy = SimpleNamespace(
                args=SimpleNamespace(
                    algo=SimpleNamespace(advantage=of_advantage),
                    reward=SimpleNamespace(clip_range=None),
                    rollout=SimpleNamespace(n_samples_per_prompt=GROUP),
                )
            )
            experience = SimpleNamespace(
                rewards=batch.rewards,
                index=[*range(ROWS)],
                action_mask=batch.mask.bool(),
                kl=torch.zeros_like(batch.mask),
                info={},
            )
            maker.compute_advantages_and_returns([experience])
            ours = advantages_of(batch, kind, **settings).unsqueeze(1) * batch.mask
            return ours, experience.advantages * batch.mask

        return pair

    def overlong(batch: Batch) -> tuple[Tensor, Tensor]:
        experience = SimpleNamespace(
            response_length=batch.num_tokens, rewards=torch.zeros_like(batch.rewards)
        )
        lengths.apply_overlong_penalty([experience], 9, 4)
        return overlong_of(batch, 5, 9), experience.rewards

    def supervised(batch: Batch) -> tuple[Tensor, Tensor]:
        found = losses.SFTLoss()(batch.trainer, batch.mask)
        return with_gradient(loss_of(batch, loss="supervised"), batch), with_gradient(found, batch)

    wide = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
    narrow = {"clip_eps_low": 0.04, "clip_eps_high": 0.05}
    ice = {"is_correction_level": "token", "is_correction_threshold": (0.5, 5.0)}
    seq = {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1)}
    bounds = {"correction_geometric_low": 0.9, "correction_geometric_high": 1.1}
    return {
        "ppo": pair_of(wide, **WIDE),
        "ppo, dual clip": pair_of({**wide, "dual_clip": 3.0}, dual_clip=3.0, **WIDE),
        "ppo, mean of answers": pair_of(
            {**wide, "token_level_loss": False}, aggregation="sequence_mean_token_mean", **WIDE
        ),
        "gspo": pair_of(
            {**narrow, "policy_loss_type": "gspo"},
            loss="gspo",
            aggregation="sequence_mean_token_mean",
            **NARROW,
        ),
        "icepop": pair_of({**wide, **ice}, ["icepop"], **WIDE),
        "tis_token": pair_of(
            {**wide, **ice, "is_correction_mode": "clip", "is_correction_threshold": (0.0, 2.0)},
            ["tis_token"],
            **WIDE,
        ),
        "geometric_mask with weights": pair_of(
            {**wide, **seq},
            ["geometric_mask", "tis_token"],
            correction_tis_cap=1e9,
            **bounds,
            **WIDE,
        ),
        "supervised": supervised,
        "grpo": advantage("grpo", "group_norm", epsilon=1e-9),
        "dr_grpo": advantage("dr_grpo", "dr_grpo"),
        "rloo": advantage("rloo", "rloo"),
        "reinforce_pp": advantage("reinforce_pp", "reinforce", ddof=0, epsilon=0.0),
        "reinforce_pp_baseline": advantage(
            "reinforce_pp_baseline", "reinforce_baseline", ddof=0, epsilon=0.0
        ),
        "overlong_penalty": overlong,
        "kl k1": kl("k1"),
        "kl k2": kl("k2"),
        "kl k3": kl("k3"),
    }
