"""Packs trajectories of different lengths into micro-batches without padding; pure.

    budget 12 tokens        sequences of one micro-batch lie end to end in one row

    [ a a a a a a b b b b b ]         position_ids 0 1 2 3 4 5 0 1 2 3 4
    [ c c c d d d e e ]               attention never crosses from one letter to another

Only logits that predict a trained token are computed: one for each of the N trained tokens.

Letters: L tokens of the row, N trained tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
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
    advantage: float = 0.0
    weight: float = 1.0
    """Weight of each of its tokens in the loss: all trajectories of an episode share one."""
    temperature: float = 1.0
    """Sampling temperature: rollout log-probabilities are those of softmax(logits / this)."""
    is_current: bool = False
    """Sampled entirely by the version being trained: engine and trainer should agree."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape == self.rollout_logprobs.shape
        assert len(self.tokens) >= 2 and not self.loss_mask[0]
        assert self.weight > 0 and self.temperature > 0

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(kw_only=True, slots=True, frozen=True)
class PassCost:
    """Time of a sequence in a forward pass, up to a factor: multiply-adds of the model.

    A token meets every weight once. A query and a key meet twice in each layer (their product, and
    the sum of values), and causal attention has T²/2 such pairs.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def of(self, length: int) -> float:
        return self.per_token * length + self.per_pair * length**2 / 2


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class PackedRow:
    """What a forward pass computes: sequences that do not see each other, laid end to end."""

    tokens_L: Tensor
    """int64"""
    position_ids_L: Tensor
    """int64; starts at 0 in each sequence."""
    starts: Tensor
    """int32 [S + 1]: where each sequence begins, and L."""
    longest: int
    """Tokens of the longest sequence."""

    def to(self, device: torch.device) -> PackedRow:
        return replace(self, **_moved(self, device))


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class MicroBatch:
    """A packed row, and what the loss needs of each of its N trained tokens.

    Without a trained token it has one token with mask 0, so that every rank runs backward.
    """

    row: PackedRow
    places_N: Tensor
    """int64: positions in the row whose logits predict the N tokens."""
    segment_ids_N: Tensor
    """int64: which of the trajectories a token belongs to, ascending."""
    num_segments: int
    targets_N: Tensor
    """int64"""
    mask_N: Tensor
    """float32, 1 where the token is trained on"""
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    temperatures_N: Tensor
    is_current_N: Tensor
    num_padding: int = 0
    """Tokens of the row that belong to no trajectory."""

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, row=self.row.to(device), **_moved(self, device))


def _moved(record: PackedRow | MicroBatch, device: torch.device) -> dict[str, Any]:
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return {
        name: value.to(device, non_blocking=True)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, cost: PassCost | None = None
) -> list[list[int]]:
    """Indices of the sequences in each micro-batch of at most `max_tokens`; the costliest first.

    First-fit decreasing (Johnson 1973: at most 11/9 of the fewest possible, plus 1) says how many
    there are. In the order of their costs, the passes of the ranks, which wait for each other, take
    about the same time. So do the passes of one rank, if the sequences, the costliest first, each
    given to the cheapest micro-batch with room, still fit.
    Raises ValueError if a single sequence is longer than `max_tokens`.
    """
    cost = cost or PassCost()
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if lengths and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"trainer.micro_batch_tokens={max_tokens}: a trajectory has {lengths[order[0]]} tokens;"
            " set it to at least the longest prompt and response together"
        )
    costs = [cost.of(length) for length in lengths]
    plan = _first_fit(order, lengths, max_tokens)
    even = _evened_out(order, lengths, costs, max_tokens, len(plan))

    def costliest(plan: list[list[int]]) -> float:
        return max((sum(costs[i] for i in part) for part in plan), default=0.0)

    if even is not None and costliest(even) < costliest(plan):
        plan = even
    return sorted(plan, key=lambda part: -sum(costs[i] for i in part))


def _first_fit(order: Iterable[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    plan: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((p for p, free in enumerate(room) if free >= lengths[i]), len(plan))
        if place == len(plan):
            plan.append([])
            room.append(max_tokens)
        plan[place].append(i)
        room[place] -= lengths[i]
    return plan


def _evened_out(
    order: Iterable[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    max_tokens: int,
    count: int,
) -> list[list[int]] | None:
    """`count` micro-batches of nearly equal costs; None if they do not fit."""
    plan: list[list[int]] = [[] for _ in range(count)]
    room, spent = [max_tokens] * count, [0.0] * count
    for i in order:
        places = [place for place in range(count) if room[place] >= lengths[i]]
        if not places:
            return None
        place = min(places, key=spent.__getitem__)
        plan[place].append(i)
        room[place] -= lengths[i]
        spent[place] += costs[i]
    return plan


def pack(rows: Sequence[Row], max_tokens: int, cost: PassCost | None = None) -> list[MicroBatch]:
    """Every row in exactly one micro-batch of at most `max_tokens` tokens."""
    plan = plan_micro_batches([len(row.tokens) for row in rows], max_tokens, cost)
    return [_lay([rows[i] for i in indices]) for indices in plan]


def fill_up(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """`batches`, with empty ones added up to `count`.

    ZeRO-3 gathers weights and reduces gradients in every pass, so all ranks must make the same
    number of passes; an empty micro-batch has no token to train on.
    """
    assert len(batches) <= count
    empty = Row(
        tokens=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, np.uint8),
        rollout_logprobs=np.zeros(2, np.float32),
    )
    padding = replace(_lay([empty]), num_padding=2)
    return [*batches, *[padding] * (count - len(batches))]


def packed_row(sequences: Sequence[Tensor]) -> PackedRow:
    """Sequences of token ids, end to end, on their device."""
    lengths = [len(sequence) for sequence in sequences]
    device = sequences[0].device
    return PackedRow(
        tokens_L=torch.cat(list(sequences)).long(),
        position_ids_L=torch.cat([torch.arange(length, device=device) for length in lengths]),
        starts=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device),
        longest=max(lengths),
    )


def _lay(rows: Sequence[Row]) -> MicroBatch:
    mask = np.concatenate([row.loss_mask for row in rows])
    trained = np.flatnonzero(mask)
    if not len(trained):
        trained = np.array([1])  # the second token of the first row, whose mask is 0
    packed = packed_row([torch.from_numpy(row.tokens) for row in rows])
    segments = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])[trained]
    logprobs = np.concatenate([row.rollout_logprobs for row in rows])

    def each(numbers: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, np.float32)[segments])

    return MicroBatch(
        row=packed,
        places_N=torch.from_numpy(trained - 1),
        segment_ids_N=torch.from_numpy(segments),
        num_segments=len(rows),
        targets_N=packed.tokens_L[trained],
        mask_N=torch.from_numpy(mask[trained].astype(np.float32)),
        rollout_logprobs_N=torch.from_numpy(logprobs[trained].astype(np.float32)),
        advantages_N=each([row.advantage for row in rows]),
        weights_N=each([row.weight for row in rows]),
        temperatures_N=each([row.temperature for row in rows]),
        is_current_N=torch.tensor([row.is_current for row in rows])[torch.from_numpy(segments)],
    )
