"""One training step: from the groups of a batch to new weights and statistics.

    groups ─ advantages ─ rows ┬ minibatch 0: micro-batches ─► forward, loss, backward ... ─► update
                               └ minibatch 1: micro-batches ─► forward, loss, backward ... ─► update

Each rank has its own share of the groups. Losses are normalized by the tokens of the whole
minibatch over all ranks, and a group's minibatch depends only on its position in the whole batch.
So the number of ranks and of micro-batches changes nothing but rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from buffer.types import SamplingParams, TrajectoryGroup
from configs.schema import TrainerConfig
from trainer_pool.algorithms.advantages import grpo_advantages
from trainer_pool.algorithms.losses import policy_loss
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch, PassCost, Row, fill_up, pack
from trainer_pool.metrics import StepAccumulator, StepStats, not_finite
from trainer_pool.model.zero3 import Zero3Engine


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class StepBatch:
    """One rank's part of a batch."""

    version: int
    """Version of the weights at the start of the step."""
    group_ids: tuple[str, ...]
    """All groups of the batch, in the same order on each rank."""
    groups: tuple[TrajectoryGroup, ...]
    """This rank's share; may be empty."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Minibatch:
    """One rank's part of one update."""

    micro_batches: list[MicroBatch]
    """The same number on every rank."""
    num_tokens: float
    """Trained tokens over all ranks, each with its weight."""


def train_step(
    engine: Zero3Engine,
    ranks: Collectives,
    batch: StepBatch,
    config: TrainerConfig,
    *,
    learning_rate: float,
    before_update: Callable[[], None],
) -> StepStats:
    """Update the weights on `batch`; every rank calls it with its own share of the same batch.

    `before_update` is called before each change of the weights.
    Raises ValueError naming a group that was not sampled from the policy's own distribution.
    """
    minibatches = plan_minibatches(batch, config, ranks, engine.cost)
    proximal = _proximal_logprobs(engine, minibatches)
    totals, norms = StepAccumulator(engine.device, len(batch.group_ids)), list[float | None]()
    for minibatch, known in zip(minibatches, proximal, strict=True):
        for micro_batch, proximal_N in zip(minibatch.micro_batches, known, strict=True):
            _accumulate(
                engine,
                totals,
                micro_batch.to(engine.device),
                proximal_N,
                config,
                num_tokens=minibatch.num_tokens,
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
    proximal_N: Tensor | None,
    config: TrainerConfig,
    *,
    num_tokens: float,
) -> None:
    """Add the gradient of one micro-batch; `proximal_N` None means the current policy."""
    trainer_N, entropy_N, _ = engine.score(batch)
    proximal_N = trainer_N.detach() if proximal_N is None else proximal_N
    result = policy_loss(
        trainer_logprobs_BT=trainer_N,
        proximal_logprobs_BT=proximal_N,
        rollout_logprobs_BT=batch.rollout_logprobs_N,
        advantages_BT=batch.advantages_N,
        weights_BT=batch.weights_N,
        mask_BT=batch.mask_N,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        tis_cap=config.tis_cap,
        num_tokens=num_tokens,
    )
    loss = nan_if_not_finite(result.loss, trainer_N + proximal_N, batch.mask_N)
    totals.add_culprits(batch, engine.backward(loss))
    totals.add(batch, result, trainer_N, proximal_N, entropy_N.detach())


def nan_if_not_finite(loss: Tensor, logprobs_N: Tensor, mask_N: Tensor) -> Tensor:
    """`loss`, with a NaN gradient for trained tokens whose log-probability is not finite: then no
    rank applies the update. With clamped ratios -inf would have a finite one."""
    is_bad_N = not_finite(logprobs_N, mask_N)
    # The other tokens get no NaN, so that the groups that brought it can be told.
    bad = torch.where(is_bad_N, logprobs_N, 0.0).sum()
    return loss + bad * torch.where(is_bad_N.any(), math.nan, 0.0)


def _proximal_logprobs(
    engine: Zero3Engine, minibatches: Sequence[Minibatch]
) -> list[list[Tensor | None]]:
    """Log-probabilities before the first update, by minibatch and micro-batch.

    None if there is a single update: its own forward pass computes them.
    """
    if len(minibatches) <= 1:
        return [[None] * len(minibatch.micro_batches) for minibatch in minibatches]
    return [
        [_score(engine, micro_batch) for micro_batch in minibatch.micro_batches]
        for minibatch in minibatches
    ]


@torch.no_grad()
def _score(engine: Zero3Engine, batch: MicroBatch) -> Tensor:
    return engine.score(batch.to(engine.device)).logprobs


def plan_minibatches(
    batch: StepBatch, config: TrainerConfig, ranks: Collectives, cost: PassCost
) -> list[Minibatch]:
    """Split the step into updates with nearly equal numbers of groups; one collective.

    Updates without a trained token on any rank are omitted.
    """
    rows = _rows_by_minibatch(batch, config)
    share = config.share_prefixes
    mine = [
        pack(part, config.micro_batch_tokens, cost, should_share_prefixes=share) for part in rows
    ]
    tokens = [sum(row.weight * row.num_trained for row in part) for part in rows]
    passes = [len(parts) for parts in mine]
    every = ranks.gather(torch.tensor([*tokens, *passes], dtype=torch.float64))
    all_tokens, all_passes = every.view(ranks.num_ranks, 2, len(mine)).unbind(1)
    return [
        Minibatch(micro_batches=fill_up(parts, int(passes)), num_tokens=num_tokens)
        for parts, num_tokens, passes in zip(
            mine, all_tokens.sum(0).tolist(), all_passes.amax(0).tolist(), strict=True
        )
        if num_tokens > 0
    ]


def _rows_by_minibatch(batch: StepBatch, config: TrainerConfig) -> list[list[Row]]:
    place = {group_id: i for i, group_id in enumerate(batch.group_ids)}
    rows: list[list[Row]] = [[] for _ in range(config.num_minibatches)]
    for group in batch.groups:
        number = place[group.group_id]
        of_group = rows_of_group(
            group, batch.version, should_normalize_std=config.normalize_advantage_std
        )
        rows[number * config.num_minibatches // len(place)] += [
            replace(row, group=number) for row in of_group
        ]
    return rows


def rows_of_group(group: TrajectoryGroup, version: int, *, should_normalize_std: bool) -> list[Row]:
    """The group's trajectories that have a trained token, with their advantages.

    An episode's reward counts once, however many trajectories it has: each gets the episode's
    advantage, and the trained ones share its weight. A token whose log-probability from the engine
    is not finite is not trained. Raises ValueError for a group that was sampled with more than a
    temperature.
    """
    check_sampling(group)
    rewards = group.rewards_by_episode
    values = grpo_advantages(
        np.array([*rewards.values()]), should_normalize_std=should_normalize_std
    )
    advantages = dict(zip(rewards, values.tolist(), strict=True))
    masks = [t.loss_mask * np.isfinite(t.rollout_logprobs) for t in group.trajectories]
    trained = [(t, m) for t, m in zip(group.trajectories, masks, strict=True) if m.any()]
    shares = Counter(trajectory.episode for trajectory, _ in trained)
    return [
        Row(
            tokens=trajectory.tokens,
            loss_mask=mask,
            rollout_logprobs=np.where(mask, trajectory.rollout_logprobs, np.float32(0)),
            advantage=advantages[trajectory.episode],
            weight=1 / shares[trajectory.episode],
            temperature=group.sampling.temperature,
            is_current=trajectory.min_version == version,
        )
        for trajectory, mask in trained
    ]


def check_sampling(group: TrajectoryGroup) -> None:
    """Raises ValueError naming a sampling setting that importance ratios cannot account for."""
    plain = SamplingParams(temperature=group.sampling.temperature)
    for item in fields(SamplingParams):
        value = getattr(group.sampling, item.name)
        if value != getattr(plain, item.name):
            raise ValueError(
                f"group {group.group_id}: {item.name}={value} changed the distribution that its "
                "tokens were drawn from, which the trainer does not compute: its importance ratios "
                f"would be wrong; sample with {item.name}={getattr(plain, item.name)}"
            )
    if not group.sampling.temperature > 0:
        raise ValueError(
            f"group {group.group_id}: temperature={group.sampling.temperature}: greedy tokens have "
            "no log-probability to train on; sample with a temperature above 0"
        )
