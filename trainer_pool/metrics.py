"""Statistics of a training step: accumulated per token on each rank, then summed over ranks."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from buffer.types import TrajectoryGroup
from configs.run_files import Scalar
from trainer_pool.algorithms.load_balancing import RouterSums
from trainer_pool.algorithms.registry import Objective
from trainer_pool.algorithms.types import LossInputs
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch
from trainer_pool.guard import EffectiveSampleSize, SkipReason, Update
from trainer_pool.model.checkpoint_names import name_patterns
from trainer_pool.speed import StepSpeed

STALENESS_BUCKETS = ("0", "1", "2-3", "4-7", "8-15", "16+")
_BUCKET_STARTS = (1, 2, 4, 8, 16)
_MAXIMA = ("ratio_dev", "diff")
_ESS_SUMS = ("tokens", "ratio_mean", "ratio_squared")
_GROUP_COLUMNS = (
    "is_present",
    "staleness",
    "episodes",
    "reward",
    "reward_squared",
    "has_zero_variance",
    "trajectories",
    "response_length",
    "response_length_max",
    "truncated",
)
_LONGEST = _GROUP_COLUMNS.index("response_length_max")


class StepAccumulator:
    """Accumulates one rank's part of a step; only `total` and `ess_of_update` are collectives.

    Example:

        totals = StepAccumulator(device, num_groups=16)
        totals.add(batch, inputs, result, start_N)      # each micro-batch
        totals.total(ranks, ...)                        # {"loss": 0.1, "entropy/staleness_1": ...}
    """

    def __init__(self, device: torch.device, num_groups: int) -> None:
        # Kept on the device until the end of the step, so that no micro-batch waits for a copy.
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        """By name: float64 sums by bucket of staleness."""
        self._metrics: dict[str, Tensor] = {}
        """By name: a sum and a count."""
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
        self._bucket_starts = torch.tensor(_BUCKET_STARTS, device=device)
        self._num_computed = self._num_padding = self._num_in_trajectories = 0
        # Not a difference of `_sums`: after a NaN that would be NaN for the rest of the step.
        self._update_sums: dict[str, Tensor] = {}
        """Like `_sums`, of `_ESS_SUMS` since the last `ess_of_update`."""
        self._routers = RouterSums.of_pass([])
        # The last element is for rows of no group.
        self._culprits = torch.zeros(num_groups + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        batch: MicroBatch,
        inputs: LossInputs,
        result: Objective,
        start_N: Tensor,
        *,
        is_at_start: bool = True,
    ) -> None:
        """Add a micro-batch; `start_N`: log-probabilities by the policy at the step's start, or
        after its first updates if not `is_at_start`: then engines are not compared with them."""
        mask_N, is_current_N = inputs.mask_N, batch.is_current_N * is_at_start
        gap_N = inputs.log_ratio(start_N, inputs.rollout_logprobs_N)
        ratio_N = gap_N.exp()
        deviation_N, apart_N = (ratio_N - 1).abs(), gap_N.abs() * is_current_N
        own = {
            "tokens": mask_N,
            "ratio_mean": ratio_N,
            "ratio_squared": ratio_N.square(),
            "ratio_mean_abs_dev": deviation_N,
            "logprob_diff": apart_N,
            "compared": is_current_N,
            "not_finite": ~inputs.trainer_logprobs_N.isfinite(),
        }
        if inputs.entropy_N is not None:
            own["entropy"] = inputs.entropy_N
        self._add_tokens({**result.diagnostics, **own}, inputs)
        self.add_means({name: torch.stack(pair) for name, pair in result.metrics.items()})
        self._loss += result.loss.double()
        self.add_pass(batch)
        maxima = torch.stack([deviation_N.max().double(), apart_N.max().double()])
        self._maxima = torch.maximum(self._maxima, maxima)

    def add_means(self, pairs: Mapping[str, Tensor]) -> None:
        """Add to means of the whole step; by name, [2]: a sum and a count."""
        for name, pair in pairs.items():
            self._metrics[name] = self._metrics.get(name, 0) + pair.double()

    def add_pass(self, batch: MicroBatch) -> None:
        """Count the tokens of a micro-batch's pass; for one without trained tokens this is all."""
        self._num_computed += len(batch.row.tokens_L)
        self._num_padding += batch.num_padding
        self._num_in_trajectories += batch.num_tokens

    @torch.no_grad()
    def add_routers(self, sums: RouterSums) -> None:
        """Add what the routers did in a pass: on every rank in each, with or without tokens."""
        self._routers = self._routers.plus(sums)

    def ess_of_update(self, ranks: Collectives) -> EffectiveSampleSize:
        """The effective sample size of the tokens added since the last call; collective."""
        zeros_B = torch.zeros(len(STALENESS_BUCKETS), dtype=torch.float64)
        sums = torch.stack([self._update_sums.pop(name, zeros_B).cpu() for name in _ESS_SUMS])
        tokens_B, ratios_B, squares_B = ranks.gather(sums.view(-1)).sum(0).view(3, -1)
        shares_B = ratios_B.square() / (tokens_B * squares_B)
        lowest = int(torch.where(tokens_B > 0, shares_B, math.inf).argmin())
        total = tokens_B.sum() * squares_B.sum()
        return EffectiveSampleSize(
            num_tokens=int(tokens_B.sum()),
            share=_ratio(float(ratios_B.sum().square()), float(total)),
            lowest_bucket=STALENESS_BUCKETS[lowest],
        )

    def add_culprits(self, batch: MicroBatch, not_finite_L: Tensor) -> None:
        """Add the groups whose gradient is not finite at these positions of a micro-batch's row."""
        is_culprit_N = not_finite_L[batch.places_N].double()
        self._culprits.index_add_(0, batch.groups_N % len(self._culprits), is_culprit_N)

    def _add_tokens(self, values: Mapping[str, Tensor], inputs: LossInputs) -> None:
        stacked_KN = torch.stack([value.double() for value in values.values()])
        stacked_KN = stacked_KN.masked_fill(~inputs.mask_N, 0.0)
        buckets_N = torch.bucketize(inputs.staleness_N, self._bucket_starts, right=True)
        zeros_KB = stacked_KN.new_zeros(len(values), len(STALENESS_BUCKETS))
        for name, sums_B in zip(values, zeros_KB.index_add(1, buckets_N, stacked_KN), strict=True):
            self._sums[name] = self._sums.get(name, 0) + sums_B
            if name in _ESS_SUMS:
                self._update_sums[name] = self._update_sums.get(name, 0) + sums_B

    def total(
        self,
        ranks: Collectives,
        *,
        groups: Sequence[TrajectoryGroup],
        group_ids: Sequence[str],
        version: int,
        num_minibatches: int,
        updates: Sequence[Update],
        learning_rate: float,
        speed: StepSpeed,
        peak_tflops: float | None = None,
    ) -> dict[str, Scalar]:
        """Statistics of the whole batch, equal on every rank but for its speed; collective. They
        are flat, as in `metrics.jsonl`; docs/metrics.md says what each is. NaN if not
        measured. Means are over trained tokens unless noted; mappings and lists are JSON. A name
        that a user's loss chooses never replaces one of ours. `groups` is this rank's part of the
        batch, `group_ids` names all of it.
        """
        reasons = [update.skipped for update in updates]
        norms = [update.norm for update in updates]
        mine = _group_table(groups, group_ids, version)
        all_maxima, culprits, all_counts, tables, routed = self._gather(ranks, mine)
        routers = RouterSums(table_GC=routed.sum(0).view(self._routers.table_GC.shape))
        num_computed, num_padding, num_whole = all_counts.sum(0).tolist()
        maxima = dict(zip(_MAXIMA, all_maxima.amax(0).tolist(), strict=True))
        named = self._named_totals(ranks, groups, _by_task(groups, group_ids, mine), version)
        tokens = {name: sum(sums) for name, sums in named["tokens"].items()}
        table = tables.sum(0).view(mine.shape)
        present = table[table[:, 0] > 0]
        columns = dict(zip(_GROUP_COLUMNS, present.sum(0).tolist(), strict=True))
        staleness = [int(value) for value in present[:, 1].tolist()]
        num_groups, num_episodes = len(present), columns["episodes"]
        num_tokens, num_compared = tokens.get("tokens", 0.0), tokens.get("compared", 0.0)
        applied = [update.norm for update in updates if update.norm is not None]
        reward_mean = _ratio(columns["reward"], num_episodes)
        variance = _ratio(columns["reward_squared"], num_episodes) - reward_mean**2
        not_finite = sorted(named["rollout_not_finite"].items())
        return {
            **_token_means(named["tokens"]),
            **{name: _ratio(*pair) for name, pair in named["metrics"].items()},
            **routers.metrics(),
            **speed.record(int(num_whole), peak_tflops),
            **{f"reward/{n}": _ratio(*pair) for n, pair in sorted(named["rewards"].items())},
            **_means_by_task(named["tasks"]),
            "num_groups": num_groups,
            "num_tokens": int(num_tokens),
            "num_updates": len(norms),
            "num_skipped_updates": norms.count(None),  # not finite
            "num_empty_updates": norms.count(0.0),  # neither weights nor optimizer changed
            "num_spikes": reasons.count(SkipReason.spike),
            "num_low_ess": reasons.count(SkipReason.low_ess),
            "loss": _ratio(named["loss"]["loss"][0], num_minibatches),
            "grad_norm": _ratio(sum(applied), len(applied)),
            "lr": learning_rate,
            "reward_mean": reward_mean,
            "reward_std": max(variance, 0.0) ** 0.5,
            "zero_variance_fraction": _ratio(columns["has_zero_variance"], num_groups),
            "response_length_mean": _ratio(columns["response_length"], columns["trajectories"]),
            "response_length_max": int(max(present[:, _LONGEST].tolist(), default=0)),
            "truncated_fraction": _ratio(columns["truncated"], columns["trajectories"]),
            # Over groups, each by its oldest trained token.
            "staleness_mean": _ratio(sum(staleness), num_groups),
            "staleness_max": max(staleness, default=0),
            "staleness_counts": json.dumps(dict(sorted(Counter(staleness).items()))),
            "ratio_max_abs_dev": maxima["ratio_dev"] if num_tokens else math.nan,  # not truncated
            # Tokens whose log ratio was clamped to `MAX_LOG_RATIO`.
            "num_bounded_tokens": int(tokens.get("bounded_fraction", 0.0)),
            "not_finite_fraction": _ratio(tokens.get("not_finite", 0.0), num_tokens),
            "not_finite_groups": json.dumps([*compress(group_ids, culprits.sum(0).tolist())]),
            "rollout_not_finite": json.dumps({v: int(number) for v, (number,) in not_finite}),
            # Passes that a rank makes only because another rank has more.
            "padding_fraction": _ratio(num_padding, num_computed),
            # Of the trajectories' tokens: another trajectory of the pass begins with the same.
            "shared_fraction": _ratio(num_whole - (num_computed - num_padding), num_whole),
            # |trainer - rollout| in trajectories sampled entirely by the trained version.
            "logprob_diff_mean": _ratio(tokens.get("logprob_diff", 0.0), num_compared),
            "logprob_diff_max": maxima["diff"] if num_compared else math.nan,
            "logprob_diff_tokens": int(num_compared),
        }

    def _gather(self, ranks: Collectives, groups: Tensor) -> tuple[Tensor, ...]:
        """By rank: maxima, culprits, counts of tokens, the table of groups, and the routers'."""
        numbers = torch.tensor([self._num_computed, self._num_padding, self._num_in_trajectories])
        routers_GC = self._routers.table_GC
        parts = [self._maxima, self._culprits, numbers, groups.view(-1), routers_GC.view(-1)]
        every = ranks.gather(torch.cat([part.double().cpu() for part in parts]))
        return torch.split(every, [*map(len, parts)], 1)

    def _named_totals(
        self,
        ranks: Collectives,
        groups: Sequence[TrajectoryGroup],
        by_task: dict[str, list[float]],
        version: int,
    ) -> dict[str, dict[str, list[float]]]:
        """By kind and name, sums over all ranks, which need not have the same names."""
        mine = {
            "loss": {"loss": [float(self._loss)]},
            "tokens": {name: sums.tolist() for name, sums in self._sums.items()},
            "metrics": {name: pair.tolist() for name, pair in self._metrics.items()},
            "rewards": _reward_parts(groups, version),
            "tasks": by_task,
            "rollout_not_finite": _rollout_not_finite(groups),
        }
        every: dict[str, dict[str, list[float]]] = {kind: {} for kind in mine}
        for text in ranks.gather_texts(json.dumps(mine)):
            for kind, theirs in json.loads(text).items():
                for name, sums in theirs.items():
                    before = every[kind].get(name, [0.0] * len(sums))
                    every[kind][name] = [a + b for a, b in zip(before, sums, strict=True)]
        return every


_NOT_REPORTED = ("tokens", "ratio_squared", "logprob_diff", "compared", "not_finite")
"""Sums that are reported otherwise, or only serve to compute another figure."""


def _token_means(by_bucket: Mapping[str, list[float]]) -> dict[str, float]:
    """Means of sums over trained tokens by bucket of staleness: by name, and by
    name/staleness_BUCKET for the buckets that have tokens."""
    columns = {"": {name: sum(sums) for name, sums in by_bucket.items()}}
    for place, (bucket, number) in enumerate(
        zip(STALENESS_BUCKETS, by_bucket.get("tokens", ()), strict=False)
    ):
        if number:
            column = {name: sums[place] for name, sums in by_bucket.items()}
            columns[f"/staleness_{bucket}"] = column
    found = {}
    for suffix, sums in columns.items():
        num_tokens = sums.get("tokens", 0.0)
        for name in sorted(sums.keys() - set(_NOT_REPORTED)):
            found[name + suffix] = _ratio(sums[name], num_tokens)
        squares = num_tokens * sums.get("ratio_squared", 0.0)
        found["ess" + suffix] = _ratio(sums.get("ratio_mean", 0.0) ** 2, squares)
    return found


def _group_table(
    groups: Sequence[TrajectoryGroup], group_ids: Sequence[str], version: int
) -> Tensor:
    """[groups of the whole batch, columns]: rows of other ranks' groups are 0, so that the sum of
    all ranks' tables is that of the batch."""
    place = {group_id: i for i, group_id in enumerate(group_ids)}
    table = [[0.0] * len(_GROUP_COLUMNS) for _ in group_ids]
    for group in groups:
        rewards = [*group.rewards_by_player.values()]
        # Only generated tokens: text of an environment or a tool may follow the prompt, too.
        lengths = [sum(s.end - s.start for s in t.version_spans) for t in group.trajectories]
        table[place[group.group_id]] = [
            1.0,
            version - group.min_version,
            len(rewards),
            sum(rewards),
            sum(reward * reward for reward in rewards),
            not group.teaches,
            len(lengths),
            sum(lengths),
            max(lengths),
            sum(t.finish_reason == "length" for t in group.trajectories),
        ]
    return torch.tensor(table, dtype=torch.float64).view(len(group_ids), len(_GROUP_COLUMNS))


def _reward_parts(groups: Sequence[TrajectoryGroup], version: int) -> dict[str, list[float]]:
    """By name of a part, and by name/staleness_BUCKET of the group: its sum, and the number of
    episodes that have it."""
    sums: dict[str, list[float]] = {}
    for group in groups:
        bucket = STALENESS_BUCKETS[bisect_right(_BUCKET_STARTS, version - group.min_version)]
        for parts in {t.player: t.reward_parts for t in group.trajectories}.values():
            for name, value in parts.items():
                for key in (name, f"{name}/staleness_{bucket}"):
                    total = sums.setdefault(key, [0.0, 0.0])
                    total[0] += value
                    total[1] += 1
    return sums


def _by_task(
    groups: Sequence[TrajectoryGroup], group_ids: Sequence[str], table: Tensor
) -> dict[str, list[float]]:
    """By task: the sum of its groups' rows in this rank's `table`, which has those of the batch."""
    tasks = {group.group_id: group.prompt.task for group in groups}
    names = [tasks.get(group_id) for group_id in group_ids]
    return {
        task: table[[name == task for name in names]].sum(0).tolist() for task in tasks.values()
    }


def _means_by_task(sums: Mapping[str, list[float]]) -> dict[str, float]:
    means = {}
    for task, row in sorted(sums.items()):
        columns = dict(zip(_GROUP_COLUMNS, row, strict=True))
        num_groups = columns["is_present"]
        means[f"task/{task}/groups"] = num_groups
        means[f"task/{task}/reward"] = columns["reward"] / columns["episodes"]
        means[f"task/{task}/zero_variance"] = columns["has_zero_variance"] / num_groups
        means[f"task/{task}/response_length"] = columns["response_length"] / columns["trajectories"]
    return means


def _rollout_not_finite(groups: Sequence[TrajectoryGroup]) -> dict[str, list[float]]:
    """By version: tokens that are not trained because of the engine's log-probability."""
    bad = Counter[int]()
    for group in groups:
        if np.isfinite(np.concatenate([t.rollout_logprobs for t in group.trajectories])).all():
            continue
        for t in group.trajectories:
            is_bad = ~np.isfinite(t.rollout_logprobs) & (t.loss_mask != 0)
            if is_bad.any():
                bad.update(t.token_versions()[is_bad].tolist())
    return {str(version): [float(number)] for version, number in bad.items()}


def _ratio(total: float, number: float) -> float:
    return total / number if number else math.nan


def check_engines_agree(
    logprob_diff_mean: float, num_tokens: int, served: Iterable[str], most: float
) -> None:
    """Raises RuntimeError naming the `served` weights if engines serve others.

    `logprob_diff_mean`: |trainer - engine| over `num_tokens` tokens of the version being trained,
    which may be `most`.
    """
    if logprob_diff_mean > most:
        raise RuntimeError(
            "the engines do not serve the trainer's weights: the log-probabilities of "
            f"{num_tokens} tokens that they sampled with the version being trained differ by "
            f"{logprob_diff_mean:.2g} nats on average, more than {most:g}. Their "
            f"loader may skip served names ({name_patterns(served)}), or they compute the "
            "model differently: compare the log of engine-0 with the model's config"
        )
