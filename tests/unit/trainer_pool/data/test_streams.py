"""Further losses in the same step: their tokens, weights and denominators; the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from buffer.types import Trajectory
from configs.advantages import AdvantageConfig, AggregationConfig, CriticConfig, Gae
from configs.algorithm_schema import (
    REFERENCE_COLUMN,
    TEACHER_COLUMN,
    AlgorithmConfig,
    KLConfig,
    StreamConfig,
)
from configs.choices import KLPlace, StreamTokens
from configs.load import load_config
from configs.losses import TeacherKl
from tests.support.trainer import made_up
from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import Row, pack
from trainer_pool.data.rows import StepBatch, rows_by_group, weighted


def two_turns(episode: int, reward: float, *, num_words: int = 2) -> Trajectory:
    """A prompt of 2 tokens, an answer of 3, `num_words` of the environment, an answer of 1."""
    mask = [0, 0, 1, 1, 1, *[0] * num_words, 1]
    columns = {TEACHER_COLUMN: np.array([-0.5 * one for one in mask], np.float32)}
    return made_up.trajectory(mask, episode=episode, reward=reward, columns=columns)


def batch_of(*trajectories: Trajectory) -> StepBatch:
    groups = (made_up.group(*trajectories),)
    return StepBatch(version=4, group_ids=("g7",), groups=groups)


def with_streams(**streams: StreamConfig) -> Algorithm:
    return Algorithm.load(AlgorithmConfig(streams=streams))


def test_each_stream_has_its_own_tokens_weights_and_denominator(ranks: Collectives) -> None:
    chosen = with_streams(
        words=StreamConfig(tokens=StreamTokens.observations),
        good=StreamConfig(
            aggregation=AggregationConfig(kind="sequence_mean_token_mean"), min_reward=1.0
        ),
        teacher=StreamConfig(loss=TeacherKl(kind="teacher_kl")),
    )
    batch = batch_of(two_turns(0, 1.0), two_turns(1, 0.0, num_words=3))
    rows, denominators = weighted(rows_by_group(batch, chosen, ranks), chosen)
    assert [row.streams["words"].tolist() for row in rows] == [
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 0],
    ]
    assert rows[0].streams["good"].tolist() == [0, 0, 0.25, 0.25, 0.25, 0, 0, 0.25]
    assert not rows[1].streams["good"].any()
    assert rows[1].streams["teacher"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert denominators == {"policy": 8.0, "words": 5.0, "good": 1.0, "teacher": 8.0}


def test_trajectories_of_an_episode_share_its_weight_in_every_stream(ranks: Collectives) -> None:
    chosen = with_streams(words=StreamConfig(tokens=StreamTokens.observations))
    silent = two_turns(0, 1.0, num_words=0)
    batch = batch_of(two_turns(0, 1.0), two_turns(0, 1.0), silent, two_turns(1, 0.0))
    rows, denominators = weighted(rows_by_group(batch, chosen, ranks), chosen)
    assert [row.weight for row in rows] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    # The third one has no token of the stream, so two share the episode there.
    assert [float(row.streams["words"].max()) for row in rows] == [0.5, 0.5, 0, 1]
    assert denominators["words"] == 2 * 0.5 + 2 * 0.5 + 2


def test_tokens_of_any_stream_are_scored_and_only_the_policys_have_its_temperature() -> None:
    row = made_up.row(
        [0, 0, 1, 0, 0, 1],
        temperatures=np.full(6, 0.5, np.float32),
        streams={"words": np.array([0, 0, 0, 0.5, 0, 0], np.float32)},
        columns={"mine": np.arange(6, dtype=np.float32)},
    )
    plain = replace(row, streams={}, columns={})
    (batch,) = pack([row, plain], max_tokens=12)
    assert batch.targets_N.tolist() == [2, 3, 5, 2, 5]
    assert batch.mask_N.tolist() == [1, 0, 1, 1, 1]
    assert batch.temperatures_N.tolist() == [0.5, 1, 0.5, 0.5, 0.5]
    assert batch.streams["words"].tolist() == [0, 0.5, 0, 0, 0]
    found = batch.columns["mine"]
    assert found[:3].tolist() == [2, 3, 5] and found[3:].isnan().all()  # the other row lacks it
    assert batch.rows == (0, 1)


def test_missing_teacher_is_named_with_the_group(ranks: Collectives) -> None:
    chosen = with_streams(teacher=StreamConfig(loss=TeacherKl(kind="teacher_kl")))
    batch = batch_of(replace(two_turns(0, 1.0), columns={}))
    with pytest.raises(ValueError, match="group g7: it has no column teacher_logprobs"):
        rows_by_group(batch, chosen, ranks)


def test_tokens_of_which_the_teacher_says_nothing_are_not_learnt_from_it(
    ranks: Collectives,
) -> None:
    chosen = with_streams(teacher=StreamConfig(loss=TeacherKl(kind="teacher_kl")))
    trajectory = two_turns(0, 1.0)
    trajectory.columns[TEACHER_COLUMN][[3, 7]] = [np.nan, -np.inf]
    [[row]] = rows_by_group(batch_of(trajectory), chosen, ranks)
    assert row.streams["teacher"].tolist() == [0, 0, 1, 0, 1, 0, 0, 0]


def test_gradient_of_distillation_is_that_of_the_divergence_from_the_teacher() -> None:
    """Over all outcomes of a small distribution, sampled by an older policy."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    older = torch.tensor([0.5, -0.1, 0.6], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    inputs = tokens(
        trainer=logprobs, proximal=logprobs.detach(), rollout=older, advantages=torch.zeros(3)
    )
    inputs = replace(inputs, columns={TEACHER_COLUMN: teacher}, weights_N=older.exp())
    chosen = with_streams(teacher=StreamConfig(loss=TeacherKl(kind="teacher_kl"), weight=2.0))
    found = chosen.stream_objective("teacher", inputs, 4.0)
    (gradient,) = torch.autograd.grad(found.loss, logits)
    torch.testing.assert_close(gradient, 2.0 * expected / 4.0)
    total, count = found.metrics["teacher/kl"]
    weighted_gap = ((logprobs - older).exp() * (logprobs - teacher)).sum().detach()
    assert float(total) == pytest.approx(float(weighted_gap))
    assert int(count) == 3


def test_distillation_caps_the_weight_of_a_token() -> None:
    """w = e^2, above the cap, and e^0.1; log(trainer / teacher) = 1 and 2."""
    trainer = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-3.0, -1.1], dtype=torch.float64)
    inputs = tokens(trainer=trainer, proximal=rollout, rollout=rollout, advantages=0 * rollout)
    inputs = replace(inputs, columns={TEACHER_COLUMN: trainer.detach() - torch.tensor([1.0, 2.0])})
    chosen = with_streams(teacher=StreamConfig(loss=TeacherKl(kind="teacher_kl", weight_cap=1.5)))
    found = chosen.stream_objective("teacher", inputs, 1.0)
    (gradient,) = torch.autograd.grad(found.loss, trainer)
    assert gradient.tolist() == pytest.approx([1.5, 2 * math.exp(0.1)])
    num_capped, _ = found.metrics["teacher/clip_fraction"]
    assert int(num_capped) == 1


def test_losses_of_streams_add_up() -> None:
    trainer = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = tokens(
        trainer=trainer, proximal=trainer.detach(), rollout=trainer.detach(), advantages=trainer + 3
    )
    inputs = replace(inputs, advantages_N=torch.tensor([2.0, 1.0]))
    chosen = Algorithm.load(
        AlgorithmConfig(policy_weight=0.5, streams={"mine": StreamConfig(weight=3.0)})
    )
    policy = chosen.objective(inputs, 2.0)
    both = policy.plus(chosen.stream_objective("mine", inputs, 4.0))
    assert policy.loss.item() == 0.5 * -(2.0 + 1.0) / 2.0
    assert both.loss.item() == policy.loss.item() + 3.0 * (1.0 + 2.0) / 4.0
    (gradient,) = torch.autograd.grad(both.loss, trainer)
    assert gradient.tolist() == [-0.5 - 0.75, -0.25 - 0.75]


# The reference ------------------------------------------------------------------------------------


def constant(value: float) -> Any:
    def score(rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return [
            np.where(row.is_scored, value * row.loss_mask, 0).astype(np.float32) for row in rows
        ]

    return score


def test_distance_from_the_reference_costs_an_episode_reward(ranks: Collectives) -> None:
    """rollout has -1 for each of 4 tokens; the reference -1.5 gives k1 of 0.5 each."""
    kl = KLConfig(weight=0.1, estimator="k1", where=KLPlace.reward)
    settings = AlgorithmConfig(kl=kl, advantage=AdvantageConfig(kind="dr_grpo"))
    chosen = Algorithm.load(settings)
    far = replace(two_turns(1, 1.0), rollout_logprobs=-np.ones(8, np.float32) * 2)
    batch = batch_of(two_turns(0, 1.0), far)
    [rows] = rows_by_group(batch, chosen, ranks, constant(-1.5))
    # Penalties 0.1 x 4 x 0.5 = 0.2 and 0.1 x 4 x -0.5 = -0.2.
    assert [float(row.advantages[0]) for row in rows] == pytest.approx([-0.2, 0.2])  # type: ignore[index]
    assert rows[0].columns[REFERENCE_COLUMN].tolist() == [0, 0, -1.5, -1.5, -1.5, 0, 0, -1.5]
    with pytest.raises(ValueError, match=r"algorithm\.kl\.reference=None gives it .* not finite"):
        rows_by_group(batch, chosen, ranks, constant(math.nan))


def test_distance_from_the_reference_is_paid_on_the_last_token_with_gae(
    ranks: Collectives,
) -> None:
    """The same distance, 0.2 of a reward of 1; the critic's values are 0.5 throughout. Between the
    two turns is a tool's answer."""
    settings = AlgorithmConfig(
        kl=KLConfig(weight=0.1, estimator="k1", where=KLPlace.reward),
        advantage=Gae(kind="gae", gae_lambda=0.5, whiten=False),
        critic=CriticConfig(),
    )
    batch = batch_of(two_turns(0, 1.0))
    chosen = Algorithm.load(settings)
    [[row]] = rows_by_group(batch, chosen, ranks, constant(-1.5), constant(0.5))
    # d = 0, 0, 0 and 0.8 - 0.5; each A is half of the next one.
    assert row.advantages is not None
    by_hand = [0, 0, 0.0375, 0.075, 0.15, 0, 0, 0.3]
    np.testing.assert_allclose(row.advantages, by_hand, rtol=1e-5)
    is_trained = row.loss_mask != 0
    np.testing.assert_allclose(row.columns["returns"], (row.advantages + 0.5) * is_trained)


def test_distance_from_the_reference_is_a_term_of_the_loss() -> None:
    trainer = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = tokens(
        trainer=trainer,
        proximal=trainer.detach(),
        rollout=trainer.detach(),
        advantages=torch.zeros(2, dtype=torch.float64),
    )
    inputs = replace(inputs, columns={REFERENCE_COLUMN: trainer.detach() - 0.5})
    chosen = Algorithm.load(AlgorithmConfig(kl=KLConfig(weight=0.1, estimator="k2")))
    found = chosen.objective(inputs, 2.0)
    assert found.loss.item() == pytest.approx(0.1 * 0.125)
    assert found.diagnostics["kl"].tolist() == [0.125, 0.125]
    (gradient,) = torch.autograd.grad(found.loss, trainer)
    assert gradient.tolist() == pytest.approx([0.1 * 0.5 / 2] * 2)


def test_column_that_is_missing_is_named_with_its_source() -> None:
    zero = torch.zeros(1)
    inputs = tokens(trainer=zero, proximal=zero, rollout=zero, advantages=zero)
    with pytest.raises(ValueError, match=r"no column reference_logprobs: algorithm\.kl\.weight"):
        algorithm(kl=KLConfig(weight=0.1)).objective(inputs, 1.0)


# What is refused ----------------------------------------------------------------------------------

TEACHER = "task.rewards.teacher={kind: teacher, url: 'http://127.0.0.1:1/v1', model: m}"
RIGHT = "task.rewards.right.kind=task"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.policy_weight=0"], r"algorithm\.policy_weight=0.*nothing would be learnt"),
        (["algorithm.streams.a.loss=teacher_kl"], r"task\.rewards=.*add one, as"),
        ([TEACHER, RIGHT], r"task\.rewards=.*nothing would read the teacher"),
        (
            ["algorithm.streams.a={loss: teacher_kl, tokens: observations}", TEACHER, RIGHT],
            r"algorithm\.streams\.\*\.tokens=.*set answers",
        ),
        (["algorithm.streams.policy.weight=1"], r"algorithm\.streams=\['policy'\]"),
        (["algorithm.streams.a.weight=0"], r"algorithm\.streams\.\*\.weight=0"),
        (["algorithm.kl.estimator=k1", "algorithm.kl.weight=0.1"], r"estimator='?k1'?.*mean 0"),
        (
            ["algorithm.kl={weight: 0.1, estimator: unbiased, where: reward}"],
            r"estimator='?unbiased'?.*set k1",
        ),
        (["algorithm.kl.offload=true"], r"algorithm\.kl\.offload=True.*leave this out"),
        (
            [
                "algorithm.policy_weight=0",
                "algorithm.streams.a.weight=1",
                "rollout.filter_zero_variance=true",
            ],
            r"rollout\.filter_zero_variance=True.*set false",
        ),
    ],
)
def test_settings_that_would_learn_nothing_or_nonsense_are_refused(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(settings)


def test_pure_distillation_needs_no_reward() -> None:
    stream = "algorithm.streams.teacher.loss=teacher_kl"
    load_config([TEACHER, stream, "algorithm.policy_weight=0"])
    load_config([TEACHER, RIGHT, stream])
