"""Model FLOPs utilisation of training steps on a GPU, with packed rows of 16k and 64k tokens.

    python -m benchmarks.gpu.mfu [--layers 28] [--steps 3]

The shape of Qwen2.5 1.5B with random weights, in bfloat16 with float32 master weights, one ZeRO-3
rank, gradient checkpointing. Each step is the trainer's own, four passes long, with answers of
lognormal lengths after prompts of 200 tokens. docs/training.md says what is counted.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.device import require_gpu, require_packages, take_older_torch
from benchmarks.report import Report
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.algorithm_schema import AlgorithmConfig
from configs.schema import TrainerConfig

PROMPT, GROUP_SIZE, PASSES = 200, 8, 4
BUDGETS = {16_384: 0.20, 65_536: 0.38}
"""Tokens of a pass, and the MFU that is the target."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    require_gpu("benchmarks.gpu.mfu")
    require_packages("benchmarks.gpu.mfu", "deepspeed", "transformers")
    measure(given.layers, given.steps)


def measure(num_layers: int, num_steps: int) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    from benchmarks.ranks import free_port, join
    from trainer_pool.algorithms.registry import Algorithm
    from trainer_pool.data.rows import StepBatch
    from trainer_pool.model.zero3 import Zero3Policy
    from trainer_pool.step import train_step

    shape = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    report = Report("training on a GPU")
    # Before the policy, whose first pass compares the attention of a packed row.
    if (difference := take_older_torch()) is not None:
        report.say(difference)
    address, ranks = join(0, 1, free_port(), 600.0, uses_gpu=True)
    config = TrainerConfig(num_ranks=1, gradient_checkpointing=True)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
        policy = Zero3Policy(folder, config, address)
    algorithm = Algorithm.load(AlgorithmConfig())
    for budget, goal in BUDGETS.items():
        settings = replace(config, micro_batch_tokens=budget)
        records = []
        for version in range(num_steps + 1):  # the first one warms up
            groups = made_up(budget * PASSES, version)
            batch = StepBatch(
                version=version, group_ids=tuple(group.group_id for group in groups), groups=groups
            )
            torch.cuda.reset_peak_memory_stats()
            stats = train_step(
                policy,
                ranks,
                batch,
                settings,
                algorithm,
                learning_rate=1e-6,
                before_update=lambda: None,
            )
            records.append(stats)
        size = f"{budget // 1024}k"
        figures = {
            name: median(float(record[name]) for record in records[1:] if name in record)
            for name in ("train_tokens_per_s", "model_tflops", "padding_fraction", "mfu")
            if name in records[0]
        }
        if "mfu" in figures:
            report.target(f"mfu_{size}", figures.pop("mfu"), ">=", goal, "of a whole step")
        for name, value in figures.items():
            report.figure(f"{name}_{size}", value, "")
        report.figure(f"peak_gb_{size}", torch.cuda.max_memory_allocated() / 1e9, "allocated")
    report.close()


def made_up(num_tokens: int, seed: int) -> tuple[TrajectoryGroup, ...]:
    """Groups of about so many tokens, with rewards that differ."""
    dice = np.random.default_rng(seed)
    groups: list[TrajectoryGroup] = []
    while num_tokens > 0:
        prompt = dice.integers(0, 150_000, PROMPT)
        trajectories = []
        for episode in range(GROUP_SIZE):
            length = int(np.clip(dice.lognormal(6.5, 0.8), 16, 8000))
            tokens = np.concatenate([prompt, dice.integers(0, 150_000, length)]).astype(np.int32)
            mask = (np.arange(len(tokens)) >= PROMPT).astype(np.uint8)
            trajectories.append(
                Trajectory(
                    tokens=tokens,
                    loss_mask=mask,
                    rollout_logprobs=mask * np.float32(-np.log(151_936)),
                    version_spans=(VersionSpan(version=seed, start=PROMPT, end=len(tokens)),),
                    prompt_length=PROMPT,
                    reward=float(episode % 2),
                    finish_reason="stop",
                    episode=episode,
                )
            )
            num_tokens -= len(tokens)
        name = f"{seed}-{len(groups)}"
        where = PromptRef(task="made-up", index=len(groups))
        groups.append(
            TrajectoryGroup(group_id=name, prompt=where, trajectories=tuple(trajectories))
        )
    return tuple(groups)


if __name__ == "__main__":
    main()
