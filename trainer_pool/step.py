"""One training step: from the groups of a batch to new weights and statistics.

    groups ─ rows ┬ minibatch 0: micro-batches ─► forward, loss, backward ... ─► update
                  └ minibatch 1: micro-batches ─► forward, loss, backward ... ─► update

Each rank has its own share of the groups. The denominator of a loss is that of the whole minibatch
over all ranks, and a group's minibatch depends only on its position in the whole batch. So the
number of ranks and of micro-batches changes nothing but rounding.

Letters: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.choices import Proximal
from configs.schema import TrainerConfig
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.types import BatchStatistics, LossInputs
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch, PassCost, Row, fill_up, pack
from trainer_pool.data.rows import StepBatch, rows_by_group, weighted
from trainer_pool.metrics import StepAccumulator, StepStats, not_finite
from trainer_pool.model.zero3 import Zero3Engine


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Minibatch:
    """One rank's part of one update."""

    micro_batches: list[MicroBatch]
    """The same number on every rank."""
    denominator: float
    """Of its loss, over all ranks."""


def train_step(
    engine: Zero3Engine,
    ranks: Collectives,
    batch: StepBatch,
    config: TrainerConfig,
    algorithm: Algorithm,
    *,
    learning_rate: float,
    before_update: Callable[[], None],
) -> StepStats:
    """Update the weights on `batch`; every rank calls it with its own share of the same batch.

    `before_update` is called before each change of the weights.
    Raises ValueError naming a group that was not sampled from the policy's own distribution.
    """
    minibatches = plan_minibatches(batch, config, algorithm, ranks, engine.cost)
    scores = _scores_at_start(engine, minibatches, algorithm)
    totals, norms = StepAccumulator(engine.device, len(batch.group_ids)), list[float | None]()
    for minibatch, scored in zip(minibatches, scores, strict=True):
        statistics = _statistics(engine, minibatch, scored, algorithm, ranks)
        for micro_batch, scored_N in zip(minibatch.micro_batches, scored, strict=True):
            _accumulate(
                engine,
                totals,
                micro_batch.to(engine.device),
                scored_N,
                algorithm,
                statistics,
                denominator=minibatch.denominator,
            )
        before_update()
        norms.append(engine.step(learning_rate))
    return totals.total(
        ranks,
        groups=batch.groups,
        group_ids=batch.group_ids,
        version=batch.version,
        norms=norms,
        learning_rate=learning_rate,
    )


def _accumulate(
    engine: Zero3Engine,
    totals: StepAccumulator,
    batch: MicroBatch,
    scored_N: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
    *,
    denominator: float,
) -> None:
    """Add the gradient of one micro-batch.

    `scored_N`: log-probabilities at the start of the step; None if nothing has changed since.
    """
    trainer_N, entropy_N, _ = engine.score(batch)
    start_N = trainer_N.detach() if scored_N is None else scored_N
    inputs = loss_inputs(batch, trainer_N, start_N, entropy_N, algorithm, statistics)
    result = algorithm.objective(inputs, denominator)
    logprobs_N = inputs.trainer_logprobs_N + inputs.proximal_logprobs_N
    loss = nan_if_not_finite(result.loss, logprobs_N, inputs.mask_N)
    totals.add_culprits(batch, engine.backward(loss))
    totals.add(batch, inputs, result, start_N)


def loss_inputs(
    batch: MicroBatch,
    trainer_N: Tensor,
    start_N: Tensor,
    entropy_N: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
) -> LossInputs:
    """Of a micro-batch; `start_N`: of the policy at the start of the step."""
    mask_N = batch.mask_N != 0

    def trained(values_N: Tensor) -> Tensor:
        # A masked token may contain any number; exp of it must not become inf (0 * inf is nan).
        return values_N.masked_fill(~mask_N, 0)

    proximal_N = algorithm.proximal(trained(start_N), batch.rollout_logprobs_N, batch.staleness_N)
    return LossInputs(
        trainer_logprobs_N=trained(trainer_N),
        proximal_logprobs_N=proximal_N,
        rollout_logprobs_N=batch.rollout_logprobs_N,
        advantages_N=batch.advantages_N,
        weights_N=batch.weights_N,
        mask_N=mask_N,
        staleness_N=batch.staleness_N,
        segment_ids_N=batch.segment_ids_N,
        num_segments=batch.num_segments,
        entropy_N=None if entropy_N is None else trained(entropy_N),
        batch=statistics,
    )


def nan_if_not_finite(loss: Tensor, logprobs_N: Tensor, mask_N: Tensor) -> Tensor:
    """`loss`, with a NaN gradient for trained tokens whose log-probability is not finite: then no
    rank applies the update. With clamped ratios -inf would have a finite one."""
    is_bad_N = not_finite(logprobs_N, mask_N)
    # The other tokens get no NaN, so that the groups that brought it can be told.
    bad = torch.where(is_bad_N, logprobs_N, 0.0).sum()
    return loss + bad * torch.where(is_bad_N.any(), math.nan, 0.0)


def _scores_at_start(
    engine: Zero3Engine, minibatches: Sequence[Minibatch], algorithm: Algorithm
) -> list[list[Tensor | None]]:
    """Log-probabilities before the first update, by minibatch and micro-batch.

    None if nothing needs them, or if there is a single update: its own forward pass computes them.
    """
    config = algorithm.config
    is_recomputed = config.needs_proximal and config.proximal is Proximal.recomputed
    if not algorithm.needs_batch and (len(minibatches) <= 1 or not is_recomputed):
        return [[None] * len(minibatch.micro_batches) for minibatch in minibatches]
    return [
        [_score(engine, micro_batch) for micro_batch in minibatch.micro_batches]
        for minibatch in minibatches
    ]


@torch.no_grad()
def _score(engine: Zero3Engine, batch: MicroBatch) -> Tensor:
    return engine.score(batch.to(engine.device)).logprobs


def _statistics(
    engine: Zero3Engine,
    minibatch: Minibatch,
    scored: Sequence[Tensor | None],
    algorithm: Algorithm,
    ranks: Collectives,
) -> BatchStatistics:
    """Of all tokens of the update, over all ranks, if a correction needs them."""
    if not algorithm.needs_batch:
        return BatchStatistics()
    parts = []
    for batch, scored_N in zip(minibatch.micro_batches, scored, strict=True):
        assert scored_N is not None
        batch = batch.to(engine.device)
        parts.append(loss_inputs(batch, scored_N, scored_N, None, algorithm, BatchStatistics()))
    return algorithm.statistics(parts, lambda sums: ranks.gather(sums).sum(0))


def plan_minibatches(
    batch: StepBatch,
    config: TrainerConfig,
    algorithm: Algorithm,
    ranks: Collectives,
    cost: PassCost,
) -> list[Minibatch]:
    """Split the step into updates with nearly equal numbers of groups; collective.

    Updates without a trained token on any rank are omitted.
    """
    places, rows = batch.places, rows_by_group(batch, algorithm, ranks)
    parts: list[list[list[Row]]] = [[] for _ in range(config.num_minibatches)]
    for group, of_group in zip(batch.groups, rows, strict=True):
        parts[places[group.group_id] * config.num_minibatches // len(places)].append(of_group)
    found = [weighted(part, algorithm) for part in parts]
    budget, share = config.micro_batch_tokens, config.share_prefixes
    mine = [pack(part, budget, cost, should_share_prefixes=share) for part, _ in found]
    tokens = [sum(row.num_trained for row in part) for part, _ in found]
    shares = [math.nan if denominator is None else denominator for _, denominator in found]
    numbers = torch.tensor([*tokens, *shares, *map(len, mine)], dtype=torch.float64)
    every = ranks.gather(numbers).view(ranks.num_ranks, 3, len(mine))
    all_tokens, denominators = every[:, 0].sum(0).tolist(), every[:, 1].sum(0).tolist()
    return [
        Minibatch(
            micro_batches=fill_up(part, int(passes)),
            denominator=1.0 if math.isnan(denominator) else denominator,
        )
        for part, num_tokens, denominator, passes in zip(
            mine, all_tokens, denominators, every[:, 2].amax(0).tolist(), strict=True
        )
        if num_tokens > 0
    ]
