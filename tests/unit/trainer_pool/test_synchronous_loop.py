"""With max_staleness 0 the trainer is a plain synchronous loop, for GRPO and for GSPO.

The loop below samples, trains one sequence after another with torch's own AdamW, and shares nothing
with the trainer but the model. Its batches then go through ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from buffer.wire.codec import encode_group
from configs.schema import ScratchModelConfig
from tests.support.trainer import made_up
from tests.support.zero3.ranks import Ranks
from tests.support.zero3.scene import ADAM_EPSILON
from trainer_pool.model.scratch import build_scratch_model

NUM_STEPS, GROUPS, EPISODES, PROMPT, MAX_ANSWER = 6, 4, 3, 3, 8
TEMPERATURE, RATE, MAX_NORM = 0.7, 1e-3, 0.5

pytestmark = pytest.mark.slow


class Sequence:
    """A sampled answer: tokens, and their log-probabilities when they were sampled."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        self.tokens, self.rollout = tokens, logprobs
        self.reward = float((tokens[PROMPT:] % 2 == 0).float().mean())
        self.advantage = 0.0


def logprobs_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[None]).logits[0, PROMPT - 1 : -1].float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, tokens[PROMPT:, None])[:, 0]


@torch.no_grad()
def sample(model: torch.nn.Module, dice: torch.Generator) -> list[list[Sequence]]:
    """The groups of a batch."""
    tokens = torch.randint(0, 256, (GROUPS * EPISODES, PROMPT), generator=dice)
    for _ in range(MAX_ANSWER):
        chances = (model(tokens).logits[:, -1].float() / TEMPERATURE).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=dice)], 1)
    lengths = torch.randint(PROMPT + 2, PROMPT + MAX_ANSWER, (len(tokens),), generator=dice)
    cut = [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]
    every = [Sequence(row, logprobs_of(model, row)) for row in cut]
    return [every[start : start + EPISODES] for start in range(0, len(every), EPISODES)]


def loss_of(name: str, part: list[list[Sequence]], model: torch.nn.Module) -> Tensor:
    terms = []
    for one in (one for group in part for one in group):
        moved = logprobs_of(model, one.tokens) - one.rollout
        r, low, high = moved.exp(), 0.8, 1.28
        if name == "gspo":
            r, low, high = moved.mean().exp(), 0.96, 1.05
        terms.append(-torch.minimum(r * one.advantage, r.clamp(low, high) * one.advantage))
    if name == "gspo":
        return torch.stack(terms).mean()
    return torch.cat(terms).mean()


def plain_loop(folder: Path, name: str, num_minibatches: int) -> dict[str, np.ndarray]:
    """Trains; leaves the batches in `folder`, and returns the weights at the end."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    betas = (0.9, 0.95)
    adam = torch.optim.AdamW(model.parameters(), RATE, betas, ADAM_EPSILON, weight_decay=0.0)
    dice = torch.Generator().manual_seed(0)
    for step in range(NUM_STEPS):
        batch = sample(model, dice)
        for place, group in enumerate(batch):
            rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
            for one in group:
                spread = rewards.std() + 1e-6
                one.advantage = float((one.reward - rewards.mean()) / spread)
            write(folder / f"batch-{step}-{place}.group", group, step)
        size = GROUPS // num_minibatches
        for start in range(0, GROUPS, size):
            adam.zero_grad()
            loss_of(name, batch[start : start + size], model).backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), MAX_NORM)
            adam.step()
    return {key: value.detach().numpy() for key, value in model.named_parameters()}


def write(path: Path, group: list[Sequence], version: int) -> None:
    trajectories = []
    for episode, one in enumerate(group):
        length = len(one.tokens)
        logprobs = np.zeros(length, np.float32)
        logprobs[PROMPT:] = one.rollout.numpy()
        trajectories.append(
            made_up.trajectory(
                [0] * PROMPT + [1] * (length - PROMPT),
                version=version,
                tokens=one.tokens.numpy().astype(np.int32),
                rollout_logprobs=logprobs,
                reward=one.reward,
                episode=episode,
            )
        )
    made = made_up.group(*trajectories, group_id=path.stem, temperature=TEMPERATURE)
    path.write_bytes(encode_group(made))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synchronous")
    config = ScratchModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
    )
    build_scratch_model(config, folder / "model", seed=0)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(folder)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_on_policy_training_is_that_of_a_plain_synchronous_loop(
    ranks: Ranks, folder: Path, name: str, num_minibatches: int
) -> None:
    for path in folder.glob("batch-*.group"):
        path.unlink()
    expected = plain_loop(folder, name, num_minibatches)
    # One rank for one update a step, two ranks for two.
    found = ranks.outcome(name if num_minibatches == 1 else f"{name}_twice", num_minibatches)
    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert len(found.results["steps"]) == NUM_STEPS
    assert found.results["steps"][-1]["staleness_max"] == 0
    differences = {key: np.abs(expected[key] - value).max() for key, value in found.weights.items()}
    print(name, num_minibatches, max(differences.values()))
    for key, difference in differences.items():
        moved = np.abs(expected[key] - before[key].numpy()).max()
        assert moved > 1e-4 and difference < 1e-3 * moved, (key, moved, difference)
