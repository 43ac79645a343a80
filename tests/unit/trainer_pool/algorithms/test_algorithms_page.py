"""Runs the examples of docs/algorithms.md as they are, against their formulas in numpy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from configs.advantages import ADVANTAGES, AGGREGATIONS, OwnAdvantage
from configs.algorithm_schema import KL_ESTIMATORS, AlgorithmConfig
from configs.choices import Proximal, StreamTokens
from configs.corrections import CORRECTIONS
from configs.load import load_config
from configs.losses import LOSSES, STREAM_LOSSES, OwnLoss
from host.user_code import load_callable
from tests.support.repository import ROOT
from tests.support.trainer.made_up import trajectory
from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.algorithms.advantages import AdvantageInputs
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.algorithms.trial import check_algorithm
from trainer_pool.algorithms.types import LossInputs

PAGE = (ROOT / "docs" / "algorithms.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
Floats = NDArray[np.float64]
LENGTHS = (3, 1, 4)
PARAMS = {"low": 0.1, "high": 0.15, "share": 0.25, "weight": 2.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_loss.py").write_text(BLOCKS[0])
    (tmp_path / "others.py").write_text(BLOCKS[1])
    (tmp_path / "mine.py").write_text(BLOCKS[2])
    return tmp_path


def batch() -> LossInputs:
    random = np.random.default_rng(1)
    count = sum(LENGTHS)
    rollout = torch.from_numpy(-random.uniform(0.5, 2.0, count))
    proximal = rollout + torch.from_numpy(random.normal(0, 0.2, count))
    segments = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    return tokens(
        trainer=(proximal + torch.from_numpy(random.normal(0, 0.2, count))).requires_grad_(),
        proximal=proximal,
        rollout=rollout,
        advantages=torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)[segments],
        segments=segments.tolist(),
    )


def test_every_name_of_ours_is_on_the_page() -> None:
    functions = (*LOSSES, *CORRECTIONS, *ADVANTAGES, *AGGREGATIONS, *KL_ESTIMATORS)
    choices = (*STREAM_LOSSES, *Proximal.__members__, *StreamTokens.__members__)
    for name in (*functions, *choices):
        assert f"`{name}`" in PAGE, name


def test_fields_that_an_advantage_gets_are_on_the_page() -> None:
    section = PAGE.partition("### An advantage of your own")[2].partition("```python")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert listed == [field.name for field in fields(AdvantageInputs)]
    for name in re.findall(r"inputs\.(\w+)", section):
        assert callable(getattr(AdvantageInputs, name))


def test_advantage_on_the_page_is_the_distance_from_the_median(folder: Path) -> None:
    function = load_callable(f"{folder}/mine.py:by_median", "algorithm.advantage.kind")
    inputs = AdvantageInputs(
        rewards_E=np.array([0.0, 0.0, 9.0, 1.0, 1.0]),
        groups_E=np.array([0, 0, 0, 1, 1]),
        num_tokens_E=np.ones(5),
        trajectories=[trajectory([1] * num_tokens) for num_tokens in (2, 3, 1, 1, 1)],
        episodes=range(5),
    )
    values = [
        advantages.tolist()
        for advantages in function(inputs, OwnAdvantage(kind="mine.py:by_median"))
    ]
    assert values == [[0.0, 0.0], [0.0] * 3, [9.0], [0.0], [0.0]]


def test_every_command_of_the_page_is_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    commands = re.findall(r'^    make launch ARGS="(.*?)"', PAGE, re.MULTILINE)
    assert len(commands) == 16
    for command in commands:
        check_algorithm(load_config(shlex.split(command)).full_algorithm)


def test_example_has_at_most_twenty_lines_and_its_command_is_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 20
    commands = re.findall(r'^    make launch ARGS="(.*?)"', PAGE, re.MULTILINE)
    [command] = [one for one in commands if ":luspo" in one and "params" in one]
    monkeypatch.chdir(folder)
    config = load_config(shlex.split(command)).full_algorithm
    check_algorithm(config)
    loaded, inputs = Algorithm.load(config), batch()
    gspo = algorithm(loss="gspo", clip_low=3e-4, clip_high=4e-4)
    outputs, plain = loaded.loss(inputs, config.loss), gspo.loss(inputs, gspo.config.loss)
    lengths = torch.from_numpy(np.repeat(np.array(LENGTHS, np.float64), LENGTHS))
    torch.testing.assert_close(outputs.loss_N, lengths * plain.loss_N)
    assert torch.equal(outputs.diagnostics["clip_fraction"], plain.diagnostics["clip_fraction"])


def gmpo(moved: Floats, w: Floats, A: float) -> Floats:
    clipped = np.clip(moved, -0.1, 0.15)
    z = np.minimum(moved, clipped) if A > 0 else np.maximum(moved, clipped)
    return np.full(len(moved), -A * np.exp(z.mean()))


def vespo(moved: Floats, w: Floats, A: float) -> Floats:
    k, rate = (2, 3) if A >= 0 else (3, 2)
    W = w.prod()
    return np.full(len(w), -A * np.exp(rate * (1 - W)) * W**k)


@pytest.mark.parametrize(("name", "formula"), [("gmpo", gmpo), ("vespo", vespo)])
def test_losses_of_whole_trajectories_on_the_page_are_those_of_their_papers(
    folder: Path, name: str, formula: Callable[[Floats, Floats, float], Floats]
) -> None:
    inputs = batch()
    config = AlgorithmConfig(
        loss=OwnLoss(kind=f"{folder}/others.py:{name}", params=PARAMS), correction=[]
    )
    check_algorithm(config)
    found = Algorithm.load(config).loss(inputs, config.loss).loss_N.detach().numpy()
    if name == "vespo":  # its gradient is weight x A x that of log(trainer)
        found = found / inputs.trainer_logprobs_N.detach().numpy()
    moved = inputs.moved_N.detach().numpy()
    w = np.exp(inputs.off_policy_N.detach().numpy())
    for segment in range(len(LENGTHS)):
        own = (inputs.segment_ids_N == segment).numpy()
        expected = formula(moved[own], w[own], float(inputs.advantages_N[own][0]))
        np.testing.assert_allclose(found[own], expected, rtol=1e-9)


def test_topr_bounds_the_ratio_of_bad_tokens_alone(folder: Path) -> None:
    inputs = batch()
    config = AlgorithmConfig(loss=OwnLoss(kind=f"{folder}/others.py:topr"), correction=[])
    check_algorithm(config)
    loss = Algorithm.load(config).loss(inputs, config.loss).loss_N.sum()
    (gradient,) = torch.autograd.grad(loss, inputs.trainer_logprobs_N)
    w, A = np.exp(inputs.off_policy_N.detach().numpy()), inputs.advantages_N.numpy()
    expected = -np.where(A > 0, 1.0, np.minimum(w, 1.0)) * A
    np.testing.assert_allclose(gradient.numpy(), expected)


def test_kl_cov_holds_the_tokens_of_the_largest_covariance(folder: Path) -> None:
    inputs = batch()
    config = AlgorithmConfig(loss=OwnLoss(kind=f"{folder}/others.py:kl_cov", params=PARAMS))
    check_algorithm(config)
    mask = inputs.mask_N.clone()
    mask[1] = False
    inputs = replace(inputs, mask_N=mask)
    outputs = Algorithm.load(config).loss(inputs, config.loss)
    real = mask.numpy()
    A, logp = inputs.advantages_N.numpy(), inputs.trainer_logprobs_N.detach().numpy()
    cov = np.where(real, (A - A[real].mean()) * (logp - logp[real].mean()), -np.inf)
    held = outputs.diagnostics["held_fraction"].numpy()
    assert held.sum() == 1 and held[cov.argmax()]
    moved = inputs.moved_N.detach().numpy()
    expected = 2.0 * np.abs(moved) * held - np.exp(moved) * A
    np.testing.assert_allclose(outputs.loss_N.detach().numpy()[real], expected[real])
