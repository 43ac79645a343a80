"""Comparisons with OpenRLHF."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.algorithms.batch import (
    CLIP,
    GROUP,
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


def openrlhf_comparisons(folder: Path) -> dict[str, Comparison]:
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

    def pair_of(
        kinds: Sequence[str] = (),
        *,
        level: str = "off",
        thresholds: Sequence[str | float] = (0.0, 0.0),
        more: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> Pair:
        """`thresholds`: numbers, or names of bounds."""

        def pair(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
            if settings.get("loss") == "gspo":
                batch = with_wild_tokens(batch)
            function = losses.PolicyLoss(
                clip_eps_low=theirs["clip_low"],
                clip_eps_high=theirs["clip_high"],
                dual_clip=theirs.get("dual_clip"),
                is_correction_level=level,
                is_correction_threshold=tuple(
                    theirs[one] if isinstance(one, str) else one for one in thresholds
                ),
                **more,
            )
            found, *_ = function(
                batch.trainer, batch.proximal, batch.advantages, batch.mask, batch.rollout
            )
            own = loss_of(batch, kinds, **settings, **ours)
            return with_gradient(own, batch), with_gradient(found, batch)

        return pair

    def kl(name: str) -> Comparison:
        def pair(batch: Batch, _: Values, ours: Values) -> tuple[Tensor, Tensor]:
            # Theirs is in float32.
            found = utils.compute_approx_kl(batch.trainer, batch.reference, kl_estimator=name)
            found = (found.double() * batch.mask).sum()
            own = kl_of(batch, name, **ours).sum()
            return with_gradient(own, batch), with_gradient(found, batch)

        return compared(pair, "kl_cap")

    def advantage(kind: str, estimator: str, **settings: Any) -> Comparison:
        def pair(batch: Batch, *_: Values) -> tuple[Tensor, Tensor]:
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

        return compared(pair)

    def overlong(batch: Batch, theirs: Values, ours: Values) -> tuple[Tensor, Tensor]:
        experience = SimpleNamespace(
            response_length=batch.num_tokens, rewards=torch.zeros_like(batch.rewards)
        )
        end = theirs["overlong_end"]
        lengths.apply_overlong_penalty([experience], end, end - theirs["overlong_start"])
        return overlong_of(batch, **ours), experience.rewards

    def supervised(batch: Batch, *_: Values) -> tuple[Tensor, Tensor]:
        found = losses.SFTLoss()(batch.trainer, batch.mask)
        return with_gradient(loss_of(batch, loss="supervised"), batch), with_gradient(found, batch)

    answers = {"aggregation": "sequence_mean_token_mean"}
    ice = ("correction_icepop_low", "correction_icepop_high")
    geometric = ("correction_geometric_low", "correction_geometric_high")
    cap = "correction_tis_cap"
    return {
        "ppo": compared(pair_of(), *CLIP),
        "ppo, dual clip": compared(pair_of(), *CLIP, "dual_clip"),
        "ppo, mean of answers": compared(
            pair_of(more={"token_level_loss": False}, **answers), *CLIP
        ),
        "gspo": compared(pair_of(more={"policy_loss_type": "gspo"}, loss="gspo", **answers), *CLIP),
        "icepop": compared(pair_of(["icepop"], level="token", thresholds=ice), *CLIP, *ice),
        "tis_token": compared(
            pair_of(
                ["tis_token"],
                level="token",
                thresholds=(0.0, cap),
                more={"is_correction_mode": "clip"},
            ),
            *CLIP,
            cap,
        ),
        "geometric_mask with weights": compared(
            pair_of(
                ["geometric_mask", "tis_token"],
                level="seq",
                thresholds=geometric,
                correction_tis_cap=1e9,
            ),
            *CLIP,
            *geometric,
        ),
        "supervised": compared(supervised),
        "grpo": advantage("grpo", "group_norm", epsilon=1e-9),
        "dr_grpo": advantage("dr_grpo", "dr_grpo"),
        "rloo": advantage("rloo", "rloo"),
        "reinforce_pp": advantage("reinforce_pp", "reinforce", ddof=0, epsilon=0.0),
        "reinforce_pp_baseline": advantage(
            "reinforce_pp_baseline", "reinforce_baseline", ddof=0, epsilon=0.0
        ),
        "overlong_penalty": compared(overlong, "overlong_start", "overlong_end"),
        "kl k1": kl("k1"),
        "kl k2": kl("k2"),
        "kl k3": kl("k3"),
    }
