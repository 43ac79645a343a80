"""Turns the groups of a batch into rows with the advantage, weight and staleness of each token.

groups ─ rows ─ log-probabilities of the reference ┐
     └─ episodes of all ranks ─────────────────────┴─► advantages ─ aggregation ─► weights
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.types import (
    ADVANTAGE_COLUMN,
    CANDIDATES_COLUMN,
    ROUTES_COLUMN,
    TEMPERATURE_COLUMN,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)
from configs.advantages import Gae
from configs.algorithm_schema import (
    POLICY,
    REFERENCE_COLUMN,
    RETURN_COLUMN,
    TEACHER_COLUMN,
    VALUE_COLUMN,
    StreamConfig,
)
from configs.choices import KLPlace, StreamTokens
from trainer_pool.algorithms.advantages import AdvantageInputs, overlong_penalty, returns
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import Row


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class StepBatch:
    """One rank's part of a batch."""

    version: int
    """Version of the weights at the start of the step."""
    group_ids: tuple[str, ...]
    """All groups of the batch, in the same order on each rank."""
    groups: tuple[TrajectoryGroup, ...]
    """This rank's part; may be empty."""

    @property
    def places(self) -> Mapping[str, int]:
        """The index of each group in the whole batch, by its id."""
        return {group_id: place for place, group_id in enumerate(self.group_ids)}


RowScores = Callable[[Sequence[Row]], Sequence[NDArray[np.float32]]]
"""[T] numbers of a second model for each row, 0 where no token is trained; collective."""


def rows_by_group(
    batch: StepBatch,
    algorithm: Algorithm,
    ranks: Collectives,
    score_reference: RowScores | None = None,
    values_of: RowScores | None = None,
) -> list[list[Row]]:
    """For each group of this rank, the rows of its trajectories with a trained token; collective.
    `score_reference`: log-probabilities of the reference; `values_of`: the critic's values.

    An episode's reward counts once, however many trajectories it has: each gets the episode's
    advantage, and the trained ones share its weight; so does each role's of an episode. A token
    whose log-probability from the engine is not finite is not trained. Raises ValueError for a
    group whose sampling parameters changed the distribution in a way that cannot be computed here,
    or that the algorithm cannot use.
    """
    masks_truncated = algorithm.config.advantage.mask_truncated
    masks = [_trained_masks(group, masks_truncated) for group in batch.groups]
    places = batch.places
    rows = [
        _rows(group, of_group, algorithm, version=batch.version, place=places[group.group_id])
        for group, of_group in zip(batch.groups, masks, strict=True)
    ]
    penalties: _Penalties = {}
    if score_reference is not None:
        rows = _with_column(rows, REFERENCE_COLUMN, score_reference)
        if algorithm.config.kl.where is KLPlace.reward:
            penalties = _penalties(batch, rows, algorithm)
    inputs = _advantage_inputs(batch, masks, algorithm, ranks, penalties)
    if values_of is not None:
        assert isinstance(algorithm.config.advantage, Gae)
        rows = _with_column(rows, VALUE_COLUMN, values_of)
        every = [*itertools.chain(*rows)]
        inputs = replace(
            inputs,
            values=[
                np.zeros(t.num_tokens, np.float32) if row is None else row.columns[VALUE_COLUMN]
                for t, row in zip(inputs.trajectories, every, strict=True)
            ],
        )
        targets = zip(every, returns(inputs, algorithm.config.advantage), strict=True)
        of_rows = [target for row, target in targets if row is not None]
        rows = _with_column(rows, RETURN_COLUMN, lambda _: of_rows)
    for row, t, values in zip(
        itertools.chain(*rows), inputs.trajectories, algorithm.advantages(inputs), strict=True
    ):
        if row is not None:
            given = t.columns.get(ADVANTAGE_COLUMN)
            row.advantages = values if given is None else np.asarray(given, np.float32)
    return [[row for row in of_group if row is not None] for of_group in rows]


def _with_column(
    rows: Sequence[Sequence[Row | None]], name: str, values_of: RowScores
) -> list[list[Row | None]]:
    found = iter(values_of([row for of_group in rows for row in of_group if row]))
    return [
        [row and replace(row, columns={**row.columns, name: next(found)}) for row in of_group]
        for of_group in rows
    ]


def _rows(
    group: TrajectoryGroup,
    masks: Sequence[NDArray[np.uint8]],
    algorithm: Algorithm,
    *,
    version: int,
    place: int,
) -> list[Row | None]:
    """A row without advantages for each trajectory; None if none of its tokens is trained."""
    check_sampling(group)
    _check_finished(group, algorithm)
    config, trajectories = algorithm.config, group.trajectories
    shares = _shares(trajectories, masks)
    streams: list[dict[str, NDArray[np.float32]]] = [{} for _ in trajectories]
    for name, stream in config.streams.items():
        chosen = [
            _stream_mask(t, m, stream, group) for t, m in zip(trajectories, masks, strict=True)
        ]
        of_stream = _shares(trajectories, chosen)
        for found, mask, share in zip(streams, chosen, of_stream, strict=True):
            found[name] = mask * np.float32(share)
    # All trajectories at once: of short ones, a call of numpy costs more than its numbers.
    mask = np.concatenate(masks)
    logprobs = np.concatenate([t.rollout_logprobs for t in trajectories])
    logprobs = np.where(mask, logprobs, np.float32(0))
    versions = np.concatenate([t.token_versions() for t in trajectories])
    staleness = np.where(mask, np.maximum(version - versions, 0), 0)
    usual = np.full(len(mask), group.sampling.temperature, np.float32)
    parts = _parts(trajectories)
    rows: list[Row | None] = []
    for number, (t, mask, part, share, weights) in enumerate(
        zip(trajectories, masks, parts, shares, streams, strict=True)
    ):
        if not np.count_nonzero(mask) and not any(values.any() for values in weights.values()):
            rows.append(None)
            continue
        rows.append(
            Row(
                tokens=t.tokens,
                loss_mask=mask,
                rollout_logprobs=logprobs[part],
                staleness=staleness[part],
                weight=share,
                temperatures=_temperatures(t, group, usual[part]),
                is_current=t.min_version == version,
                group=place,
                trajectory=number,
                candidates=t.columns.get(CANDIDATES_COLUMN),
                routes=t.columns.get(ROUTES_COLUMN),
                streams=weights,
                columns={k: v for k, v in t.columns.items() if k not in _READ_HERE},
                pictures=group.pictures_of(t),
            )
        )
    return rows


_READ_HERE = (CANDIDATES_COLUMN, TEMPERATURE_COLUMN, ROUTES_COLUMN, ADVANTAGE_COLUMN)
"""Columns that no loss reads: how a token was sampled, and its finished advantage."""
_BY_GROUP = ("grpo", "dr_grpo", "rloo", "max_rl", "pass_at_k")
"""Advantages that read nothing but the rewards of their own group."""
_Penalties = Mapping[tuple[str, tuple[int, str]], float]
"""By group and player."""


def _check_finished(group: TrajectoryGroup, algorithm: Algorithm) -> None:
    """Raises ValueError for finished advantages beside which a setting would be without effect, or
    would mix them with rewards."""
    config, advantage = algorithm.config, algorithm.config.advantage
    if not any(t.is_finished for t in group.trajectories):
        return
    for setting, is_in_the_way, cure in (
        (f"advantage.kind={advantage.kind!r}", advantage.kind not in _BY_GROUP, "choose grpo"),
        ("kl.where=reward", config.kl.where is KLPlace.reward, "set it to loss"),
        ("advantage.overlong_start", advantage.overlong_start is not None, "leave it out"),
    ):
        if is_in_the_way:
            raise ValueError(
                f"algorithm.{setting}: needs rewards, and the environment gave group "
                f"{group.group_id} finished advantages; {cure}, or give rewards by role"
            )


def _parts(trajectories: Sequence[Trajectory]) -> list[slice]:
    """Where each trajectory's tokens are among those of all."""
    ends = itertools.accumulate(t.num_tokens for t in trajectories)
    return [slice(end - t.num_tokens, end) for t, end in zip(trajectories, ends, strict=True)]


def _temperatures(
    trajectory: Trajectory, group: TrajectoryGroup, usual: NDArray[np.float32]
) -> NDArray[np.float32]:
    """[T]. Raises ValueError for a temperature at which no token is trained."""
    if TEMPERATURE_COLUMN not in trajectory.columns:
        return usual
    found = np.asarray(trajectory.columns[TEMPERATURE_COLUMN], np.float32)
    of_own = found[trajectory.loss_mask != 0]
    if not (np.isfinite(of_own) & (of_own > 0)).all():
        raise ValueError(
            f"group {group.group_id}: its column {TEMPERATURE_COLUMN} has {of_own.min()}; a token "
            "is trained at the temperature at which it was sampled, which must be above 0"
        )
    return found


def _shares(trajectories: Sequence[Trajectory], masks: Sequence[NDArray[Any]]) -> list[float]:
    """1/n for each trajectory of a player that has n with a trained token: it counts once."""
    pairs = list(zip(trajectories, masks, strict=True))
    counts = Counter(trajectory.player for trajectory, mask in pairs if np.count_nonzero(mask))
    return [1 / max(counts[trajectory.player], 1) for trajectory in trajectories]


def _trained_masks(group: TrajectoryGroup, masks_truncated: bool) -> list[NDArray[np.uint8]]:
    """[T] of each trajectory: 1 for the tokens that the policy's loss trains."""
    every = group.trajectories
    logprobs = np.concatenate([t.rollout_logprobs for t in every])
    mask = np.concatenate([t.loss_mask for t in every]) * np.isfinite(logprobs)
    masks = [mask[part] for part in _parts(every)]
    if masks_truncated:
        truncated = {t.player for t in every if t.finish_reason == "length"}
        for t, mask in zip(every, masks, strict=True):
            mask *= t.player not in truncated
    return masks


def _stream_mask(
    trajectory: Trajectory, mask: NDArray[np.uint8], stream: StreamConfig, group: TrajectoryGroup
) -> NDArray[np.uint8]:
    """[T] 1 for the tokens that a further stream trains; `mask`: the same for the policy's loss."""
    if stream.min_reward is not None and trajectory.reward < stream.min_reward:
        return np.zeros_like(mask)
    if stream.tokens is StreamTokens.observations:
        between = np.arange(trajectory.num_tokens) >= trajectory.prompt_length
        for span in trajectory.version_spans:
            between[span.start : span.end] = False
        return between.astype(np.uint8)
    if stream.loss.kind != "teacher_kl":
        return mask
    if TEACHER_COLUMN not in trajectory.columns:
        raise ValueError(
            f"group {group.group_id}: it has no column {TEACHER_COLUMN}, from which a stream with "
            "loss=teacher_kl learns; it was sampled without a part of task.rewards with "
            "kind=teacher: start a new run"
        )
    is_known: NDArray[np.bool_] = np.isfinite(trajectory.columns[TEACHER_COLUMN])
    return np.where(is_known, mask, np.uint8(0))


def weighted(
    groups: Sequence[Sequence[Row]], algorithm: Algorithm
) -> tuple[list[Row], dict[str, float | None]]:
    """Gives the rows of these groups the weights of the aggregations, once: before, a row's weight
    is its share of its episode. Returns them, and by stream this rank's part of the denominator
    (None: the sum is not divided)."""
    rows = [row for group in groups for row in group]
    numbers = np.array([i for i, group in enumerate(groups) for _ in group], np.int64)
    tokens = np.array([row.num_trained for row in rows], np.int64)
    shares = np.array([row.weight for row in rows], np.float64)
    weights, denominator = _aggregated(algorithm, POLICY, tokens, shares, numbers)
    for row, weight in zip(rows, weights, strict=True):
        row.weight = weight
    denominators = {POLICY: denominator}
    for name in algorithm.streams:
        masks = [row.streams[name] for row in rows]
        tokens = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
        shares = np.array([mask.max() for mask in masks], np.float64)
        weights, denominators[name] = _aggregated(algorithm, name, tokens, shares, numbers)
        for row, mask, weight in zip(rows, masks, weights, strict=True):
            row.streams = {**row.streams, name: (mask != 0) * np.float32(weight)}
    return rows, denominators


def _aggregated(
    algorithm: Algorithm,
    stream: str,
    tokens: NDArray[np.int64],
    shares: NDArray[np.float64],
    groups: NDArray[np.int64],
) -> tuple[list[float], float | None]:
    """The weight of each row's tokens (1 if none is trained), and this rank's denominator, to which
    a rank without trained tokens adds nothing."""
    has = tokens > 0
    if not has.any():
        # Not all functions know what the mean of nothing is, and NaN would mean "not divided".
        return [1.0] * len(tokens), 0.0
    inputs = AggregationInputs(num_tokens_R=tokens[has], shares_R=shares[has], groups_R=groups[has])
    found = algorithm.aggregate(inputs, stream)
    weights = np.ones(len(tokens))
    weights[has] = found.weights_R
    return weights.tolist(), found.denominator


# Episodes of the whole batch ----------------------------------------------------------------------


def _penalties(
    batch: StepBatch, rows: Sequence[Sequence[Row | None]], algorithm: Algorithm
) -> _Penalties:
    """The reward that each player loses for its distance from the reference."""
    found: defaultdict[tuple[str, tuple[int, str]], float] = defaultdict(float)
    for group, of_group in zip(batch.groups, rows, strict=True):
        for trajectory, row in zip(group.trajectories, of_group, strict=True):
            if row is not None:
                is_trained = row.loss_mask != 0
                columns = {REFERENCE_COLUMN: row.columns[REFERENCE_COLUMN][is_trained]}
                penalty = algorithm.reward_penalty(row.rollout_logprobs[is_trained], columns)
                if not math.isfinite(penalty):
                    raise ValueError(
                        f"group {group.group_id}: algorithm.kl.reference="
                        f"{algorithm.config.kl.reference!r} gives it log-probabilities that are "
                        "not finite; choose another reference, or set algorithm.kl.where=loss, "
                        "which skips such updates"
                    )
                found[group.group_id, trajectory.player] += penalty
    return dict(found)


def _advantage_inputs(
    batch: StepBatch,
    masks: Sequence[Sequence[NDArray[np.uint8]]],
    algorithm: Algorithm,
    ranks: Collectives,
    penalties: _Penalties,
) -> AdvantageInputs:
    """The inputs of the advantages; every rank has the same episodes in the same order. Makes three
    collective calls. Each role of an episode counts as an episode, and each role of a group as a
    group: solvers are compared with solvers."""
    places = batch.places
    own = [
        row
        for group, of_group in zip(batch.groups, masks, strict=True)
        for row in _players(places[group.group_id], group, of_group, algorithm, penalties)
    ]
    about = json.dumps([len(own), sorted({name for *_, parts in own for name in parts})])
    every = [json.loads(text) for text in ranks.gather_texts(about)]
    names = sorted({name for _, theirs in every for name in theirs})
    longest = max(count for count, _ in every)
    table = np.full((longest, 5 + len(names)), np.nan)
    for place, (*numbers, parts) in enumerate(own):
        table[place] = [*numbers, *(parts.get(name, np.nan) for name in names)]
    rows = ranks.gather(torch.from_numpy(table.reshape(-1))).view(-1, table.shape[1]).numpy()
    rows = rows[~np.isnan(rows[:, 0])]
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    place_of = {tuple(map(int, numbers)): i for i, numbers in enumerate(rows[:, :3])}
    begins_group = np.diff(rows[:, :2], axis=0, prepend=rows[:1, :2]).any(1)
    return AdvantageInputs(
        groups_E=np.cumsum(begins_group),
        rewards_E=rows[:, 3],
        num_tokens_E=rows[:, 4],
        parts={name: rows[:, 5 + i] for i, name in enumerate(names)},
        trajectories=[t for group in batch.groups for t in group.trajectories],
        masks=[*itertools.chain(*masks)],
        sum_over_ranks=lambda sums: ranks.gather(torch.from_numpy(sums)).sum(0).numpy(),
        episodes=[
            place_of[places[group.group_id], roles.index(t.role), t.episode]
            for group in batch.groups
            for roles in [group.roles]
            for t in group.trajectories
        ],
    )


def _players(
    place: int,
    group: TrajectoryGroup,
    masks: Sequence[NDArray[np.uint8]],
    algorithm: Algorithm,
    penalties: _Penalties,
) -> list[tuple[int, int, int, float, float, Mapping[str, float]]]:
    """Index of the group, of the role and of the episode, reward, trained tokens, reward parts of
    each player."""
    counts: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    generated: defaultdict[tuple[int, str], int] = defaultdict(int)
    parts: dict[tuple[int, str], Mapping[str, float]] = {}
    for t, mask in zip(group.trajectories, masks, strict=True):
        counts[t.player].append(int(np.count_nonzero(mask)))
        of_own = sum(span.end - span.start for span in t.version_spans)
        generated[t.player] = max(generated[t.player], of_own)
        parts.setdefault(t.player, t.reward_parts)
    found, roles = [], group.roles
    for player, reward in group.rewards_by_player.items():
        reward -= overlong_penalty(generated[player], algorithm.config.advantage)
        reward -= penalties.get((group.group_id, player), 0.0)
        trained = [count for count in counts[player] if count]
        mean_tokens = sum(trained) / len(trained) if trained else 0.0
        episode, role = player
        numbers = place, roles.index(role), episode
        found.append((*numbers, reward, mean_tokens, parts[player]))
    return found


def check_sampling(group: TrajectoryGroup) -> None:
    """Raises ValueError naming a sampling parameter that the importance ratios ignore."""
    plain = SamplingParams(temperature=group.sampling.temperature)
    has_candidates = all(CANDIDATES_COLUMN in t.columns for t in group.trajectories)
    for item in fields(SamplingParams):
        value, expected = getattr(group.sampling, item.name), getattr(plain, item.name)
        is_truncation = item.name in ("top_p", "top_k", "min_p")
        if value != expected and not (is_truncation and has_candidates):
            reason = (
                f"it has no column {CANDIDATES_COLUMN}, from which the trainer computes that one"
                if is_truncation
                else "the trainer does not compute that one"
            )
            raise ValueError(
                f"group {group.group_id}: {item.name}={value} changed the distribution from which "
                f"its tokens were drawn, and {reason}: importance ratios would be wrong; sample "
                f"with {item.name}={expected}"
            )
    if not np.isfinite(group.sampling.temperature):
        raise ValueError(
            f"group {group.group_id}: temperature={group.sampling.temperature}: its tokens were "
            "drawn without regard to the policy"
        )
    if not np.float32(group.sampling.temperature) > 0:
        raise ValueError(
            f"group {group.group_id}: temperature={group.sampling.temperature}: greedy tokens have "
            "no log-probability to train on; sample with a temperature above 0"
        )
