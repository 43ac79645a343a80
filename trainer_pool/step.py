"""One training step: from the groups of a batch to new weights and statistics.

    groups ─ rows ┬ minibatch 0: micro-batches ─► forward, loss, backward ... ─► update
                  └ minibatch 1: micro-batches ─► forward, loss, backward ... ─► update

Each rank has its own share of the groups. The denominator of a loss is that of the whole minibatch
over all ranks, and a group's minibatch depends only on its position in the whole batch. So the
number of ranks and of micro-batches changes nothing but rounding. Each stream has a loss and a
denominator of its own; an update adds their gradients. With `trainer.gradient_accumulation_steps`
several steps make one update, whose denominator is the sum of theirs.

Letters: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.algorithm_schema import POLICY
from configs.choices import Proximal
from configs.schema import TrainerConfig
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.types import BatchStatistics, LossInputs
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch, Row, fill_up, pack
from trainer_pool.data.rows import StepBatch, rows_by_group, weighted
from trainer_pool.guard import SkipReason, Update, UpdateGuard
from trainer_pool.metrics import StepAccumulator, StepStats
from trainer_pool.model.zero3 import Zero3Engine
from trainer_pool.speed import StepSpeed, peak_tflops


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Minibatch:
    """One rank's part of one update."""

    micro_batches: list[MicroBatch]
    """Every rank has the same number."""
    denominators: Mapping[str, float]
    """The denominator of each stream's loss, over all ranks."""
    is_mean: bool
    """Whether the policy's loss is divided by its denominator; else that is 1."""


@dataclass(kw_only=True, slots=True)
class Accumulation:
    """The gradients of several steps, which are one update."""

    is_complete: bool = False
    """Whether the step to come is the last of them."""
    divisor: float = 0.0
    """Of their sum so far; 0: there is no gradient yet."""

    def add(self, minibatch: Minibatch) -> None:
        self.divisor = self.divisor + minibatch.denominators[POLICY] if minibatch.is_mean else 1.0


def train_step(
    engine: Zero3Engine,
    ranks: Collectives,
    batch: StepBatch,
    config: TrainerConfig,
    algorithm: Algorithm,
    *,
    learning_rate: float,
    before_update: Callable[[], None],
    guard: UpdateGuard | None = None,
    accumulation: Accumulation | None = None,
) -> StepStats:
    """Update the weights on `batch`; every rank calls it with its own share of the same batch.

    `before_update` is called before each change of the weights. `guard` may skip updates.
    With `accumulation` the gradient is added to those of the steps before, and the weights change
    only if it `is_complete`.
    Raises ValueError naming a group that was not sampled from the policy's own distribution.
    """
    speed = StepSpeed(device=engine.device)
    with speed.timing("plan"):
        minibatches = plan_minibatches(engine, batch, config, algorithm, ranks)
    with speed.timing("score"):
        scores = _scores_at_start(engine, minibatches, algorithm)
    totals, updates = StepAccumulator(engine.device, len(batch.group_ids)), list[Update]()

    def update(divisor: float = 1.0) -> None:
        before_update()
        with speed.timing("update"):
            updates.append(_update(engine, ranks, totals, guard, learning_rate, divisor))

    for number, (minibatch, scored) in enumerate(zip(minibatches, scores, strict=True)):
        with speed.timing("passes"):
            statistics = _statistics(engine, minibatch, scored, algorithm, ranks)
            for micro_batch, scored_N in zip(minibatch.micro_batches, scored, strict=True):
                _accumulate(
                    engine,
                    totals,
                    micro_batch.to(engine.device),
                    scored_N,
                    algorithm,
                    statistics,
                    minibatch.denominators,
                    is_first=number == 0,
                    should_divide=accumulation is None,
                )
                speed.multiply_adds += micro_batch.cost
        if accumulation is None:
            update()
        else:
            accumulation.add(minibatch)
    if accumulation is not None and accumulation.is_complete and accumulation.divisor:
        update(accumulation.divisor)
        accumulation.divisor = 0.0
    return totals.total(
        ranks,
        groups=batch.groups,
        group_ids=batch.group_ids,
        version=batch.version,
        num_minibatches=len(minibatches),
        updates=updates,
        learning_rate=learning_rate,
        speed=speed,
        peak_tflops=config.peak_tflops or peak_tflops(engine.device),
    )


def _update(
    engine: Zero3Engine,
    ranks: Collectives,
    totals: StepAccumulator,
    guard: UpdateGuard | None,
    learning_rate: float,
    divisor: float,
) -> Update:
    limit = None if guard is None else guard.norm_limit
    skipped = None
    if (
        guard is not None
        and guard.watches_ess
        and guard.is_ess_too_low(totals.ess_of_update(ranks))
    ):
        skipped, limit = SkipReason.low_ess, 0.0
    norm = engine.step(learning_rate, norm_limit=limit, divisor=divisor)
    if norm is None:
        skipped = SkipReason.not_finite
    elif skipped is None and limit is not None and norm > limit:
        skipped = SkipReason.spike
    update = Update(norm, skipped)
    if guard is not None:
        guard.note(update)
    return update


def _accumulate(
    engine: Zero3Engine,
    totals: StepAccumulator,
    batch: MicroBatch,
    scored_N: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
    denominators: Mapping[str, float],
    *,
    is_first: bool,
    should_divide: bool,
) -> None:
    """Add the gradient of one micro-batch.

    `scored_N`: log-probabilities at the start of the step; None if nothing has changed since, as in
    the first minibatch (`is_first`), or if the algorithm does not need them.
    `should_divide`: whether the gradient is that of a mean, or of a sum that is divided later.
    """
    trainer_N, entropy_N, _ = engine.score(batch)
    if batch.num_tokens == 0:  # backward all the same: other ranks wait for this pass
        engine.backward(trainer_N.masked_fill(batch.mask_N == 0, 0.0).sum())
        totals.add_pass(batch)
        return
    start_N = trainer_N.detach() if scored_N is None else scored_N
    inputs = loss_inputs(batch, trainer_N, start_N, entropy_N, algorithm, statistics)
    result = algorithm.objective(inputs, denominators[POLICY])
    for name in algorithm.streams:
        weights_N = batch.streams[name]
        of_stream = loss_inputs(
            replace(batch, mask_N=(weights_N != 0).float(), weights_N=weights_N),
            *(trainer_N, start_N, entropy_N, algorithm, statistics),
        )
        result = result.plus(algorithm.stream_objective(name, of_stream, denominators[name]))
    if scored_N is not None:
        moved_N = inputs.log_ratio(trainer_N.detach(), scored_N)
        moved = {"update_kl": moved_N.expm1() - moved_N}
        result = replace(result, diagnostics={**result.diagnostics, **moved})
    loss = nan_if_not_finite(result.loss, trainer_N + start_N)
    if not should_divide:
        loss = loss * denominators[POLICY]
    totals.add_culprits(batch, engine.backward(loss))
    is_at_start = is_first or scored_N is not None
    totals.add(batch, inputs, result, start_N, is_at_start=is_at_start)


def loss_inputs(
    batch: MicroBatch,
    trainer_N: Tensor,
    start_N: Tensor,
    entropy_N: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
) -> LossInputs:
    """The inputs of a micro-batch's loss.

    `trainer_N`, `start_N` [N]: log-probabilities by the policy now, and at the start of the step.
    """
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
        columns={name: trained(values_N) for name, values_N in batch.columns.items()},
        batch=statistics,
    )


def nan_if_not_finite(loss: Tensor, logprobs_N: Tensor) -> Tensor:
    """`loss`, with a NaN gradient for tokens whose log-probability is not finite, so that no rank
    applies the update: through a clamped ratio, the gradient of -inf would be finite."""
    is_bad_N = ~logprobs_N.isfinite()
    # The other tokens get no NaN, so that the metrics can name the groups that brought it.
    bad = torch.where(is_bad_N, logprobs_N, 0.0).sum()
    return loss + bad * torch.where(is_bad_N.any(), math.nan, 0.0)


def _scores_at_start(
    engine: Zero3Engine, minibatches: Sequence[Minibatch], algorithm: Algorithm
) -> list[list[Tensor | None]]:
    """[N] log-probabilities before the first update, by minibatch and micro-batch.

    None if nothing reads them, or if there is a single update, whose own forward pass gives them.
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
    """Statistics of the update's tokens on all ranks, if a correction needs them; collective."""
    if not algorithm.needs_batch:
        return BatchStatistics()
    parts = []
    for batch, scored_N in zip(minibatch.micro_batches, scored, strict=True):
        assert scored_N is not None
        batch = batch.to(engine.device)
        parts.append(loss_inputs(batch, scored_N, scored_N, None, algorithm, BatchStatistics()))
    return algorithm.statistics(parts, lambda sums: ranks.gather(sums).sum(0))


def plan_minibatches(
    engine: Zero3Engine,
    batch: StepBatch,
    config: TrainerConfig,
    algorithm: Algorithm,
    ranks: Collectives,
) -> list[Minibatch]:
    """Split the batch into updates with nearly equal numbers of groups; collective.

    Updates without a trained token on any rank are omitted.
    """

    def score_reference(rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return _reference_logprobs(engine, rows, config, ranks)

    places = batch.places
    rows = rows_by_group(
        batch, algorithm, ranks, score_reference if algorithm.needs_reference else None
    )
    parts: list[list[list[Row]]] = [[] for _ in range(config.num_minibatches)]
    for group, of_group in zip(batch.groups, rows, strict=True):
        parts[places[group.group_id] * config.num_minibatches // len(places)].append(of_group)
    found = [weighted(part, algorithm) for part in parts]
    mine = [_pack(engine, part, config) for part, _ in found]
    names = [POLICY, *algorithm.streams]
    shares = [[math.nan if of[name] is None else of[name] for name in names] for _, of in found]
    tokens = [sum(int(row.is_scored.sum()) for row in part) for part, _ in found]
    numbers = torch.tensor(
        [[len(part), n, *of] for part, n, of in zip(mine, tokens, shares, strict=True)],
        dtype=torch.float64,
    )
    every = ranks.gather(numbers.view(-1)).view(ranks.num_ranks, *numbers.shape)
    passes, totals = every[:, :, 0].amax(0).tolist(), every[:, :, 1:].sum(0).tolist()
    return [
        Minibatch(
            micro_batches=fill_up(part, int(count)),
            denominators={
                # NaN: not divided. A stream without a token has no loss to divide.
                name: 1.0 if math.isnan(total) or total == 0 else total
                for name, total in zip(names, of_streams, strict=True)
            },
            is_mean=not math.isnan(of_streams[0]),
        )
        for part, count, (num_tokens, *of_streams) in zip(mine, passes, totals, strict=True)
        if num_tokens > 0
    ]


def _pack(engine: Zero3Engine, rows: Sequence[Row], config: TrainerConfig) -> list[MicroBatch]:
    share = config.share_prefixes
    return pack(rows, config.micro_batch_tokens, engine.cost, should_share_prefixes=share)


def _reference_logprobs(
    engine: Zero3Engine, rows: Sequence[Row], config: TrainerConfig, ranks: Collectives
) -> list[NDArray[np.float32]]:
    """[T] for each row, 0 where no token is trained; collective."""
    batches = _pack(engine, rows, config)
    count = ranks.gather(torch.tensor([len(batches)], dtype=torch.float64)).max()
    found = [np.zeros(len(row.tokens), np.float32) for row in rows]
    with engine.reference():
        for batch in fill_up(batches, int(count)):
            values = _score(engine, batch).cpu().numpy()
            for segment, number in enumerate(batch.rows):
                mine = batch.segment_ids_N.numpy() == segment
                found[number][rows[number].is_scored] = values[mine]
    return found
