"""Passes through the model: of any size, of tokens chosen among candidates, of a reference."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.support.trainer.loop_scene import HEAD_TOKENS, PROBE_TEXT, head_row
from tests.support.zero3.batches import with_common_beginning
from tests.support.zero3.scene import Scene, recorded
from tests.support.zero3.skipped_updates import (
    step_over_the_limit,
    step_with_planted_nan,
    steps_under_a_guard,
)
from trainer_pool.data.packing import fill_up, pack
from trainer_pool.step import score_probes


def packings(scene: Scene) -> None:
    """One step, without moving the weights, for several sizes of passes; the trajectories of a
    group begin with the same tokens."""
    batch = scene.batch(0)
    batch = replace(batch, groups=tuple(with_common_beginning(group) for group in batch.groups))
    packings: list[tuple[int, bool, dict[str, float | int | str]]] = []
    scene.results |= {"packings": packings, "cost": asdict(scene.policy.cost)}
    for micro_batch_tokens, share_prefixes in itertools.product((50, 97, 4096), (False, True)):
        config = replace(
            scene.config,
            num_minibatches=1,
            micro_batch_tokens=micro_batch_tokens,
            share_prefixes=share_prefixes,
        )
        stats = scene.step(batch, config=config, learning_rate=0.0)
        packings.append((micro_batch_tokens, share_prefixes, recorded(stats)))


def head(scene: Scene) -> None:
    """A gradient of log-probabilities and entropies, in two passes of which rank 1 has nothing
    to train on in the second; then updates that are skipped."""
    if scene.ranks.rank == 0:
        mine = pack([head_row(i) for i in range(4)], HEAD_TOKENS)
    else:
        mine = pack([head_row(4), head_row(5)], HEAD_TOKENS)
    batches = fill_up(mine, 2)
    for batch in batches:
        scores = scene.policy.score(batch)
        loss = ((scores.logprobs * batch.advantages_N - 0.5 * scores.entropy) * batch.mask_N).sum()
        scene.policy.backward(loss)
    scene.results["passes_of_rank_1"] = [float(b.mask_N.sum()) for b in batches]
    norm = scene.policy.step(0.0)
    assert norm is not None
    # Adam's first moment, from nothing, is the clipped gradient.
    clipped = scene.config.max_grad_norm / norm
    for name, parameter in scene.policy._deepspeed.module.named_parameters():
        moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        gradient = moment / (1 - scene.config.adam_beta1) / min(1.0, clipped)
        scene.gradients[name] = gradient.numpy()
    step_with_planted_nan(scene)
    step_over_the_limit(scene)
    steps_under_a_guard(scene)
    scene.write()


def reference(scene: Scene) -> None:
    """Scores of the policy and of a reference, in turn, before and after an update; the
    gradient with a pass of the reference in between, and without."""
    policy = scene.policy
    refused = []
    for name in ("wide", "turned"):
        try:
            policy.hold_reference(str(scene.folder / name), offload=False)
        except ValueError as error:
            refused.append(str(error))
    scene.results["refused"] = refused
    policy.hold_reference(str(scene.folder / "other"), offload=True)
    scene.results["probes"] = score_probes(policy, PROBE_TEXT, scene.config, scene.ranks)
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    scores: dict[str, list[list[float]]] = {"policy": [], "reference": []}
    norms = []
    for rate in (0.0, 0.0, 1e-2):  # only the last update moves the policy
        if rate or not norms:
            with policy.reference():
                scores["reference"].append(policy.score(batch).logprobs.tolist())
        logprobs = policy.score(batch).logprobs
        policy.backward(logprobs.square().mean() / scene.ranks.num_ranks)
        norms.append(policy.step(rate))
        with torch.no_grad():
            scores["policy"].append(policy.score(batch).logprobs.tolist())
    scene.results |= {**scores, "norms": norms}
