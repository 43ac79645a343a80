"""Packs trajectories of different lengths into padded micro-batches; pure.

    budget 12 tokens        rows are sorted by length, so that a batch needs little padding

    [ a a a a a a ]         [ c c c . ]
    [ b b b b b . ]         [ d d d . ]     a dot is padding, on the right
                            [ e e . . ]

Letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Row:
    """One sequence to train on; arrays are [T]."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    """1 where the token is trained on; never at position 0, which has no prediction."""
    rollout_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32] | None = None
    """None is 0."""
    staleness: NDArray[np.int64] | None = None
    """Versions between the one that sampled a trained token and the one being trained; None is 0.
    """
    weight: float = 1.0
    """Weight of each of its tokens in the loss."""
    temperature: float = 1.0
    """Sampling temperature: rollout log-probabilities are those of softmax(logits / this)."""
    is_current: bool = False
    """Sampled entirely by the version being trained: engine and trainer should agree."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape == self.rollout_logprobs.shape
        assert len(self.tokens) >= 2 and not self.loss_mask[0]
        for values in (self.advantages, self.staleness):
            assert values is None or values.shape == self.tokens.shape
        assert self.weight > 0 and self.temperature > 0

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class MicroBatch:
    """Rows of one forward pass.

    Predictions are needed only for the last P of the T positions (from the first trained token of
    any row on); tensors with P in their name are cut to these.
    """

    tokens_BT: Tensor
    """int64"""
    mask_BP: Tensor
    """float32, 1 where the token is trained on"""
    rollout_logprobs_BP: Tensor
    advantages_BP: Tensor
    staleness_BP: Tensor
    """int64"""
    weights_B1: Tensor
    temperatures_B1: Tensor
    is_current_B1: Tensor

    @property
    def num_last(self) -> int:
        """Positions whose next-token logits are needed: one before each of the P."""
        return self.mask_BP.shape[1] + 1

    @property
    def targets_BP(self) -> Tensor:
        return self.tokens_BT[:, -self.mask_BP.shape[1] :]

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        return MicroBatch(**{n: t.to(device, non_blocking=True) for n, t in tensors.items()})


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the rows in each micro-batch: longest first, rows x longest <= `max_tokens`.

    Raises ValueError if a single row is longer than that.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[int]] = []
    for i in order:
        if lengths[i] > max_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens={max_tokens}: a trajectory has {lengths[i]} tokens; "
                "set it to at least the longest prompt and response together"
            )
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def pack(rows: Sequence[Row], max_tokens: int) -> list[MicroBatch]:
    """Every row in exactly one micro-batch of at most `max_tokens` padded tokens."""
    plan = plan_micro_batches([len(row.tokens) for row in rows], max_tokens)
    return [_pad([rows[i] for i in indices]) for indices in plan]


def fill_up(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """`batches`, padded with empty ones to `count`.

    ZeRO-3 gathers weights and reduces gradients in every pass, so all ranks must make the same
    number of passes; an empty micro-batch has no token to train on.
    """
    assert len(batches) <= count
    empty = Row(
        tokens=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, np.uint8),
        rollout_logprobs=np.zeros(2, np.float32),
    )
    return [*batches, *(_pad([empty]) for _ in range(count - len(batches)))]


def _pad(rows: Sequence[Row]) -> MicroBatch:
    length = max(len(row.tokens) for row in rows)
    first = min((int(row.loss_mask.argmax()) for row in rows if row.num_trained), default=1)

    def padded(arrays: Sequence[NDArray[Any] | None], dtype: type, start: int) -> Tensor:
        table: NDArray[Any] = np.zeros((len(rows), length), dtype)
        for i, array in enumerate(arrays):
            if array is not None:
                table[i, : len(array)] = array
        return torch.from_numpy(table[:, start:].copy())

    return MicroBatch(
        tokens_BT=padded([row.tokens for row in rows], np.int64, 0),
        mask_BP=padded([row.loss_mask for row in rows], np.float32, first),
        rollout_logprobs_BP=padded([row.rollout_logprobs for row in rows], np.float32, first),
        advantages_BP=padded([row.advantages for row in rows], np.float32, first),
        staleness_BP=padded([row.staleness for row in rows], np.int64, first),
        weights_B1=_column([row.weight for row in rows]),
        temperatures_B1=_column([row.temperature for row in rows]),
        is_current_B1=torch.tensor([[row.is_current] for row in rows]),
    )


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)
