"""Tokens and batches for the account of a step."""

from __future__ import annotations

import math

import torch

from configs.algorithm_schema import AlgorithmConfig
from tests.support.trainer.made_up import row
from trainer_pool.algorithms.registry import Algorithm, Objective
from trainer_pool.algorithms.types import BatchStatistics, LossInputs
from trainer_pool.data.packing import MicroBatch, pack
from trainer_pool.metrics import StepAccumulator
from trainer_pool.step import loss_inputs


def add_tokens(
    tally: StepAccumulator,
    *,
    is_current: bool = True,
    is_at_start: bool = True,
    first: float = -1.0,
) -> None:
    """Four tokens of staleness 0, 2, 3, 2, and a masked one full of nonsense.

    `first`: the first one's log-probability at the start of the step.
    """
    inputs = LossInputs(
        trainer_logprobs_N=torch.tensor([-math.inf, -2.0, -2.0, -2.0, math.nan]),
        proximal_logprobs_N=torch.zeros(5),
        rollout_logprobs_N=torch.tensor([-1.0, -1.0, -1.0, -3.0, math.nan]),
        advantages_N=torch.zeros(5),
        weights_N=torch.ones(5),
        mask_N=torch.tensor([True, True, True, True, False]),
        staleness_N=torch.tensor([0, 2, 3, 2, 0]),
        segment_ids_N=torch.tensor([0, 0, 1, 1, 1]),
        num_segments=2,
        entropy_N=torch.tensor([1.0, 2.0, 2.0, 2.0, math.nan]),
    )
    result = Objective(
        loss=torch.tensor(0.5),
        diagnostics={
            "mine": torch.tensor([False, True, True, False, True]),
            "bounded_fraction": torch.tensor([False, True, False, False, True]),
            "num_tokens": torch.ones(5),  # a name of ours: it stays ours
        },
        metrics={"per_sequence": (torch.tensor(5.0), torch.tensor(2))},
    )
    start_N = torch.tensor([first, -2.0, -2.0, -2.0, math.nan])
    rows = [row([0, 0] + [1] * length, is_current=is_current) for length in (2, 3)]
    (batch,) = pack(rows, max_tokens=9)
    tally.add(batch, inputs, result, start_N, is_at_start=is_at_start)


def add_batch(tally: StepAccumulator, batch: MicroBatch) -> None:
    scored_N = torch.full(batch.mask_N.shape, -1.0)
    plain, statistics = Algorithm.load(AlgorithmConfig()), BatchStatistics()
    inputs = loss_inputs(batch, scored_N, scored_N, None, plain, statistics)
    tally.add(batch, inputs, plain.objective(inputs, 1.0), scored_N)
