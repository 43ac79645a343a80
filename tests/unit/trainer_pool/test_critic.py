"""Metrics of a critic's step."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.advantages import CriticConfig
from configs.algorithm_schema import RETURN_COLUMN, VALUE_COLUMN
from tests.support.trainer.loop_scene import HEAD_TOKENS, head_row
from trainer_pool.critic import CriticStep, update_critic
from trainer_pool.data.packing import pack


class Model:
    """Its gradients are finite in all updates but the first."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.norms: list[float | None] = [None, 2.0]

    def values(self, batch):
        return torch.zeros_like(batch.weights_N, requires_grad=True)

    def backward(self, loss):
        loss.backward()

    def step(self, learning_rate):
        return self.norms.pop(0)


def updated(returns) -> dict[str, float]:
    """Metrics of two updates with `returns(number of tokens)`, and values half as large."""
    row = head_row(0)
    found = returns(len(row.tokens)).astype(np.float32)
    row = replace(row, columns={RETURN_COLUMN: found, VALUE_COLUMN: found / 2})
    model: Any = Model()
    step = CriticStep(critic=model, config=CriticConfig(), learning_rate=0.1, holds_policy=False)
    ranks: Any = SimpleNamespace(gather=lambda sums: sums[None])
    batches = pack([row], HEAD_TOKENS)
    return update_critic(step, [(batches, 1.0), (batches, 1.0)], ranks, lambda: None)


def test_explained_variance_is_exact_far_from_zero() -> None:
    found = updated(lambda number: 100 + 0.01 * np.sin(np.arange(number)))
    assert found["explained_variance"] == pytest.approx(0.75, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 1000.1])
def test_returns_that_do_not_vary_have_no_variance_to_explain(value: float) -> None:
    assert math.isnan(updated(lambda number: np.full(number, value))["explained_variance"])


def test_update_that_is_not_finite_is_counted() -> None:
    found = updated(np.arange)
    assert (found["critic_skipped_updates"], found["critic_grad_norm"]) == (1.0, 2.0)
