"""An adapter that is trained in place of the weights: as a whole run, resumed, with its base."""

from __future__ import annotations

from dataclasses import replace

import torch

from configs.algorithm_schema import KLConfig
from configs.schema import LoraConfig
from tests.support.trainer.loop_scene import HEAD_TOKENS, head_row
from tests.support.trainer.token_batch import algorithm
from tests.support.zero3.scene import NUM_STEPS, SAVE_AFTER, Scene
from trainer_pool.data.packing import pack

LORA = LoraConfig(rank=4, alpha=8)


def train(scene: Scene) -> None:
    """Its checkpoint, export and scores; the frozen weights stay as they are."""
    scene.store.folder = scene.folder / f"checkpoints-adapter-{scene.ranks.num_ranks}"
    frozen = {name: weight for name, weight in scene.weights().items() if ".lora_" not in name}
    scene.config = replace(scene.config, learning_rate=1e-2)
    scene.algorithm = algorithm(kl=KLConfig(weight=0.1, estimator="k2"))
    scene.policy.hold_reference(None, offload=False)
    scene.train(0, NUM_STEPS)
    after = scene.weights()
    scene.results["frozen_moved"] = [n for n, w in frozen.items() if not torch.equal(w, after[n])]
    scene.results["num_frozen"] = len(frozen)
    scene.results["layout"] = [t.name for t in scene.policy.state.layout().tensors]
    scene.results["served"] = [
        [t.name, list(t.shape)] for t in scene.policy.state.served_layout("float32").tensors
    ]
    scene.results["scores"] = scores(scene)
    with scene.policy.reference():
        scene.results["scores_of_base"] = scores(scene)
    scene.results["scores_again"] = scores(scene)
    finish(scene)


def resume(scene: Scene) -> None:
    """From the checkpoint of two ranks."""
    scene.algorithm = algorithm(kl=KLConfig(weight=0.1, estimator="k2"))
    scene.policy.hold_reference(None, offload=False)
    scene.restore_from(scene.folder / "checkpoints-adapter-2")
    scene.train(SAVE_AFTER, NUM_STEPS)
    finish(scene)


def scores(scene: Scene) -> list[float]:
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    with torch.no_grad():
        found: list[float] = scene.policy.score(batch).logprobs.tolist()
    return found


def finish(scene: Scene) -> None:
    scene.write()
