"""A critic beside the policy: its gradient, four steps with a checkpoint, and those resumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad

from configs.advantages import CriticConfig, Gae
from configs.algorithm_schema import RETURN_COLUMN, VALUE_COLUMN
from tests.support.trainer.loop_scene import HEAD_TOKENS, head_row
from tests.support.trainer.token_batch import algorithm
from tests.support.zero3.scene import NUM_STEPS, SAVE_AFTER, Scene
from trainer_pool.critic import CriticStep, update_critic
from trainer_pool.data.packing import Row, fill_up, pack

CLIP_RANGE, DENOMINATOR, BIAS = 0.2, 50.0, 0.3
ALGORITHM = algorithm(
    "tis_token",
    advantage=Gae(kind="gae", gamma=0.95, gae_lambda=0.9),
    critic=CriticConfig(warmup_steps=1),
)


def row_with_values(number: int) -> Row:
    """A row of the test of the head, with values at the start of a step and returns."""
    row = head_row(number)
    places = np.arange(len(row.tokens), dtype=np.float32) + number
    columns = {VALUE_COLUMN: np.sin(places), RETURN_COLUMN: np.cos(3 * places)}
    return replace(row, columns=columns, weight=1 + number / 4)


def head_weights(size: int) -> torch.Tensor:
    return torch.linspace(-0.2, 0.3, size)


def train(scene: Scene) -> None:
    note_gradient(scene)
    scene.store.folder = scene.folder / f"checkpoints-critic-{scene.ranks.num_ranks}"
    scene.algorithm, before = ALGORITHM, scene.weights()
    moved: list[list[bool]] = []

    def note(step: int) -> None:
        now = scene.weights()
        of_critic = [not torch.equal(now[n], before[n]) for n in now if n.startswith("critic:")]
        others = [not torch.equal(now[n], before[n]) for n in now if not n.startswith("critic:")]
        moved.append([any(others), all(of_critic)])

    scene.train(0, NUM_STEPS, after_step=note)
    scene.results["moved"] = moved
    scene.results["served"] = [t.name for t in scene.policy.state.served_layout("bfloat16").tensors]
    scene.write()


def resume(scene: Scene) -> None:
    scene.restore_from(scene.folder / "checkpoints-critic-2")
    scene.store.folder = scene.folder / "checkpoints-critic-again"
    scene.algorithm = ALGORITHM
    scene.train(SAVE_AFTER, NUM_STEPS)
    scene.write()


def note_gradient(scene: Scene) -> None:
    """The gradient of an update of two passes, in the second of which rank 1 trains nothing."""
    critic = scene.critic
    assert critic is not None
    critic.begin_as(scene.policy.state)
    for name, parameter in critic._deepspeed.module.head.named_parameters():
        start, stop = critic.state._own_range(parameter)
        whole = head_weights(parameter.ds_numel) if name == "weight" else torch.tensor([BIAS])
        for own in (critic.state._local_state(parameter, ""), parameter.ds_tensor.data.flatten()):
            own[: stop - start].copy_(whole[start:stop])
    numbers = {1: [range(6)], 2: [range(4), range(4, 6)]}[scene.ranks.num_ranks][scene.ranks.rank]
    batches = pack([row_with_values(i) for i in numbers], HEAD_TOKENS)
    batches = fill_up(batches, max(2, len(batches)))

    def note() -> None:
        for name, parameter in critic._deepspeed.module.named_parameters():
            scene.gradients[name] = safe_get_full_grad(parameter).numpy()

    step = CriticStep(
        critic=critic,
        config=CriticConfig(clip_range=CLIP_RANGE),
        learning_rate=0.0,
        holds_policy=False,
    )
    found = update_critic(step, [(batches, DENOMINATOR)], scene.ranks, note)
    scene.results["update"] = found
    scene.results["trains"] = all(one.training for one in critic._deepspeed.modules())
    critic.reset_optimizer()
