"""Steps with every algorithm, and steps on the batches of a plain synchronous loop."""

from __future__ import annotations

from dataclasses import replace

import deepspeed
import numpy as np
import torch

from configs.algorithm_schema import (
    ADVANTAGES,
    AGGREGATIONS,
    MASKS,
    WEIGHTS,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    StreamConfig,
)
from configs.choices import KLPlace, Proximal
from tests.support.zero3.batches import with_common_beginning, with_graded_rewards
from tests.support.zero3.scene import Scene, recorded
from trainer_pool.algorithms.registry import Algorithm

SYNCHRONOUS_RATE = 1e-3
GSPO = AlgorithmConfig(
    loss="gspo",
    # Wider than usual: whether a ratio beside a bound is clipped would hang on rounding.
    clip_low=0.04,
    clip_high=0.05,
    aggregation="sequence_mean_token_mean",
    correction=CorrectionConfig(kinds=["tis_geometric"]),
)


def cases() -> dict[str, AlgorithmConfig]:
    """Every loss, aggregation, correction and advantage of ours in some combination."""
    rollout, none = Proximal.rollout, CorrectionConfig(kinds=[])
    chosen = {
        loss: AlgorithmConfig(loss=loss, correction=none, proximal=proximal)
        for loss, proximal in (
            ("ppo", rollout),
            ("cispo", rollout),
            ("sapo", rollout),
            ("reinforce", Proximal.recomputed),
            ("importance_sampling", Proximal.recomputed),
            ("dppo_tv", Proximal.recomputed),
            ("dppo_kl", Proximal.recomputed),
            ("supervised", Proximal.recomputed),
        )
    }
    chosen["gspo"] = AlgorithmConfig(
        loss="gspo", clip_low=0.05, clip_high=0.05, proximal=rollout, correction=none
    )
    chosen["log_linear"] = AlgorithmConfig(proximal=Proximal.log_linear)
    for kind in (*WEIGHTS, *MASKS):
        # So wide that some of each group are kept: rollouts of this test are those of no policy.
        bounds = CorrectionConfig(
            kinds=[kind],
            normalize=kind == "tis_sequence",
            geometric_low=0.5,
            geometric_high=2.0,
            product_high=1e3,
            veto_below=0.4,
        )
        chosen[kind] = AlgorithmConfig(correction=bounds)
    for aggregation in AGGREGATIONS:
        chosen[aggregation] = AlgorithmConfig(aggregation=aggregation, aggregation_length=30)
    near = {"weight": 0.1, "estimator": "k2"}
    chosen["kl_in_loss"] = AlgorithmConfig(kl=KLConfig(**near))
    chosen["kl_in_reward"] = AlgorithmConfig(kl=KLConfig(**near, where=KLPlace.reward))
    chosen["streams"] = AlgorithmConfig(
        policy_weight=0.5,
        streams={
            "teacher": StreamConfig(loss="teacher_kl", aggregation="sequence_mean_token_mean"),
            "good": StreamConfig(weight=0.3, min_reward=0.5),
        },
    )
    for kind in ADVANTAGES:
        parts = {"right": 1.0} if kind == "gdpo" else {}
        chosen[kind] = AlgorithmConfig(advantage=AdvantageConfig(kind=kind, part_weights=parts))
    return chosen


def algorithms(scene: Scene) -> None:
    """The gradient of each update of a step with each algorithm; at a learning rate of 0 one
    does not change the next. One rank has a single micro-batch, several have several."""
    config = replace(
        scene.config,
        groups_per_step=8,  # of which the batch has four
        num_minibatches=2,
        micro_batch_tokens=2000 if scene.ranks.num_ranks == 1 else 97,
        share_prefixes=scene.ranks.num_ranks == 4,
    )
    batch = scene.batch(1)
    groups = (with_graded_rewards(with_common_beginning(group)) for group in batch.groups)
    batch = replace(batch, groups=tuple(groups))
    gradients: dict[str, np.ndarray] = {}
    scene.engine.hold_reference(str(scene.folder / "other"), offload=False)
    for name, algorithm in cases().items():

        def note(name: str = name) -> None:
            update = sum(key.startswith(f"{name}:") for key in gradients)
            parts = [
                deepspeed.utils.safe_get_full_grad(parameter).flatten()
                for parameter in scene.engine._engine.module.parameters()
            ]
            gradients[f"{name}:{update}"] = torch.cat(parts).double().numpy()

        stats = scene.step(
            batch,
            config=config,
            algorithm=Algorithm.load(algorithm),
            learning_rate=0.0,
            before_update=note,
        )
        scene.results[name] = recorded(stats)
    if scene.ranks.rank == 0:
        scene.output.mkdir(exist_ok=True)
        np.savez(scene.output / "gradients.npz", **gradients)


def synchronous(scene: Scene, algorithm: AlgorithmConfig, num_minibatches: int) -> None:
    """Train on the batches that the plain loop left in the folder."""
    config = replace(scene.config, num_minibatches=num_minibatches)
    chosen, steps = Algorithm.load(algorithm), []
    while list(scene.folder.glob(f"batch-{len(steps)}-*.group")):
        stats = scene.step(
            scene.batch(len(steps)),
            config=config,
            algorithm=chosen,
            learning_rate=SYNCHRONOUS_RATE,
        )
        steps.append(recorded(stats))
    scene.results["steps"] = steps
    scene.write()
