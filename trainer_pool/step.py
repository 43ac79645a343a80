"""One training step: from the groups of a batch to new weights and statistics.

    groups ─ rows ┬ minibatch 0: micro-batches ─► forward, loss, backward ... ─► update
                  └ minibatch 1: micro-batches ─► forward, loss, backward ... ─► update

Each rank has its own share of the groups. The denominator of a loss is that of the whole minibatch
over all ranks, and a group's minibatch depends only on its position in the whole batch. So the
number of ranks and of micro-batches changes nothing but rounding.

Letters: B rows, P predicted positions, N = B x P of them in a line.
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
from trainer_pool.data.packing import MicroBatch, Row, fill_up, pack
from trainer_pool.data.rows import StepBatch, rows_by_group, weighted
from trainer_pool.metrics import StepAccumulator, StepStats, not_finite
from trainer_pool.model.logprobs import selected_logprobs
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
    minibatches = plan_minibatches(batch, config, algorithm, ranks)
    scores = _scores_at_start(engine, minibatches, algorithm)
    totals, norms = StepAccumulator(engine.device), list[float | None]()
    for minibatch, scored in zip(minibatches, scores, strict=True):
        statistics = _statistics(engine, minibatch, scored, algorithm, ranks)
        for micro_batch, scored_BP in zip(minibatch.micro_batches, scored, strict=True):
            _accumulate(
                engine,
                totals,
                micro_batch.to(engine.device),
                scored_BP,
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
    scored_BP: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
    *,
    denominator: float,
) -> None:
    """Add the gradient of one micro-batch.

    `scored_BP`: log-probabilities at the start of the step; None if nothing has changed since.
    """
    logits = engine.logits(batch.tokens_BT, batch.num_last)[:, :-1]
    trainer_BP, entropy_BP = selected_logprobs(logits, batch.targets_BP, batch.temperatures_B1)
    start_BP = trainer_BP.detach() if scored_BP is None else scored_BP
    inputs = loss_inputs(batch, trainer_BP, start_BP, entropy_BP, algorithm, statistics)
    result = algorithm.objective(inputs, denominator)
    logprobs_N = inputs.trainer_logprobs_N + inputs.proximal_logprobs_N
    engine.backward(nan_if_not_finite(result.loss, logprobs_N, inputs.mask_N))
    totals.add(
        inputs,
        result,
        start_N=start_BP.reshape(-1),
        is_current_N=batch.is_current_B1.expand_as(trainer_BP).reshape(-1),
    )


def loss_inputs(
    batch: MicroBatch,
    trainer_BP: Tensor,
    start_BP: Tensor,
    entropy_BP: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
) -> LossInputs:
    """The tokens of a micro-batch in a line; `start_BP`: of the policy at the start of the step."""
    mask_BP = batch.mask_BP != 0

    def flat(values: Tensor) -> Tensor:
        # A masked position may contain any number; exp of it must not become inf (0 * inf is nan).
        return values.expand_as(mask_BP).masked_fill(~mask_BP, 0).reshape(-1)

    rollout_N, staleness_N = flat(batch.rollout_logprobs_BP), flat(batch.staleness_BP)
    num_rows = len(mask_BP)
    rows_B1 = torch.arange(num_rows, device=mask_BP.device).unsqueeze(1)
    return LossInputs(
        trainer_logprobs_N=flat(trainer_BP),
        proximal_logprobs_N=algorithm.proximal(flat(start_BP), rollout_N, staleness_N),
        rollout_logprobs_N=rollout_N,
        advantages_N=flat(batch.advantages_BP),
        weights_N=flat(batch.weights_B1),
        mask_N=mask_BP.reshape(-1),
        staleness_N=staleness_N,
        segment_ids_N=rows_B1.expand_as(mask_BP).reshape(-1),
        num_segments=num_rows,
        entropy_N=None if entropy_BP is None else flat(entropy_BP),
        batch=statistics,
    )


def nan_if_not_finite(loss: Tensor, logprobs_N: Tensor, mask_N: Tensor) -> Tensor:
    """`loss`, with a NaN gradient if a trained token has a log-probability that is not finite: then
    no rank applies the update. With clamped ratios -inf would have a finite one."""
    return loss * torch.where(not_finite(logprobs_N, mask_N).any(), math.nan, 1.0)


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
    batch = batch.to(engine.device)
    logits = engine.logits(batch.tokens_BT, batch.num_last)[:, :-1]
    return selected_logprobs(logits, batch.targets_BP, batch.temperatures_B1)[0]


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
    for batch, scored_BP in zip(minibatch.micro_batches, scored, strict=True):
        assert scored_BP is not None
        batch = batch.to(engine.device)
        parts.append(loss_inputs(batch, scored_BP, scored_BP, None, algorithm, BatchStatistics()))
    return algorithm.statistics(parts, lambda sums: ranks.gather(sums).sum(0))


def plan_minibatches(
    batch: StepBatch, config: TrainerConfig, algorithm: Algorithm, ranks: Collectives
) -> list[Minibatch]:
    """Split the step into updates with nearly equal numbers of groups; collective.

    Updates without a trained token on any rank are omitted.
    """
    places, rows = batch.places, rows_by_group(batch, algorithm, ranks)
    parts: list[list[list[Row]]] = [[] for _ in range(config.num_minibatches)]
    for group, of_group in zip(batch.groups, rows, strict=True):
        parts[places[group.group_id] * config.num_minibatches // len(places)].append(of_group)
    found = [weighted(part, algorithm) for part in parts]
    mine = [pack(part, config.micro_batch_tokens) for part, _ in found]
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
