"""Tries a user's functions on a few tokens before a run starts, so that a mistake costs seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from buffer.types import Trajectory, VersionSpan
from configs.advantages import OwnAdvantage
from configs.algorithm_schema import REFERENCE_COLUMN, TEACHER_COLUMN, AlgorithmConfig
from configs.choices import KLPlace
from trainer_pool.algorithms.advantages import AdvantageInputs
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.registry import OUR_FUNCTIONS, Algorithm
from trainer_pool.algorithms.types import LossInputs

_CORRECTION = "algorithm.correction"
_LENGTHS = (3, 2)
"""Trained tokens of the two trajectories of one group."""


def check_algorithm(config: AlgorithmConfig, *, has_teacher: bool = True) -> None:
    """Raises ValueError naming a setting whose function cannot be loaded, does not take
    (inputs, config), raises an error, reads a column that the batches will not have, or returns
    something else than it should."""
    algorithm = Algorithm.load(config)
    names = [TEACHER_COLUMN] if has_teacher else []
    names += [REFERENCE_COLUMN] if algorithm.needs_reference else []

    def try_loss(algorithm: Algorithm) -> None:
        _try_loss(algorithm, names)

    correction = next((k for k in config.corrections if _is_own(_CORRECTION, k)), None)
    trials = [
        ("algorithm.advantage.kind", config.advantage.kind, _try_advantage),
        ("algorithm.aggregation", config.aggregation.kind, _try_aggregation),
        ("algorithm.loss", config.loss.kind, try_loss),
        (_CORRECTION, correction, try_loss),
        ("algorithm.kl.estimator", config.kl.estimator, try_loss),
        ("algorithm.kl.estimator", config.kl.estimator, _try_penalty),
    ]
    for stream in config.streams.values():
        trials.append(("algorithm.streams.*.loss", stream.loss.kind, try_loss))
        trials.append(
            ("algorithm.streams.*.aggregation", stream.aggregation.kind, _try_aggregation)
        )
    for setting, name, trial in trials:
        if name is None or not _is_own(setting, name):
            continue
        try:
            trial(algorithm)
        except Exception as error:  # a user's function may raise anything
            if isinstance(error, ValueError) and str(error).startswith("algorithm."):
                raise
            raise ValueError(
                f"{setting}={name!r}: failed on a batch of {sum(_LENGTHS)} tokens: "
                f"{type(error).__name__}: {error}"
            ) from error


def _is_own(setting: str, name: str) -> bool:
    return name not in OUR_FUNCTIONS[setting]


def _try_loss(algorithm: Algorithm, columns: Sequence[str]) -> None:
    """Forward and backward, with these columns: a loss without a gradient would train nothing, and
    one that is NaN would have its updates skipped."""
    trainer_N = torch.tensor([-0.5, -1.0, -0.2, -2.0, -0.7], requires_grad=True)
    rollout_N = torch.tensor([-0.6, -0.8, -0.3, -2.0, -0.9])
    inputs = LossInputs(
        trainer_logprobs_N=trainer_N,
        proximal_logprobs_N=torch.tensor([-0.5, -0.9, -0.3, -2.1, -0.7]),
        rollout_logprobs_N=rollout_N,
        advantages_N=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        weights_N=torch.ones(5),
        mask_N=torch.ones(5, dtype=torch.bool),
        staleness_N=torch.tensor([1, 1, 0, 0, 0]),
        segment_ids_N=torch.tensor([0, 0, 0, 1, 1]),
        num_segments=2,
        entropy_N=torch.full((5,), 0.4, requires_grad=algorithm.config.entropy_weight > 0),
        columns=dict.fromkeys(columns, rollout_N),
    )
    losses = {
        f"algorithm.loss={algorithm.config.loss.kind!r}": algorithm.objective(inputs, 5.0).loss
    }
    for name, stream in algorithm.config.streams.items():
        what = f"algorithm.streams.{name}.loss={stream.loss.kind!r}"
        losses[what] = algorithm.stream_objective(name, inputs, 5.0).loss
    for what, loss in losses.items():
        if not loss.requires_grad:
            raise ValueError(
                f"{what}: its result does not depend on inputs.trainer_logprobs_N, so nothing "
                "would be learnt; do not detach all of its terms"
            )
        (slopes_N,) = torch.autograd.grad(
            loss, trainer_N, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        if not (loss.isfinite() and slopes_N.isfinite().all()):
            raise ValueError(
                f"{what}: on a batch of {sum(_LENGTHS)} tokens its result is {loss.item():g} and "
                f"its slopes by inputs.trainer_logprobs_N are {slopes_N.tolist()}; every update "
                "with such a number would be skipped: look for a log, division or root of 0"
            )


def _try_penalty(algorithm: Algorithm) -> None:
    if algorithm.config.kl.where is not KLPlace.reward:
        return
    logprobs_T = np.array([-0.6, -0.8, -0.3], np.float32)
    penalty = algorithm.reward_penalty(logprobs_T, {REFERENCE_COLUMN: logprobs_T + 0.1})
    if not math.isfinite(penalty):
        raise ValueError(
            f"algorithm.kl.estimator={algorithm.config.kl.estimator!r}: of {len(logprobs_T)} "
            f"tokens it makes a penalty of {penalty:g}; return finite numbers"
        )


def _try_advantage(algorithm: Algorithm) -> None:
    assert isinstance(algorithm.config.advantage, OwnAdvantage)
    algorithm.advantages(
        AdvantageInputs(
            rewards_E=np.array([1.0, 0.0]),
            groups_E=np.array([0, 0]),
            num_tokens_E=np.array(_LENGTHS, np.float64),
            parts={name: np.array([1.0, 0.0]) for name in algorithm.config.advantage.part_weights},
            trajectories=[_trajectory(length, place) for place, length in enumerate(_LENGTHS)],
            episodes=[0, 1],
        )
    )


def _trajectory(num_trained: int, episode: int) -> Trajectory:
    mask = np.array([0, *[1] * num_trained], np.uint8)
    return Trajectory(
        tokens=np.zeros(len(mask), np.int32),
        loss_mask=mask,
        rollout_logprobs=-mask.astype(np.float32),
        version_spans=(VersionSpan(version=0, start=1, end=len(mask)),),
        prompt_length=1,
        reward=float(episode == 0),
        finish_reason="stop",
        episode=episode,
    )


def _try_aggregation(algorithm: Algorithm) -> None:
    inputs = AggregationInputs(
        num_tokens_R=np.array(_LENGTHS, np.int64),
        shares_R=np.ones(2),
        groups_R=np.zeros(2, np.int64),
    )
    for stream in algorithm.aggregations:
        algorithm.aggregate(inputs, stream)
