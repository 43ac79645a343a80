"""Steps with every algorithm, and steps on the batches of a plain synchronous loop."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import deepspeed
import numpy as np
import torch

from configs.advantages import ADVANTAGES, AGGREGATIONS, AggregationConfig, CriticConfig
from configs.algorithm_schema import KLConfig, StreamConfig
from configs.choices import KLPlace, Proximal
from configs.corrections import CORRECTIONS
from configs.losses import LOSSES, TeacherKl
from tests.support.trainer.token_batch import algorithm as load
from tests.support.zero3.batches import with_common_beginning, with_graded_rewards
from tests.support.zero3.scene import Scene, recorded
from trainer_pool.algorithms.registry import Algorithm

SYNCHRONOUS_RATE = 1e-3
GRPO = load("tis_token")
GSPO = load(
    "tis_geometric",
    loss="gspo",
    # Wider than usual: whether a ratio beside a bound is clipped would hang on rounding.
    clip_low=0.04,
    clip_high=0.05,
    aggregation="sequence_mean_token_mean",
)


def cases() -> dict[str, Algorithm]:
    """Every loss, aggregation, correction and advantage of ours in some combination."""
    rollout, near = Proximal.rollout, {"weight": 0.1, "estimator": "k2"}
    by_answer = AggregationConfig(kind="sequence_mean_token_mean")
    teacher = StreamConfig(loss=TeacherKl(kind="teacher_kl"), aggregation=by_answer)
    streams = {"teacher": teacher, "good": StreamConfig(weight=0.3, min_reward=0.5)}
    chosen: list[tuple[str, tuple[str, ...], str, dict[str, Any]]] = [
        ("ppo", ("opsm",), "grpo", {"proximal": rollout}),
        ("cispo", (), "dr_grpo", {"proximal": rollout}),
        ("sapo", (), "rloo", {"proximal": rollout}),
        ("gspo", (), "reinforce_pp", {"proximal": rollout, "clip_low": 0.05, "clip_high": 0.05}),
        ("reinforce", ("geometric_mask",), "reinforce_pp_baseline", {}),
        ("importance_sampling", ("product_mask",), "batch_std", {}),
        ("dppo_tv", ("veto",), "max_rl", {}),
        ("dppo_kl", ("m2po",), "gdpo", {}),
        ("supervised", (), "grpo", {"kl": KLConfig(**near)}),
        ("ppo", ("tis_token",), "pass_at_k", {"kl": KLConfig(**near, where=KLPlace.reward)}),
        ("ppo", ("tis_sequence", "kpop"), "gae", {"critic": CriticConfig()}),
        ("ppo", ("tis_geometric",), "grpo", {"proximal": Proximal.log_linear}),
        ("ppo", ("icepop",), "grpo", {"policy_weight": 0.5, "streams": streams}),
    ]
    # So wide that some of each group are kept: rollouts of this test are those of no policy.
    bounds = {
        "geometric_low": 0.5,
        "geometric_high": 2.0,
        "product_high": 1e3,
        "veto_below": 0.4,
    }
    made: dict[str, Algorithm] = {}
    for case, aggregation in zip(chosen, itertools.cycle(AGGREGATIONS), strict=False):
        loss, corrections, advantage, settings = case
        length = {"aggregation_length": 30} if aggregation.endswith("_norm") else {}
        parts = {"part_weights": {"right": 1.0}} if advantage == "gdpo" else {}
        made[" ".join((loss, aggregation, *corrections, advantage))] = load(
            *corrections,
            loss=loss,
            aggregation=aggregation,
            advantage=ADVANTAGES[advantage](kind=advantage, **parts),
            bounds=bounds | {"normalize": "tis_sequence" in corrections},
            **length,
            **settings,
        )
    used = {word for name in made for word in name.split()}
    assert used == {*LOSSES, *AGGREGATIONS, *CORRECTIONS, *ADVANTAGES}
    return made


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
    scene.policy.hold_reference(str(scene.folder / "other_of_one_layer"), offload=False)
    for name, algorithm in cases().items():

        def note(name: str = name) -> None:
            update = sum(key.startswith(f"{name}:") for key in gradients)
            parts = [
                deepspeed.utils.safe_get_full_grad(parameter).flatten()
                for parameter in scene.policy._deepspeed.module.parameters()
            ]
            gradients[f"{name}:{update}"] = torch.cat(parts).double().numpy()

        stats = scene.step(
            batch,
            config=config,
            algorithm=algorithm,
            learning_rate=0.0,
            before_update=note,
        )
        scene.results[name] = recorded(stats)
    if scene.ranks.rank == 0:
        scene.output.mkdir(exist_ok=True)
        np.savez(scene.output / "gradients.npz", **gradients)


def synchronous(scene: Scene, algorithm: Algorithm, num_minibatches: int) -> None:
    """Train on the batches that the plain loop left in the folder."""
    config = replace(scene.config, num_minibatches=num_minibatches)
    steps: list[dict[str, object]] = []
    while list(scene.folder.glob(f"batch-{len(steps)}-*.group")):
        stats = scene.step(
            scene.batch(len(steps)),
            config=config,
            algorithm=algorithm,
            learning_rate=SYNCHRONOUS_RATE,
        )
        steps.append(recorded(stats))
    scene.results["steps"] = steps
    scene.write()
