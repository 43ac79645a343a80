"""From the groups of a batch to rows to train on: advantages, weights, staleness of each token.

groups ─ episodes of all ranks ─ advantages ─► rows ─ aggregation ─► weights, denominator
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.types import SamplingParams, Trajectory, TrajectoryGroup
from trainer_pool.algorithms.advantages import AdvantageInputs, overlong_penalty
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
    """This rank's share; may be empty."""

    @property
    def places(self) -> Mapping[str, int]:
        """The position of each group in the whole batch."""
        return {group_id: place for place, group_id in enumerate(self.group_ids)}


def rows_by_group(batch: StepBatch, algorithm: Algorithm, ranks: Collectives) -> list[list[Row]]:
    """For each group of this rank its trajectories that have a trained token; collective.

    An episode's reward counts once, however many trajectories it has: each gets the episode's
    advantage, and the trained ones share its weight. A token whose log-probability from the engine
    is not finite is not trained. Raises ValueError for a group that was sampled with more than a
    temperature, or for one that the algorithm cannot use.
    """
    for group in batch.groups:
        check_sampling(group)
    inputs = _advantage_inputs(batch, algorithm, ranks)
    advantages = iter(algorithm.advantages(inputs))
    masks_truncated = algorithm.config.advantage.mask_truncated
    rows = []
    for group in batch.groups:
        pairs = zip(group.trajectories, advantages, strict=False)  # takes those of this group
        trained = [
            (trajectory, mask, values)
            for trajectory, values in pairs
            if (mask := _trained_mask(trajectory, group, masks_truncated)).any()
        ]
        shares = Counter(trajectory.episode for trajectory, *_ in trained)
        rows.append(
            [
                _row(trajectory, mask, values, group, batch, 1 / shares[trajectory.episode])
                for trajectory, mask, values in trained
            ]
        )
    return rows


def _row(
    trajectory: Trajectory,
    mask: NDArray[np.uint8],
    advantages: NDArray[np.float32],
    group: TrajectoryGroup,
    batch: StepBatch,
    share: float,
) -> Row:
    staleness = np.maximum(batch.version - trajectory.token_versions(), 0)
    return Row(
        tokens=trajectory.tokens,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, trajectory.rollout_logprobs, np.float32(0)),
        advantages=advantages,
        staleness=np.where(mask, staleness, 0),
        weight=share,
        temperature=group.sampling.temperature,
        is_current=trajectory.min_version == batch.version,
        group=batch.places[group.group_id],
    )


def _trained_mask(
    trajectory: Trajectory, group: TrajectoryGroup, masks_truncated: bool
) -> NDArray[np.uint8]:
    if masks_truncated and any(
        t.finish_reason == "length" for t in group.trajectories if t.episode == trajectory.episode
    ):
        return np.zeros_like(trajectory.loss_mask)
    return trajectory.loss_mask * np.isfinite(trajectory.rollout_logprobs)


def weighted(
    groups: Sequence[Sequence[Row]], algorithm: Algorithm
) -> tuple[list[Row], float | None]:
    """The rows of these groups with the weights of the aggregation, and this rank's part of the
    denominator (None: it is 1)."""
    rows = [row for group in groups for row in group]
    found = algorithm.aggregate(
        AggregationInputs(
            num_tokens_R=np.array([row.num_trained for row in rows], np.int64),
            shares_R=np.array([row.weight for row in rows], np.float64),
            groups_R=np.array([i for i, group in enumerate(groups) for _ in group], np.int64),
        )
    )
    weights = found.weights_R.tolist()
    return [
        replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)
    ], found.denominator


# Episodes of the whole batch ----------------------------------------------------------------------


def _advantage_inputs(
    batch: StepBatch, algorithm: Algorithm, ranks: Collectives
) -> AdvantageInputs:
    """Three collectives; the episodes are in the order of the batch's groups on every rank."""
    own = [episode for group in batch.groups for episode in _episodes(batch, group, algorithm)]
    about = json.dumps([len(own), sorted({name for *_, parts in own for name in parts})])
    every = [json.loads(text) for text in ranks.gather_texts(about)]
    names = sorted({name for _, theirs in every for name in theirs})
    longest = max(count for count, _ in every)
    table = np.full((longest, 4 + len(names)), np.nan)
    for place, (*numbers, parts) in enumerate(own):
        table[place] = [*numbers, *(parts.get(name, np.nan) for name in names)]
    rows = ranks.gather(torch.from_numpy(table.reshape(-1))).view(-1, table.shape[1]).numpy()
    rows = rows[~np.isnan(rows[:, 0])]
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    place_of = {(int(group), int(episode)): i for i, (group, episode) in enumerate(rows[:, :2])}
    places, trajectories = batch.places, [t for g in batch.groups for t in g.trajectories]
    return AdvantageInputs(
        groups_E=rows[:, 0].astype(np.int64),
        rewards_E=rows[:, 2],
        num_tokens_E=rows[:, 3],
        parts={name: rows[:, 4 + i] for i, name in enumerate(names)},
        trajectories=trajectories,
        episodes=[
            place_of[places[group.group_id], trajectory.episode]
            for group in batch.groups
            for trajectory in group.trajectories
        ],
    )


def _episodes(
    batch: StepBatch, group: TrajectoryGroup, algorithm: Algorithm
) -> list[tuple[int, int, float, float, Mapping[str, float]]]:
    """Of each episode: place of the group, number, reward, trained tokens, parts of the reward."""
    settings, place = algorithm.config.advantage, batch.places[group.group_id]
    found = []
    for episode, reward in group.rewards_by_episode.items():
        own = [t for t in group.trajectories if t.episode == episode]
        masks = (_trained_mask(t, group, settings.mask_truncated) for t in own)
        counts = [int(mask.sum()) for mask in masks if mask.any()]
        generated = max(sum(s.end - s.start for s in t.version_spans) for t in own)
        reward -= overlong_penalty(generated, settings)
        mean_tokens = sum(counts) / len(counts) if counts else 0.0
        found.append((place, episode, reward, mean_tokens, own[0].reward_parts))
    return found


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
