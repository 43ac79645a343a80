"""Compares losses, corrections, advantages, aggregations and KL estimators with those of TRL, verl
and OpenRLHF, at equal settings.

make bench-parity       # installs the three, without what they depend on, into build/parity
python benchmarks/parity.py --rivals build/parity

The batches are random, in float64, with masks in the middle of answers, tokens of older policies
and large ratios. Compared are a loss and its gradient by log-probability, or advantages; the figure
is the largest difference. Settings that differ from system to system (ddof, epsilon, clamps) are
made equal here, not in our functions; docs/algorithms.md lists what cannot be.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# This folder, which comes first, would hide the package `buffer` behind `buffer.py`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.report import Report
from configs.algorithm_schema import (
    REFERENCE_COLUMN,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
)
from trainer_pool.algorithms.advantages import AdvantageInputs
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.registry import FAMILIES, Algorithm
from trainer_pool.algorithms.types import BatchStatistics, LossInputs

BOUND = 1e-5
BATCHES, ROWS, LENGTH = 20, 6, 11
LONG = 40
"""`aggregation_length`, and its namesakes."""


# A batch, and our functions of it -----------------------------------------------------------------


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Batch:
    """[B, T] each; values of tokens whose mask is 0 mean nothing."""

    trainer: Tensor
    proximal: Tensor
    rollout: Tensor
    reference: Tensor
    mask: Tensor
    advantages: Tensor
    """The same for all tokens of an answer."""
    rewards: Tensor
    """[B]"""
    groups: np.ndarray

    @property
    def num_tokens(self) -> Tensor:
        return self.mask.sum(1)


def random_batch(seed: int) -> Batch:
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    rollout = -normal(ROWS, LENGTH).abs() - 0.05
    proximal = (rollout + 0.4 * normal(ROWS, LENGTH)).clamp(max=-0.01)
    trainer = (proximal + 0.3 * normal(ROWS, LENGTH)).clamp(max=-0.01)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=dice)
    mask = (torch.arange(LENGTH) < lengths) & (torch.arange(LENGTH) != 1)  # a tool's word at 1
    return Batch(
        trainer=trainer.requires_grad_(),
        proximal=proximal,
        rollout=rollout,
        reference=(trainer.detach() + 0.5 * normal(ROWS, LENGTH)).clamp(max=-0.01),
        mask=mask.double(),
        advantages=normal(ROWS, 1).expand(-1, LENGTH).contiguous(),
        rewards=torch.randint(0, 4, (ROWS,), generator=dice).double(),
        groups=np.array([0, 0, 0, 1, 1, 1]),
    )


def inputs_of(batch: Batch, weights: Tensor, algorithm: Algorithm) -> LossInputs:
    is_real = batch.mask.flatten() != 0

    def real(values: Tensor) -> Tensor:
        return values.flatten()[is_real]

    return LossInputs(
        trainer_logprobs_N=real(batch.trainer),
        proximal_logprobs_N=algorithm.proximal(
            real(batch.proximal), real(batch.rollout), torch.ones(int(is_real.sum()))
        ),
        rollout_logprobs_N=real(batch.rollout),
        advantages_N=real(batch.advantages),
        weights_N=real(weights.unsqueeze(1).expand_as(batch.mask)),
        mask_N=torch.ones(int(is_real.sum()), dtype=torch.bool),
        staleness_N=torch.ones(int(is_real.sum()), dtype=torch.int64),
        segment_ids_N=real(torch.arange(ROWS).unsqueeze(1).expand_as(batch.mask)),
        num_segments=ROWS,
        columns={REFERENCE_COLUMN: real(batch.reference)},
    )


def loss_of(batch: Batch, corrections: Sequence[str] = (), **settings: Any) -> Tensor:
    """Our loss; `settings` of the correction are prefixed with `correction_`."""
    own = {k.removeprefix("correction_"): v for k, v in settings.items() if k[:11] == "correction_"}
    rest = {k: v for k, v in settings.items() if k[:11] != "correction_"}
    config = AlgorithmConfig(
        correction=CorrectionConfig(kinds=[*corrections], **own),
        aggregation_length=LONG,
        **rest,
    )
    algorithm = Algorithm.load(config)
    found = algorithm.aggregate(
        AggregationInputs(
            num_tokens_R=batch.num_tokens.numpy().astype(np.int64),
            shares_R=np.ones(ROWS),
            groups_R=batch.groups,
        )
    )
    inputs = inputs_of(batch, torch.from_numpy(found.weights_R), algorithm)
    statistics = BatchStatistics()
    if algorithm.needs_batch:
        statistics = algorithm.statistics([inputs], lambda sums: sums)
    inputs = replace(inputs, batch=statistics)
    return algorithm.objective(inputs, found.denominator or 1.0).loss


def advantages_of(batch: Batch, kind: str, **settings: Any) -> Tensor:
    """[B] our advantages."""
    config = AlgorithmConfig(advantage=AdvantageConfig(kind=kind, **settings))
    inputs = AdvantageInputs(
        rewards_E=batch.rewards.numpy(),
        groups_E=batch.groups,
        num_tokens_E=batch.num_tokens.numpy(),
        trajectories=[SimpleNamespace(num_tokens=1)] * ROWS,  # type: ignore[list-item]
        episodes=range(ROWS),
    )
    return torch.tensor(
        np.concatenate(Algorithm.load(config).advantages(inputs)), dtype=torch.float64
    )


def kl_of(batch: Batch, name: str) -> Tensor:
    config = AlgorithmConfig()
    function = FAMILIES["algorithm.kl.estimator"][name]
    values_N: Tensor = function(inputs_of(batch, torch.ones(ROWS), Algorithm.load(config)), config)
    return torch.zeros_like(batch.mask).masked_scatter(batch.mask != 0, values_N)


def with_gradient(loss: Tensor, batch: Batch) -> Tensor:
    """[1 + B T] the loss and its gradient."""
    (gradient,) = torch.autograd.grad(loss, batch.trainer)
    return torch.cat([loss.detach().view(1), gradient.flatten()])


def gradient_of(loss: Tensor, batch: Batch) -> Tensor:
    return with_gradient(loss, batch)[1:]


Pair = Callable[[Batch], tuple[Tensor, Tensor]]


def difference(pair: Pair) -> float:
    """The largest over all batches, relative to the largest of their values if that is above 1."""
    worst = 0.0
    for seed in range(BATCHES):
        ours, theirs = (values.detach() for values in pair(random_batch(seed)))
        scale = theirs.abs().max().clamp(min=1.0)
        worst = max(worst, float((ours - theirs).abs().max() / scale))
    return worst


# verl ---------------------------------------------------------------------------------------------

VERL_MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "sequence_mean_token_mean": "seq-mean-token-mean",
}
WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
NARROW: dict[str, Any] = {"clip_low": 0.04, "clip_high": 0.05}


def verl_pairs() -> dict[str, Pair]:
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
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
            arguments = {
                "token_level_rewards": rewards,
                "response_mask": batch.mask,
                **(more or {}),
            }
            if kind != "reinforce_pp":
                arguments["index"] = batch.groups
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
        "pass_at_k": advantage("pass_at_k", "compute_grpo_passk_outcome_advantage", more=passk),
        "kl k1": kl("k1", "k1"),
        "kl k2": kl("k2", "k2"),
        "kl k3": kl("k3", "k3"),
        "kl absolute": kl("absolute", "abs"),
    }


# OpenRLHF -----------------------------------------------------------------------------------------


def openrlhf_pairs(folder: Path) -> dict[str, Pair]:
    # Its package imports flash-attn, which has no build for a CPU; its losses do not.
    for name in ("openrlhf", "openrlhf.models"):
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    losses = importlib.import_module("openrlhf.models.loss")
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
        "kl k1": kl("k1"),
        "kl k2": kl("k2"),
        "kl k3": kl("k3"),
    }


# TRL ----------------------------------------------------------------------------------------------


def trl_pairs() -> dict[str, Pair]:
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

    def corrected(batch: Batch) -> tuple[Tensor, Tensor]:
        weights = (batch.proximal - batch.rollout).exp().clamp(max=2.0)
        found = theirs(batch, "dapo", weights=weights)
        return with_gradient(loss_of(batch, ["tis_token"], **WIDE), batch), with_gradient(
            found, batch
        )

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
        "tis_token": corrected,
        "kl k3 in the loss": held("k3", False),
        "kl unbiased in the loss": held("unbiased", True),
    }


class _Anything:
    """Accepts the metrics that TRL records, which are not read."""

    def __getitem__(self, key: str) -> Any:
        return self

    def append(self, value: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rivals", type=Path, help="folder in which the three are installed")
    rivals = parser.parse_args().rivals
    if rivals is None or not (rivals / "verl").is_dir():
        parser.error(
            f"--rivals={rivals}: they are not installed there; `make bench-parity` does it"
        )
    sys.path.append(str(rivals.resolve()))  # last: what is installed here comes first
    report = Report("Parity")
    worst, count = 0.0, 0
    table = Table(title="Largest difference")
    for column in ("system", "function", "difference"):
        table.add_column(column)
    systems = {
        "verl": verl_pairs(),
        "OpenRLHF": openrlhf_pairs(rivals.resolve()),
        "TRL": trl_pairs(),
    }
    for system, pairs in systems.items():
        for name, pair in pairs.items():
            found = difference(pair)
            table.add_row(
                system, name, f"{found:.1e}" if found <= BOUND else f"[red]{found:.1e}[/red]"
            )
            worst, count = max(worst, found), count + 1
    report.show(table)
    report.target("max_difference", worst, "<=", BOUND, "of a loss, a gradient or an advantage")
    report.figure("functions", count, "compared")
    report.close()
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
