"""A user's own functions: what is refused before a run starts, and what they may rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from configs.advantages import OwnAdvantage, OwnAggregation
from configs.algorithm_schema import REFERENCE_COLUMN, AlgorithmConfig, KLConfig, StreamConfig
from configs.choices import KLPlace
from configs.corrections import OwnCorrection, Veto
from configs.load import load_config
from configs.losses import OwnLoss
from tests.support.trainer import made_up
from trainer_pool.algorithms.advantages import AdvantageInputs
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.trial import check_algorithm
from trainer_pool.data.packing import Row
from trainer_pool.data.rows import weighted

CODE = """
import numpy as np
import torch
from trainer_pool.algorithms.aggregation import Aggregation
from trainer_pool.algorithms.types import Correction, LossOutputs

def good(inputs, config):
    scale = config.params.get("scale", 1.0)
    loss_N = -scale * inputs.advantages_N * inputs.trainer_logprobs_N
    return LossOutputs(loss_N=loss_N, diagnostics={"mine": inputs.advantages_N})

def summed(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N.sum())

def tensor(inputs, config):
    return inputs.trainer_logprobs_N

def short_diagnostic(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N, diagnostics={"few": torch.zeros(2)})

def root_of_nothing(inputs, config):
    # Finite where nothing has moved, but its slope there is not.
    apart_N = inputs.trainer_logprobs_N - inputs.trainer_logprobs_N.detach()
    return LossOutputs(loss_N=apart_N.square().sqrt())

def unknown_loss(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N.log())

def with_metric(inputs, config, *numbers):
    return LossOutputs(loss_N=-inputs.trainer_logprobs_N, metrics={"mine": numbers})

def numbers_as_metric(inputs, config):
    return with_metric(inputs, config, 1.0, 5)

def tokens_as_metric(inputs, config):
    return with_metric(inputs, config, inputs.advantages_N, inputs.mask_N.sum())

def one_number_as_metric(inputs, config):
    return with_metric(inputs, config, inputs.advantages_N.sum())

def detached(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N.detach())

def fails(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N / config.params["scale"])

def three(inputs, config, more):
    return good(inputs, config)

def keeps_all(inputs, config):
    return Correction(factors_N=torch.ones_like(inputs.rollout_logprobs_N))

def keeps_one(inputs, config):
    return Correction(factors_N=torch.ones(1))

def half_squared(inputs, config):
    apart_N = inputs.log_ratio(inputs.trainer_logprobs_N, inputs.reference_logprobs_N)
    return config.params.get("share", 1.0) * apart_N.square() / 2

def near_the_teacher(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N - inputs.teacher_logprobs_N)

def near_the_reference(inputs, config):
    return LossOutputs(loss_N=inputs.trainer_logprobs_N - inputs.reference_logprobs_N)

def of_the_whole(inputs, config):
    return half_squared(inputs, config).sum()

def unknown_divergence(inputs, config):
    return half_squared(inputs, config) * float("nan")

def ones(inputs, config):
    return [np.ones(t.num_tokens, np.float32) for t in inputs.trajectories]

def one_by_one(inputs, config):
    for t, episode in zip(inputs.trajectories, inputs.episodes):
        yield [inputs.rewards_E[episode]] * t.num_tokens

def unknown(inputs, config):
    return inputs.spread(inputs.rewards_E * np.nan)

def by_episode(inputs, config):
    return inputs.rewards_E

def halves(inputs, config):
    return Aggregation(weights_R=inputs.shares_R / 2, denominator=1.0)

def without_long_ones(inputs, config):
    is_short_R = inputs.num_tokens_R < inputs.num_tokens_R.max()
    return Aggregation(weights_R=is_short_R.astype(float), denominator=float(is_short_R.mean()))

def against_long_ones(inputs, config):
    return Aggregation(weights_R=2.5 - inputs.num_tokens_R, denominator=1.0)

def unknown_denominator(inputs, config):
    return Aggregation(weights_R=inputs.shares_R, denominator=float("nan"))

def one_weight(inputs, config):
    return Aggregation(weights_R=inputs.shares_R[:1], denominator=1.0)
"""


OWN = {
    "loss": OwnLoss,
    "aggregation": OwnAggregation,
    "advantage": OwnAdvantage,
    "correction": OwnCorrection,
}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return str(path)


def test_functions_of_a_user_are_accepted_in_every_family(mine: str) -> None:
    config = AlgorithmConfig(
        loss=OwnLoss(kind=f"{mine}:good", params={"scale": 2.0}),
        aggregation=OwnAggregation(kind=f"{mine}:halves"),
        advantage=OwnAdvantage(kind=f"{mine}:ones"),
        correction=[Veto(kind="veto"), OwnCorrection(kind=f"{mine}:keeps_all")],
        kl=KLConfig(weight=0.1, estimator=f"{mine}:half_squared"),
    )
    check_algorithm(config)
    assert Algorithm.load(config).loss.__name__ == "good"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "not_there:absent"}, r"algorithm\.loss='not_there:absent': there is no module"),
        ({"loss": "nowhere/mine.py:good"}, r"algorithm\.loss='nowhere/mine\.py:good': there is no"),
        ({"loss": "MINE:absent"}, r"algorithm\.loss='.*:absent': .*nothing named 'absent'"),
        ({"loss": "MINE:CODE"}, r"has nothing named 'CODE'"),
        (
            {"loss": "MINE:three"},
            r"algorithm\.loss='.*': must take \(inputs, config\), but takes \(inputs, config, m",
        ),
        ({"loss": "MINE:summed"}, r"loss_N has the shape \(\); return one value for each of the 5"),
        ({"loss": "MINE:tensor"}, r"algorithm\.loss='.*': must return LossOutputs, not Tensor"),
        ({"loss": "MINE:short_diagnostic"}, r"few has the shape \(2,\); return one value for each"),
        (
            {"loss": "MINE:numbers_as_metric"},
            r"algorithm\.loss='.*the metric mine must be a pair of tensors .*it is \(float, int\)",
        ),
        ({"loss": "MINE:tokens_as_metric"}, r"a pair of tensors .*\[5\]\), torch"),
        ({"loss": "MINE:one_number_as_metric"}, r"a pair of tensors .*it is \(torch"),
        (
            {"loss": "MINE:root_of_nothing"},
            r"algorithm\.loss='.*of 5 tokens its result is 0 and its slopes .*nan",
        ),
        ({"loss": "MINE:unknown_loss"}, r"algorithm\.loss='.*of 5 tokens its result is nan"),
        ({"loss": "MINE:detached"}, r"does not depend on inputs\.trainer_logprobs_N"),
        (
            {"loss": "MINE:fails"},
            r"algorithm\.loss='.*:fails': failed on a batch of 5 tokens: KeyError: 'scale'",
        ),
        ({"aggregation": "MINE:one_weight"}, r"algorithm\.aggregation='.*a weight for each of 2"),
        (
            {"aggregation": "MINE:against_long_ones"},
            r"algorithm\.aggregation='.*must be finite numbers of at least 0 .*weights \[-0\.5",
        ),
        (
            {"aggregation": "MINE:unknown_denominator"},
            r"algorithm\.aggregation='.*must be finite numbers of at least 0 .*denominator nan",
        ),
        ({"aggregation": "MINE:ones"}, r"algorithm\.aggregation='.*:ones': failed on a batch"),
        (
            {"advantage": "MINE:by_episode"},
            r"algorithm\.advantage\.kind='.*must return an array \[T\]",
        ),
        ({"advantage": "MINE:unknown"}, r"algorithm\.advantage\.kind='.*is NaN or infinite, for"),
        ({"correction": "MINE:keeps_one"}, r"algorithm\.correction=.*a factor for each of the"),
    ],
)
def test_function_that_cannot_be_used_is_refused_with_setting_value_and_fix(
    mine: str, settings: dict[str, str], message: str
) -> None:
    [(family, name)] = settings.items()
    own = OWN[family](kind=name.replace("MINE", mine))
    config = AlgorithmConfig()
    setattr(config, family, [own] if family == "correction" else own)
    with pytest.raises(ValueError, match=message):
        check_algorithm(config)


@pytest.mark.parametrize("where", KLPlace)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "nothing named 'absent'"),
        ("of_the_whole", r"a divergence for each of the \d tokens; it returned the shape \(\)"),
        ("one_by_one", r"it returned generator"),
        ("unknown_divergence", "nan"),
    ],
)
def test_estimator_that_cannot_be_used_is_refused(
    mine: str, where: KLPlace, name: str, message: str
) -> None:
    config = AlgorithmConfig(kl=KLConfig(weight=0.1, estimator=f"{mine}:{name}", where=where))
    with pytest.raises(ValueError, match=rf"^algorithm\..*{message}"):
        check_algorithm(config)


def test_estimator_of_a_user_is_that_of_the_loss_and_of_the_reward(mine: str) -> None:
    config = AlgorithmConfig(
        kl=KLConfig(weight=0.5, estimator=f"{mine}:half_squared", params={"share": 3.0})
    )
    rollout_T = np.array([-1.0, -2.0], np.float32)
    columns = {REFERENCE_COLUMN: np.array([-1.5, -1.0], np.float32)}
    penalty = Algorithm.load(config).reward_penalty(rollout_T, columns)
    assert penalty == pytest.approx(0.5 * 3 * (0.25 + 1) / 2)


@pytest.mark.parametrize("name", ["absent", "ones"])
def test_aggregation_of_a_stream_is_refused_by_its_own_setting(mine: str, name: str) -> None:
    config = AlgorithmConfig(
        streams={"words": StreamConfig(aggregation=OwnAggregation(kind=f"{mine}:{name}"))}
    )
    with pytest.raises(ValueError, match=r"^algorithm\.streams\.\*\.aggregation='.*:(absent|ones)"):
        check_algorithm(config)


def test_advantages_may_come_one_by_one_as_lists(mine: str) -> None:
    chosen = Algorithm.load(AlgorithmConfig(advantage=OwnAdvantage(kind=f"{mine}:one_by_one")))
    inputs = AdvantageInputs(
        rewards_E=np.array([2.0]),
        groups_E=np.array([0]),
        num_tokens_E=np.array([2.0]),
        trajectories=[made_up.trajectory([0, 1, 1])],
        episodes=[0],
    )
    (values,) = chosen.advantages(inputs)
    assert values.dtype == np.float32
    assert values.tolist() == [2.0, 2.0, 2.0]


def test_aggregation_may_leave_out_trajectories_and_never_sees_a_rank_without_any(
    mine: str,
) -> None:
    chosen = Algorithm.load(
        AlgorithmConfig(aggregation=OwnAggregation(kind=f"{mine}:without_long_ones"))
    )

    def row(num_trained: int) -> Row:
        return made_up.row([0, *[1] * num_trained])

    rows, denominators = weighted([[row(1), row(4)]], chosen)
    assert [row.weight for row in rows] == [1, 0]
    assert denominators == {"policy": 0.5}
    assert weighted([], chosen) == ([], {"policy": 0.0})


@pytest.mark.parametrize(
    ("name", "fix"), [("teacher", "kind=teacher"), ("reference", r"algorithm\.kl\.weight")]
)
def test_function_that_reads_a_column_of_nobody_is_refused(mine: str, name: str, fix: str) -> None:
    config = AlgorithmConfig(loss=OwnLoss(kind=f"{mine}:near_the_{name}"), kl=KLConfig(weight=0.1))
    check_algorithm(config, has_teacher=True)
    config.kl.weight = 0.0
    with pytest.raises(ValueError, match=rf"algorithm\.loss='.*no column {name}_logprobs: .*{fix}"):
        check_algorithm(config, has_teacher=False)


def test_relative_file_of_a_loss_means_the_folder_of_the_command(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(mine).parent)
    config = load_config(
        [
            "algorithm.loss=mine.py:good",
            "algorithm.advantage.kind=mine.py:ones",
            "algorithm.kl={weight: 0.1, estimator: 'mine.py:half_squared'}",
            "algorithm.correction=[tis_token, 'mine.py:keeps_all']",
            "algorithm.loss.params.scale=3",
        ]
    )
    assert config.algorithm.loss == OwnLoss(kind=f"{mine}:good", params={"scale": 3})
    assert config.algorithm.corrections == ["tis_token", f"{mine}:keeps_all"]
    assert config.algorithm.kl.estimator == f"{mine}:half_squared"
    check_algorithm(config.full_algorithm)
