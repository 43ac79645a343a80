"""One training step: from the groups of a batch to new weights and statistics.

    groups ─ rows ┬ minibatch 0: micro-batches ─► forward, loss, backward ... ─► update
                  └ minibatch 1: micro-batches ─► forward, loss, backward ... ─► update

Each rank has its own part of the groups. The denominator of a loss is that of the whole minibatch
over all ranks, and a group's minibatch depends only on its position in the whole batch. So the
number of ranks and of micro-batches changes nothing but rounding. Each stream has a loss and a
denominator of its own; an update adds their gradients. With `trainer.gradient_accumulation_steps`
several steps make one update, whose denominator is the sum of theirs. A critic is updated after
the policy, with the same micro-batches.

Letters: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.probes import beginnings
from configs.algorithm_schema import POLICY
from configs.choices import Proximal
from configs.run_files import Scalar
from configs.schema import TrainerConfig
from trainer_pool.algorithms.load_balancing import RouterSums
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.types import BatchStatistics, LossInputs
from trainer_pool.collectives import Collectives
from trainer_pool.critic import CriticStep, update_critic
from trainer_pool.data.packing import MicroBatch, Row, fill_up, pack
from trainer_pool.data.rows import StepBatch, rows_by_group, weighted
from trainer_pool.data.trained import TrainedLog
from trainer_pool.guard import SkipReason, Update, UpdateGuard
from trainer_pool.metrics import StepAccumulator
from trainer_pool.model.routers import watching
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.speed import StepSpeed, peak_tflops


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Minibatch:
    """One rank's part of one update."""

    micro_batches: list[MicroBatch]
    """Every rank has the same number."""
    denominators: Mapping[str, float]
    """The denominator of each stream's loss, over all ranks."""
    is_mean: bool
    """The policy's loss is divided by its denominator, which otherwise is 1."""
    rows: list[Row] = field(default_factory=list)
    """This rank's."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class AtStart:
    """One minibatch on this rank, by the policy at the start of the step."""

    scores: list[Tensor | None]
    """[N] log-probabilities of each micro-batch; None if nothing reads them, or if there is a
    single update, whose own forward pass gives them."""
    routers: RouterSums
    """The sums of all its tokens, if the load of experts is balanced."""


@dataclass(kw_only=True, slots=True)
class Accumulation:
    """The gradients of several steps, which are one update."""

    is_complete: bool = False
    """The step to come is the last of them."""
    divisor: float = 0.0
    """The divisor of their sum so far; 0: there is no gradient yet."""

    def add(self, minibatch: Minibatch) -> None:
        self.divisor = self.divisor + minibatch.denominators[POLICY] if minibatch.is_mean else 1.0


def train_step(
    policy: Zero3Policy,
    ranks: Collectives,
    batch: StepBatch,
    config: TrainerConfig,
    algorithm: Algorithm,
    *,
    learning_rate: float,
    before_update: Callable[[], None],
    guard: UpdateGuard | None = None,
    accumulation: Accumulation | None = None,
    critic: CriticStep | None = None,
    trained: TrainedLog | None = None,
) -> dict[str, Scalar]:
    """Update the weights on `batch`; every rank calls it with its own part of the same batch.

    `before_update` is called before each change of the weights. `guard` may skip updates.
    With `accumulation` the gradient is added to those of the steps before, and the weights change
    only if it `is_complete`. `critic` gives the values of `gae`, and learns from the batch.
    `trained` notes what the loss had of each trajectory.
    Raises ValueError naming a group that was not sampled from the policy's own distribution.
    """
    speed = StepSpeed(device=policy.device)
    with speed.timing("plan"):
        minibatches = plan_minibatches(policy, batch, config, algorithm, ranks, critic)
    with speed.timing("score"):
        starts = _at_start(policy, minibatches, algorithm)
    totals, updates = StepAccumulator(policy.device, len(batch.group_ids)), list[Update]()

    def update(divisor: float = 1.0) -> None:
        before_update()
        with speed.timing("update"):
            if critic is not None and critic.holds_policy:
                updates.append(Update(policy.step(learning_rate, norm_limit=0.0)))
            else:
                updates.append(_update(policy, ranks, totals, guard, learning_rate, divisor))

    for number, (minibatch, start) in enumerate(zip(minibatches, starts, strict=True)):
        with speed.timing("passes"):
            statistics = _statistics(policy, minibatch, start, algorithm, ranks)
            for micro_batch, scored_N in zip(minibatch.micro_batches, start.scores, strict=True):
                trainer_N = _accumulate(
                    policy,
                    totals,
                    micro_batch.to(policy.device),
                    scored_N,
                    algorithm,
                    statistics,
                    minibatch.denominators,
                    is_first=number == 0,
                    should_divide=accumulation is None,
                )
                if trained is not None and micro_batch.num_tokens:
                    trained.note(batch.group_ids, minibatch.rows, micro_batch, trainer_N)
                speed.multiply_adds += micro_batch.cost
        if accumulation is None:
            update()
        else:
            accumulation.add(minibatch)
    if accumulation is not None and accumulation.is_complete and accumulation.divisor:
        update(accumulation.divisor)
        accumulation.divisor = 0.0
    totals.add_means(policy.take_routing())
    of_critic: dict[str, float] = {}
    if critic is not None:
        with speed.timing("critic"):
            parts = [(part.micro_batches, part.denominators[POLICY]) for part in minibatches]
            of_critic = update_critic(critic, parts, ranks, before_update)
    record = totals.total(
        ranks,
        groups=batch.groups,
        group_ids=batch.group_ids,
        version=batch.version,
        num_minibatches=len(minibatches),
        updates=updates,
        learning_rate=learning_rate,
        speed=speed,
        peak_tflops=config.peak_tflops or peak_tflops(policy.device),
    )
    return record | of_critic


def _update(
    policy: Zero3Policy,
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
    norm = policy.step(learning_rate, norm_limit=limit, divisor=divisor)
    if norm is None:
        skipped = SkipReason.not_finite
    elif skipped is None and limit is not None and norm > limit:
        skipped = SkipReason.spike
    update = Update(norm, skipped)
    if guard is not None:
        guard.note(update)
    return update


def _accumulate(
    policy: Zero3Policy,
    totals: StepAccumulator,
    batch: MicroBatch,
    scored_N: Tensor | None,
    algorithm: Algorithm,
    statistics: BatchStatistics,
    denominators: Mapping[str, float],
    *,
    is_first: bool,
    should_divide: bool,
) -> Tensor:
    """Add the gradient of one micro-batch; returns its log-probabilities [N].

    `scored_N`: log-probabilities at the start of the step; None if nothing has changed since, as in
    the first minibatch (`is_first`), or if the algorithm does not need them.
    `should_divide`: whether the gradient is that of a mean, or of a sum that is divided later.
    """
    should_balance = algorithm.config.load_balancing_weight > 0
    with watching(policy.gates, batch, lambda: policy.part, has_gradient=should_balance) as layers:
        trainer_N, entropy_N, _ = policy.score(batch)
    routers = RouterSums.of_pass(layers)
    totals.add_routers(routers)
    if batch.num_tokens == 0:  # backward all the same: other ranks wait for this pass
        policy.backward(trainer_N.masked_fill(batch.mask_N == 0, 0.0).sum())
        totals.add_pass(batch)
        return trainer_N
    if policy.is_replaying:
        totals.add_means({"routes_replayed": batch.row.known_routes})
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
    if should_balance:
        result = result.plus(algorithm.balance_objective(routers, statistics))
    if scored_N is not None:
        moved_N = inputs.log_ratio(trainer_N.detach(), scored_N)
        moved = {"update_kl": moved_N.expm1() - moved_N}
        result = replace(result, diagnostics={**result.diagnostics, **moved})
    loss = nan_if_not_finite(result.loss, trainer_N + start_N)
    if not should_divide:
        loss = loss * denominators[POLICY]
    totals.add_culprits(batch, policy.backward(loss))
    is_at_start = is_first or scored_N is not None
    totals.add(batch, inputs, result, start_N, is_at_start=is_at_start)
    return trainer_N


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


def _at_start(
    policy: Zero3Policy, minibatches: Sequence[Minibatch], algorithm: Algorithm
) -> list[AtStart]:
    config = algorithm.config
    is_recomputed = config.needs_proximal and config.proximal is Proximal.recomputed
    needs_scores = algorithm.needs_batch or (len(minibatches) > 1 and is_recomputed)
    gates = policy.gates if config.load_balancing_weight else ()
    found = []
    for minibatch in minibatches:
        scores: list[Tensor | None] = []
        routers = RouterSums.of_pass([])
        for micro_batch in minibatch.micro_batches:
            scored_N = None
            if needs_scores or gates:
                batch = micro_batch.to(policy.device)
                with watching(gates, batch, lambda: policy.part) as layers:
                    scored_N = _score(policy, batch)
                routers = routers.plus(RouterSums.of_pass(layers))
            scores.append(scored_N if needs_scores else None)
        found.append(AtStart(scores=scores, routers=routers))
    return found


@torch.no_grad()
def _score(policy: Zero3Policy, batch: MicroBatch) -> Tensor:
    return policy.score(batch.to(policy.device)).logprobs


def _statistics(
    policy: Zero3Policy,
    minibatch: Minibatch,
    start: AtStart,
    algorithm: Algorithm,
    ranks: Collectives,
) -> BatchStatistics:
    """Statistics of the update's tokens on all ranks, if something needs them; collective."""

    def sum_over_ranks(sums: Tensor) -> Tensor:
        return ranks.gather(sums).sum(0)

    found = BatchStatistics()
    if algorithm.needs_batch:
        parts = []
        for batch, scored_N in zip(minibatch.micro_batches, start.scores, strict=True):
            assert scored_N is not None
            batch = batch.to(policy.device)
            parts.append(loss_inputs(batch, scored_N, scored_N, None, algorithm, found))
        found = algorithm.statistics(parts, sum_over_ranks)
    table_GC = start.routers.table_GC
    if len(table_GC):
        total_GC = sum_over_ranks(table_GC.view(-1)).view(table_GC.shape)
        total_GC = total_GC.to(policy.device, torch.float32)
        found = replace(found, routers=RouterSums(table_GC=total_GC))
    return found


def score_probes(
    policy: Zero3Policy, text: Sequence[int], config: TrainerConfig, ranks: Collectives
) -> list[list[float]]:
    """Log-probabilities of the compared tokens of each beginning of `text`, on every rank;
    collective."""
    rows = [
        Row(
            tokens=np.array(text[:length], np.int32),
            loss_mask=(np.arange(length) >= start).astype(np.uint8),
            rollout_logprobs=np.zeros(length, np.float32),
        )
        for length, start in beginnings(len(text))
    ]
    mine = slice(ranks.rank, None, ranks.num_ranks)
    every = [torch.zeros(row.num_trained) for row in rows]
    scores = score_rows(policy, rows[mine], config, ranks)
    for own, row, values in zip(every[mine], rows[mine], scores, strict=True):
        own.copy_(torch.from_numpy(values[row.is_scored]))
    total = ranks.gather(torch.cat(every)).sum(0)
    return [part.tolist() for part in torch.split(total, [len(own) for own in every])]


def plan_minibatches(
    policy: Zero3Policy,
    batch: StepBatch,
    config: TrainerConfig,
    algorithm: Algorithm,
    ranks: Collectives,
    critic: CriticStep | None = None,
) -> list[Minibatch]:
    """Split the batch into updates with nearly equal numbers of groups; collective.

    Updates without a trained token on any rank are omitted.
    """

    def score_reference(rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        # It chooses its own experts: those of a token are the policy's.
        own = [replace(row, routes=None) for row in rows]
        with policy.reference():
            return score_rows(policy, own, config, ranks)

    def values_of(rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        assert critic is not None
        return score_rows(policy, rows, config, ranks, critic.critic.values)

    policy.check_groups(batch.groups)
    places = batch.places
    rows = rows_by_group(
        batch,
        algorithm,
        ranks,
        score_reference if algorithm.needs_reference else None,
        values_of if critic is not None else None,
    )
    parts: list[list[list[Row]]] = [[] for _ in range(config.num_minibatches)]
    for group, of_group in zip(batch.groups, rows, strict=True):
        parts[places[group.group_id] * config.num_minibatches // len(places)].append(of_group)
    found = [weighted(part, algorithm) for part in parts]
    mine = [_pack(policy, part, config) for part, _ in found]
    names = [POLICY, *algorithm.streams]
    shares = [[math.nan if of[name] is None else of[name] for name in names] for _, of in found]
    tokens = [sum(int(batch.is_trained_N.sum()) for batch in batches) for batches in mine]
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
            rows=rows,
        )
        for part, (rows, _), count, (num_tokens, *of_streams) in zip(
            mine, found, passes, totals, strict=True
        )
        if num_tokens > 0
    ]


def _pack(policy: Zero3Policy, rows: Sequence[Row], config: TrainerConfig) -> list[MicroBatch]:
    share = config.share_prefixes
    return pack(rows, config.micro_batch_tokens, policy.cost, should_share_prefixes=share)


def score_rows(
    policy: Zero3Policy,
    rows: Sequence[Row],
    config: TrainerConfig,
    ranks: Collectives,
    score: Callable[[MicroBatch], Tensor] | None = None,
) -> list[NDArray[np.float32]]:
    """[T] log-probabilities of each row, or what `score` gives each trained token [N], in the
    passes of a step; 0 where no token is trained. Collective."""
    batches = _pack(policy, rows, config)
    count = ranks.gather(torch.tensor([len(batches)], dtype=torch.float64)).max()
    found = [np.zeros(len(row.tokens), np.float32) for row in rows]
    for batch in fill_up(batches, int(count)):
        with torch.no_grad():
            scored_N = score(batch.to(policy.device)) if score else _score(policy, batch)
        values = scored_N.cpu().numpy()
        for segment, number in enumerate(batch.rows):
            mine = batch.segment_ids_N.numpy() == segment
            found[number][rows[number].is_scored] = values[mine]
    return found
