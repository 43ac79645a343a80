"""Steps whose updates are skipped: no gradient, not finite, over a limit, too few tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tests.support.trainer.loop_scene import HEAD_TOKENS, head_row
from tests.support.zero3.batches import less_likely
from tests.support.zero3.scene import Scene, recorded
from trainer_pool.data.packing import pack
from trainer_pool.guard import MIN_NORMS, Update, UpdateGuard


def step_without_gradient(scene: Scene) -> None:
    """Every group's rewards are equal, while Adam holds the moments of the steps before."""
    batch = scene.batch(0)
    groups = tuple(
        replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories))
        for group in batch.groups
    )
    weights, moments = scene.weights(), scene.moments()
    assert max(float(moment.abs().max()) for moment in moments) > 0
    stats = scene.step(replace(batch, groups=groups))
    scene.results["step_without_gradient"] = recorded(stats)
    scene.results["changed_without_gradient"] = [
        *(name for name, now in scene.weights().items() if not torch.equal(weights[name], now)),
        *("a moment" for a, b in zip(moments, scene.moments(), strict=True) if (a != b).any()),
    ]


def step_with_nan(scene: Scene) -> None:
    """At this temperature the log-probabilities of the first group, of the first update and of
    rank 0, are NaN."""
    batch = scene.batch(0)
    first, groups = batch.group_ids[0], list(batch.groups)
    for place, group in enumerate(groups):
        if group.group_id == first:
            groups[place] = replace(group, sampling=replace(group.sampling, temperature=1e-44))
    stats = scene.step(replace(batch, groups=tuple(groups)))
    scene.results["step_with_nan"] = recorded(stats)
    scene.results["is_finite_after_nan"] = all(
        bool(weight.isfinite().all()) for weight in scene.weights().values()
    )


def step_with_planted_nan(scene: Scene) -> None:
    """In the backward pass of rank 1's first token; its forward pass is finite."""
    batch = scene.batch(0)
    planted = [-1]

    def plant(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        scored: Any = scene.policy.last_scored
        if output.requires_grad and planted == [-1]:
            first = scored.places_N[:1]
            output.register_hook(lambda grad: grad.index_fill(1, first, math.nan))
            planted[:] = scored.groups_N[:1].tolist()

    norm = scene.policy._deepspeed.module.model.norm
    handle = norm.register_forward_hook(plant) if scene.ranks.rank == 1 else None
    before = scene.weights()
    stats = scene.step(batch, config=replace(scene.config, num_minibatches=1))
    if handle is not None:
        handle.remove()
    culprits = scene.ranks.gather(torch.tensor(planted))
    scene.results["planted_in"] = batch.group_ids[int(culprits[1])]
    scene.results["step_with_planted_nan"] = recorded(stats)
    scene.results["changed_by_planted_nan"] = [
        name for name, now in scene.weights().items() if not torch.equal(before[name], now)
    ]


def num_changed(
    scene: Scene, weights: dict[str, torch.Tensor], moments: list[torch.Tensor]
) -> list[int]:
    """How many of these weights and moments are others now."""
    return [
        sum(not torch.equal(weights[name], now) for name, now in scene.weights().items()),
        sum(not torch.equal(a, b) for a, b in zip(moments, scene.moments(), strict=True)),
    ]


def step_over_the_limit(scene: Scene) -> None:
    """An update is skipped because of its norm; the next one is made."""
    before, moments = scene.weights(), scene.moments()
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    changed = []
    for limit in (1e-9, 1e9):
        scene.policy.backward(scene.policy.score(batch).logprobs.square().mean())
        norm = scene.policy.step(1e-2, norm_limit=limit)
        changed.append((norm, *num_changed(scene, before, moments)))
    scene.results["changed_over_and_within_the_limit"] = changed


def steps_under_a_guard(scene: Scene) -> None:
    """By step what each rank counts and how many tensors change: its effective sample size is
    low, also the next one's, which ends the run; its norm is a spike; it is made.

    The tokens of each rank alone have nearly equal weights.
    """
    batch = scene.batch(0)
    if scene.ranks.rank == 0:
        batch = replace(batch, groups=tuple(less_likely(group) for group in batch.groups))
    config = replace(scene.config, num_minibatches=1)

    def step(guard: UpdateGuard) -> list[list[float]]:
        weights, moments = scene.weights(), scene.moments()
        stats = scene.step(batch, config=config, guard=guard)
        changed = num_changed(scene, weights, moments)
        names = ("grad_norm", "num_low_ess", "num_spikes")
        found = [*(float(stats[name]) for name in names), *changed]
        return scene.ranks.gather(torch.tensor(found, dtype=torch.float64)).tolist()

    few = UpdateGuard(replace(config, min_ess=0.5, max_skipped_updates=2))
    steps = [step(few)]
    try:
        step(few)
    except RuntimeError as error:
        scene.results["guard_error"] = str(error)
    norm = steps[0][0][0]
    for usual in (norm / 3, norm):
        guard = UpdateGuard(replace(config, max_grad_spike=2.0))
        for _ in range(MIN_NORMS):
            guard.note(Update(usual))
        steps.append(step(guard))
    scene.results["steps_under_a_guard"] = steps
