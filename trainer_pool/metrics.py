"""Statistics of a training step: accumulated per token on each rank, then summed over ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from buffer.types import TrajectoryGroup
from trainer_pool.algorithms.losses import PolicyLoss, bounded
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch


@dataclass(kw_only=True, slots=True, frozen=True)
class StepStats:
    """One step over all ranks; NaN if not measured. Means are over trained tokens unless noted."""

    num_groups: int
    num_tokens: int
    """Trained tokens."""
    num_updates: int
    num_skipped_updates: int
    """Updates skipped because a gradient was not finite."""
    num_empty_updates: int
    """Updates skipped because the gradient was zero: weights and optimizer did not change."""
    loss: float
    """Mean over updates; so is `grad_norm` (before clipping, over finite norms)."""
    grad_norm: float
    lr: float
    reward_mean: float
    """Over episodes; so is `reward_std`."""
    reward_std: float
    reward_parts: dict[str, float]
    """Mean of each part over the episodes that have it."""
    zero_variance_fraction: float
    """Share of groups whose rewards are all equal: they have no gradient."""
    response_length_mean: float
    """Tokens that the policy generated, over trajectories."""
    truncated_fraction: float
    """Share of trajectories that ended at their token limit."""
    staleness_mean: float
    """Over groups, each by its oldest trained token; so are the next two."""
    staleness_max: int
    staleness_counts: dict[int, int]
    ratio_mean: float
    """Importance ratio proximal / rollout, not truncated; 1 if on-policy."""
    ratio_mean_abs_dev: float
    """Mean of |ratio - 1|."""
    ratio_max_abs_dev: float
    tis_clipped_fraction: float
    clip_fraction: float
    num_bounded_tokens: int
    """Tokens whose log ratio was clamped to `losses.MAX_LOG_RATIO`."""
    not_finite_fraction: float
    """Share of the tokens whose log-probability the trainer computed as NaN or infinite; an update
    with any is skipped."""
    padding_fraction: float
    """Share of the tokens in forward passes that belong to no trajectory: of passes that a rank
    makes only because another one has more."""
    shared_fraction: float
    """Share of the trajectories' tokens that no pass computed, as another trajectory begins with
    the same; 0 without trainer.share_prefixes."""
    not_finite_groups: tuple[str, ...]
    """Groups whose tokens gave a gradient that was not finite."""
    rollout_not_finite: dict[int, int]
    """By version: tokens that were not trained because the engine's log-probability was NaN or
    infinite."""
    entropy: float
    """Of the policy being trained, in nats."""
    logprob_diff_mean: float
    """|trainer - rollout| in trajectories sampled entirely by the trained version."""
    logprob_diff_max: float
    logprob_diff_tokens: int

    def record(self) -> dict[str, float | int | str]:
        """Flat, for a metrics log: mappings and lists as JSON, reward parts as reward/<part>."""
        flat: dict[str, float | int | str] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "reward_parts":
                flat |= {f"reward/{name}": mean for name, mean in value.items()}
            else:
                flat[item.name] = json.dumps(value) if isinstance(value, dict | tuple) else value
        return flat


_SUMS = (
    "loss",
    "tokens",
    "clipped",
    "truncated",
    "bounded",
    "entropy",
    "ratio",
    "ratio_dev",
    "diff",
    "diff_tokens",
    "not_finite",
)
_MAXIMA = ("ratio_dev_max", "diff_max")
_GROUP_COLUMNS = (
    "is_present",
    "staleness",
    "episodes",
    "reward",
    "reward_squared",
    "has_zero_variance",
    "trajectories",
    "response_length",
    "truncated",
)


def not_finite(logprobs_N: Tensor, mask_N: Tensor) -> Tensor:
    """Bool: trained tokens whose log-probability is NaN or infinite."""
    return ~logprobs_N.isfinite() & (mask_N != 0)


class StepAccumulator:
    """Accumulates one rank's part of a step; only `total` is a collective."""

    def __init__(self, device: torch.device, num_groups: int) -> None:
        # Kept on the device until the end of the step, so that no micro-batch waits for a copy.
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
        self._num_computed = self._num_padding = self._num_in_trajectories = 0
        # The last place is for rows of no group.
        self._culprits = torch.zeros(num_groups + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        batch: MicroBatch,
        result: PolicyLoss,
        trainer_N: Tensor,
        proximal_N: Tensor,
        entropy_N: Tensor,
    ) -> None:
        """Add the tokens of a micro-batch; `proximal_N`: from the policy at the step's start."""
        is_real_N = batch.mask_N != 0
        gap_N = (proximal_N - batch.rollout_logprobs_N).masked_fill(~is_real_N, 0.0)
        ratio_N = bounded(gap_N).exp()
        deviation_N = (ratio_N - 1).abs()
        gap_N = gap_N.abs() * batch.is_current_N
        per_sum = (
            result.loss,
            is_real_N,
            result.is_clipped_BT,
            result.is_truncated_BT,
            result.is_bounded_BT,
            entropy_N * is_real_N,
            ratio_N * is_real_N,
            deviation_N,
            gap_N,
            is_real_N & batch.is_current_N,
            not_finite(trainer_N, batch.mask_N),
        )
        self._sums += torch.stack([value.sum().double() for value in per_sum])
        self._num_computed += len(batch.row.tokens_L)
        self._num_padding += batch.num_padding
        self._num_in_trajectories += batch.num_tokens
        maxima = torch.stack([deviation_N.max().double(), gap_N.max().double()])
        self._maxima = torch.maximum(self._maxima, maxima)

    def add_culprits(self, batch: MicroBatch, not_finite_L: Tensor) -> None:
        """Positions of a micro-batch's row whose gradient is not finite."""
        is_culprit_N = (not_finite_L[batch.places_N] & (batch.mask_N != 0)).double()
        self._culprits.index_add_(0, batch.groups_N % len(self._culprits), is_culprit_N)

    def total(
        self,
        ranks: Collectives,
        *,
        groups: Sequence[TrajectoryGroup],
        group_ids: Sequence[str],
        version: int,
        norms: Sequence[float | None],
        learning_rate: float,
    ) -> StepStats:
        """Stats of the whole batch, equal on every rank; `groups` is this rank's share of it.

        `norms`: gradient norm of each update, None if it was skipped.
        """
        mine = _group_table(groups, group_ids, version)
        counts = [self._num_computed, self._num_padding, self._num_in_trajectories]
        numbers = torch.tensor(counts).double()
        parts = [self._sums.cpu(), self._maxima.cpu(), self._culprits.cpu(), numbers, mine.view(-1)]
        every = ranks.gather(torch.cat(parts))
        sizes = [len(part) for part in parts]
        all_sums, all_maxima, culprits, all_counts, tables = torch.split(every, sizes, dim=1)
        num_computed, num_padding, num_whole = all_counts.sum(0).tolist()
        sums = dict(zip(_SUMS, all_sums.sum(0).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, all_maxima.amax(0).tolist(), strict=True))
        table = tables.sum(0).view(mine.shape)
        present = table[table[:, 0] > 0]
        columns = dict(zip(_GROUP_COLUMNS, present.sum(0).tolist(), strict=True))
        staleness = [int(value) for value in present[:, 1].tolist()]
        num_groups, num_episodes = len(present), columns["episodes"]
        num_tokens, num_compared = sums["tokens"], sums["diff_tokens"]
        applied = [norm for norm in norms if norm is not None]
        reward_mean = _share(columns["reward"], num_episodes)
        reward_parts, rollout_not_finite = _named_sums(ranks, groups)
        variance = _share(columns["reward_squared"], num_episodes) - reward_mean**2
        return StepStats(
            num_groups=num_groups,
            num_tokens=int(num_tokens),
            num_updates=len(norms),
            num_skipped_updates=norms.count(None),
            num_empty_updates=norms.count(0.0),
            loss=_share(sums["loss"], len(norms)),
            grad_norm=_share(sum(applied), len(applied)),
            lr=learning_rate,
            reward_mean=reward_mean,
            reward_std=max(variance, 0.0) ** 0.5,
            reward_parts=reward_parts,
            zero_variance_fraction=_share(columns["has_zero_variance"], num_groups),
            response_length_mean=_share(columns["response_length"], columns["trajectories"]),
            truncated_fraction=_share(columns["truncated"], columns["trajectories"]),
            staleness_mean=_share(sum(staleness), num_groups),
            staleness_max=max(staleness, default=0),
            staleness_counts=dict(sorted(Counter(staleness).items())),
            ratio_mean=_share(sums["ratio"], num_tokens),
            ratio_mean_abs_dev=_share(sums["ratio_dev"], num_tokens),
            ratio_max_abs_dev=maxima["ratio_dev_max"] if num_tokens else math.nan,
            tis_clipped_fraction=_share(sums["truncated"], num_tokens),
            clip_fraction=_share(sums["clipped"], num_tokens),
            num_bounded_tokens=int(sums["bounded"]),
            not_finite_fraction=_share(sums["not_finite"], num_tokens),
            padding_fraction=_share(num_padding, num_computed),
            shared_fraction=_share(num_whole - (num_computed - num_padding), num_whole),
            not_finite_groups=tuple(
                group_id
                for group_id, number in zip(group_ids, culprits.sum(0).tolist(), strict=False)
                if number
            ),
            rollout_not_finite=rollout_not_finite,
            entropy=_share(sums["entropy"], num_tokens),
            logprob_diff_mean=_share(sums["diff"], num_compared),
            logprob_diff_max=maxima["diff_max"] if num_compared else math.nan,
            logprob_diff_tokens=int(num_compared),
        )


def _group_table(
    groups: Sequence[TrajectoryGroup], group_ids: Sequence[str], version: int
) -> Tensor:
    """[groups of the whole batch, columns]: rows of other ranks' groups are 0, so tables add up."""
    place = {group_id: i for i, group_id in enumerate(group_ids)}
    table = torch.zeros(len(group_ids), len(_GROUP_COLUMNS), dtype=torch.float64)
    for group in groups:
        rewards = torch.tensor([*group.rewards_by_episode.values()], dtype=torch.float64)
        # Only generated tokens: text of an environment or a tool follows the prompt, too.
        lengths = [sum(s.end - s.start for s in t.version_spans) for t in group.trajectories]
        table[place[group.group_id]] = torch.tensor(
            [
                1.0,
                version - group.min_version,
                len(rewards),
                rewards.sum(),
                rewards.square().sum(),
                bool((rewards == rewards[0]).all()),
                len(lengths),
                sum(lengths),
                sum(t.finish_reason == "length" for t in group.trajectories),
            ],
            dtype=torch.float64,
        )
    return table


def _named_sums(
    ranks: Collectives, groups: Sequence[TrajectoryGroup]
) -> tuple[dict[str, float], dict[int, int]]:
    """The mean of each reward part, and by version the tokens whose log-probability from the engine
    is not finite; over all ranks, whose groups may have different ones. Two collectives."""
    parts: dict[str, list[float]] = {}
    for group in groups:
        for named in {t.episode: t.reward_parts for t in group.trajectories}.values():
            for name, value in named.items():
                total = parts.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += 1
    every: dict[str, list[float]] = {}
    bad = Counter[int]()
    for text in ranks.gather_texts(json.dumps([parts, _rollout_not_finite(groups)])):
        their_parts, their_bad = json.loads(text)
        bad.update({int(version): number for version, number in their_bad.items()})
        for name, (value, number) in their_parts.items():
            total = every.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += number
    means = {name: value / number for name, (value, number) in sorted(every.items())}
    return means, dict(sorted(bad.items()))


def _rollout_not_finite(groups: Sequence[TrajectoryGroup]) -> Counter[int]:
    bad = Counter[int]()
    for group in groups:
        for t in group.trajectories:
            is_bad = ~np.isfinite(t.rollout_logprobs) & (t.loss_mask != 0)
            if is_bad.any():
                bad.update(t.token_versions()[is_bad].tolist())
    return bad


def _share(total: float, number: float) -> float:
    return total / number if number else math.nan
