"""A scene of ZeRO-3's ranks: a policy, batches, steps, checkpoints, results."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param

from configs.algorithm_schema import AlgorithmConfig
from configs.run_files import Scalar
from configs.schema import TrainerConfig, WarmStartConfig
from tests.support.zero3.batches import read_batch
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.critic import Critic, CriticStep
from trainer_pool.data.packing import MicroBatch
from trainer_pool.data.rows import StepBatch
from trainer_pool.model.head import Scores
from trainer_pool.model.sharded_state import joint_layout, joint_shards
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.state.checkpoint import CheckpointStore, TrainState
from trainer_pool.state.shards import ShardReader
from trainer_pool.state.writer import CheckpointWriter
from trainer_pool.step import train_step

NUM_STEPS = 4
SAVE_AFTER = 2
ADAM_EPSILON = 1e-3
"""With the usual one a gradient of rounding alone makes a whole step, in a direction that differs
from machine to machine and with the number of ranks."""


def config_for(num_ranks: int) -> TrainerConfig:
    return TrainerConfig(
        num_ranks=num_ranks,
        groups_per_step=4,
        num_minibatches=2 if num_ranks < 4 else 1,
        micro_batch_tokens=48,  # few rows a pass, so that the ranks differ in the number of passes
        learning_rate=1e-2,
        adam_epsilon=ADAM_EPSILON,
        max_grad_norm=0.5,
        warm_start=WarmStartConfig(num_steps=3, batch_size=5),
    )


def recorded(stats: dict[str, Scalar]) -> dict[str, Scalar]:
    """The record of a step without its speed, which differs from machine to machine."""
    speed = re.compile("step_[a-z]+_s|train_tokens_per_s|model_tflops")
    return {name: value for name, value in stats.items() if not speed.fullmatch(name)}


class NotingPolicy(Zero3Policy):
    """Notes what a training step asks of it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.calls: list[str] = []
        """Backward passes and updates, in their order."""
        self.last_scored: MicroBatch | None = None
        super().__init__(*arguments, **settings)

    def score(self, batch: MicroBatch) -> Scores:
        self.last_scored = batch
        return super().score(batch)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls.append("backward")
        return super().backward(loss)

    def step(self, learning_rate: float, **options: Any) -> float | None:
        self.calls.append("step")
        return super().step(learning_rate, **options)


class Scene:
    """The work of all ranks together; `results` is the same on each."""

    def __init__(
        self,
        folder: Path,
        output: Path,
        policy: NotingPolicy,
        ranks: Collectives,
        critic: Critic | None,
    ) -> None:
        self.folder = folder
        self.output = output
        self.policy = policy
        self.critic = critic
        self.states = [one.state for one in (policy, critic) if one is not None]
        self.ranks = ranks
        self.config = config_for(ranks.num_ranks)
        self.algorithm = Algorithm.load(AlgorithmConfig())
        self.results: dict[str, Any] = {"steps": []}
        self.gradients: dict[str, np.ndarray] = {}
        self.store = CheckpointStore(folder / f"checkpoints-{ranks.num_ranks}")
        self.saved: list[dict[str, Scalar]] = []
        self.writer = CheckpointWriter(
            self.store,
            joint_layout(self.states),
            ranks,
            uses_gpu=False,
            timeout_s=60.0,
            on_end=lambda _, record: self.saved.append(record),
            dump_groups=lambda file: self.dump_groups(file),
        )
        self.dump_groups: Callable[[Path], object] = lambda file: file.write_bytes(b"groups")

    # Training

    def batch(self, step: int) -> StepBatch:
        """This rank's part of it."""
        return read_batch(self.folder, step, self.ranks.rank, self.ranks.num_ranks)

    def step(
        self,
        batch: StepBatch,
        *,
        config: TrainerConfig | None = None,
        algorithm: Algorithm | None = None,
        learning_rate: float = 1e-2,
        before_update: Callable[[], None] = lambda: None,
        **further: Any,
    ) -> dict[str, Scalar]:
        """A training step, by default with the scene's own settings."""
        algorithm, critic = algorithm or self.algorithm, None
        if (settings := algorithm.config.critic) is not None:
            assert self.critic is not None
            critic = CriticStep(
                critic=self.critic,
                config=settings,
                learning_rate=learning_rate,
                holds_policy=batch.version < settings.warmup_steps,
            )
        return train_step(
            self.policy,
            self.ranks,
            batch,
            config or self.config,
            algorithm,
            learning_rate=learning_rate,
            before_update=before_update,
            critic=critic,
            **further,
        )

    def train(
        self,
        first: int,
        last: int,
        before_update: Callable[[], None] = lambda: None,
        after_step: Callable[[int], object] = lambda version: None,
        save_after: Collection[int] = (SAVE_AFTER,),
    ) -> None:
        """Train on the batches of these steps."""
        steps = []
        self.policy.calls.clear()

        def note_and_call() -> None:
            self.policy.calls.append("before_update")
            before_update()

        for step in range(first, last):
            steps.append(recorded(self.step(self.batch(step), before_update=note_and_call)))
            if step + 1 in save_after:
                self.save(step + 1)  # the next steps do not wait for the disk
            after_step(step + 1)
        self.writer.finish()
        self.results["steps"] = steps
        self.results["calls"] = [*self.policy.calls]

    # Checkpoints

    def save(self, step: int) -> None:
        self.writer.save(self.state(step), joint_shards(self.states))

    def state(self, step: int, num_updates: int | None = None) -> TrainState:
        return TrainState(
            step=step,
            version=step,
            num_updates=self.policy.state.num_updates if num_updates is None else num_updates,
            lineage="one",
            critic_updates=0 if self.critic is None else self.critic.state.num_updates,
            consumed_group_ids=(),
            task_positions={},
            untrained_prompts=(),
        )

    def restore_from(self, folder: Path) -> None:
        """The state of its newest checkpoint."""
        found = CheckpointStore(folder).latest()
        assert found is not None
        with ShardReader(found[0]) as reader:
            self.policy.state.restore(reader, found[1].num_updates)
            if self.critic is not None:
                self.critic.state.restore(reader, found[1].critic_updates)

    # Results

    def weights(self) -> dict[str, torch.Tensor]:
        weights = {name: tensor.clone() for name, tensor in self.policy.named_tensors()}
        if self.critic is not None:
            for name, parameter in self.critic._deepspeed.module.named_parameters():
                weights[f"critic:{name}"] = safe_get_full_fp32_param(parameter).clone()
        return weights

    def moments(self) -> list[torch.Tensor]:
        states = self.policy._deepspeed.optimizer.optimizer.state.values()
        return [value.clone() for state in states for value in state.values()]

    def write(self) -> None:
        weights = self.weights()
        self.policy.export(self.output / "export")
        if self.ranks.rank == 0:
            np.savez(
                self.output / "weights.npz", **{k: v.float().numpy() for k, v in weights.items()}
            )
            if self.gradients:
                np.savez(self.output / "gradients.npz", **self.gradients)
