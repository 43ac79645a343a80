"""Each loss and correction against its formula, written anew in numpy for one token after another.

Gradients are compared with finite differences in float64 of the formula, in which whatever the loss
keeps constant stays at its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from configs.advantages import AGGREGATIONS
from configs.algorithm_schema import KL_ESTIMATORS, REFERENCE_COLUMN, KLConfig
from configs.choices import Proximal
from configs.corrections import CORRECTIONS
from configs.losses import LOSSES, LossConfig
from tests.support.trainer.token_batch import algorithm, tokens
from trainer_pool.algorithms import losses
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.corrections import largest_square_kept
from trainer_pool.algorithms.registry import OUR_FUNCTIONS, Algorithm
from trainer_pool.algorithms.types import LossInputs

Floats = NDArray[np.float64]

EPSILON = 1e-6
LENGTHS = (5, 1, 7, 3)
SETTINGS: dict[str, dict[str, object]] = {
    "ppo": {"dual_clip": 1.5, "proximal": Proximal.rollout},
    "gspo": {"clip_low": 0.02, "clip_high": 0.03},
    "sapo": {"sapo_good": 0.7, "sapo_bad": 1.6},
    "reinforce": {"weight_cap": 1.1},
    "dppo_tv": {"dppo_low": 0.03, "dppo_high": 0.05, "log_ratio_penalty": 0.1},
    "dppo_kl": {"dppo_low": 0.003, "dppo_high": 0.005, "log_ratio_penalty": 0.1},
}
"""Bounds so narrow that some of the tokens are beyond them, and gates that are no defaults."""


def batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.3) -> LossInputs:
    """Random tokens in float64, a quarter of them masked, but none of the first of a trajectory."""
    random = np.random.default_rng(seed)
    count = sum(lengths)
    rollout = -random.uniform(0.05, 2.0, count)
    proximal = np.minimum(rollout + random.normal(0, spread, count), -1e-3)
    trainer = np.minimum(proximal + random.normal(0, spread, count), -1e-3)
    segments = np.repeat(np.arange(len(lengths)), lengths)
    mask = random.uniform(size=count) < 0.75
    mask[np.cumsum([0, *lengths[:-1]])] = True
    rest = mask.astype(np.float64)
    return tokens(
        trainer=torch.from_numpy(trainer).requires_grad_(),
        proximal=torch.from_numpy(proximal),
        rollout=torch.from_numpy(rollout),
        advantages=torch.from_numpy(random.normal(size=len(lengths))[segments]),
        weights=torch.from_numpy(random.uniform(0.5, 1.0, count)),
        mask=torch.from_numpy(rest),
        staleness=random.integers(0, 4, count).tolist(),
        segments=segments.tolist(),
    )


class Token:
    """One token, as the formulas speak of it; numbers with `_0` are held constant."""

    def __init__(self, inputs: LossInputs, place: int, trainer: Floats, trainer_0: Floats) -> None:
        proximal, rollout = inputs.proximal_logprobs_N.numpy(), inputs.rollout_logprobs_N.numpy()
        self.logp = trainer[place]
        self.r = np.exp(trainer[place] - proximal[place])
        self.r_0 = np.exp(trainer_0[place] - proximal[place])
        self.w = np.exp(trainer[place] - rollout[place])
        self.w_0 = np.exp(trainer_0[place] - rollout[place])
        self.p_0, self.b = np.exp(trainer_0[place]), np.exp(rollout[place])
        self.A = float(inputs.advantages_N[place])
        segment = inputs.segment_ids_N[place]
        own = np.flatnonzero((inputs.segment_ids_N == segment).numpy() & inputs.mask_N.numpy())
        mean_0 = np.mean([trainer_0[i] - proximal[i] for i in own])
        self.s = np.exp(trainer[place] - trainer_0[place] + mean_0)


def clipped(ratio: float, A: float, low: float, high: float, dual: float | None = None) -> float:
    bound = 1 + high if A > 0 else 1 - low
    beyond = ratio > bound if A > 0 else ratio < bound
    gain = bound * A if beyond else ratio * A
    return -max(gain, dual * A) if dual is not None and A < 0 else -gain


def binary_kl(p: float, q: float) -> float:
    return float(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))


def dppo(t: Token, divergence: float, low: float, high: float, penalty: float) -> float:
    is_too_high = t.A > 0 and t.p_0 > t.b and divergence > high
    is_too_low = t.A < 0 and t.p_0 < t.b and divergence > low
    kept = 0.0 if is_too_high or is_too_low else 1.0
    return float(-kept * t.w * t.A + penalty * np.log(t.w) ** 2)


def sapo(t: Token, steepness: float) -> float:
    return float(-4 / steepness * t.A / (1 + np.exp(-steepness * (t.r - 1))))


FORMULAS: dict[str, Callable[[Token], float]] = {
    "ppo": lambda t: clipped(t.r, t.A, 0.2, 0.28, 1.5),
    "gspo": lambda t: clipped(t.s, t.A, 0.02, 0.03),
    "cispo": lambda t: -float(np.clip(t.r_0, 0.8, 1.28)) * t.A * t.logp,
    "sapo": lambda t: sapo(t, 0.7 if t.A > 0 else 1.6),
    "reinforce": lambda t: -min(t.w_0, 1.1) * t.A * t.logp,
    "importance_sampling": lambda t: -t.w * t.A,
    "dppo_tv": lambda t: dppo(t, abs(t.p_0 - t.b), 0.03, 0.05, 0.1),
    "dppo_kl": lambda t: dppo(t, binary_kl(t.b, t.p_0), 0.003, 0.005, 0.1),
    "supervised": lambda t: -t.logp,
}


def formula_of(name: str, inputs: LossInputs, trainer: Floats, trainer_0: Floats) -> float:
    """Sum of weight x loss over the trained tokens."""
    return sum(
        float(inputs.weights_N[i]) * FORMULAS[name](Token(inputs, i, trainer, trainer_0))
        for i in np.flatnonzero(inputs.mask_N.numpy())
    )


def loss_named(name: str, *kinds: str, **more: object) -> Algorithm:
    return algorithm(*kinds, loss=name, **{**SETTINGS.get(name, {}), **more})


def test_every_function_of_ours_has_a_formula_here() -> None:
    assert FORMULAS.keys() == LOSSES.keys() == OUR_FUNCTIONS["algorithm.loss"].keys()
    assert WEIGHTS_AND_MASKS.keys() == CORRECTIONS.keys()
    assert KL.keys() == KL_FORMULAS.keys() == {*KL_ESTIMATORS}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_its_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    inputs = batch(seed)
    result = loss_named(name).objective(inputs, 7.0)
    trainer = inputs.trainer_logprobs_N
    (gradient,) = torch.autograd.grad(result.loss, trainer)
    at = trainer.detach().numpy()
    assert result.loss.item() == pytest.approx(formula_of(name, inputs, at, at) / 7, rel=1e-9)
    expected = np.zeros(len(at))
    for i in range(len(at)):
        step = np.zeros(len(at))
        step[i] = EPSILON
        above, below = (formula_of(name, inputs, at + side * step, at) for side in (1, -1))
        expected[i] = (above - below) / (2 * EPSILON) / 7
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"supervised", "importance_sampling", "sapo"}))
def test_bounds_of_a_loss_act_on_some_tokens_and_are_reported(name: str) -> None:
    inputs = batch()
    clip = loss_named(name).objective(inputs, 1.0).diagnostics["clip_fraction"][inputs.mask_N]
    assert 0 < int(clip.sum()) < len(clip)


@pytest.mark.parametrize("name", LOSSES)
def test_settings_of_losses_anchored_at_proximal_change_no_gradient_at_a_ratio_of_one(
    name: str,
) -> None:
    anchor = LOSSES[name].ANCHOR
    bounds = SETTINGS[name] if name == "gspo" else {}  # by default all its ratios are beyond them
    usual = LOSSES[name](kind=name, **bounds)  # type: ignore[arg-type]
    moved = batch(lengths=(4,) * 40, spread=0.05)
    unmoved = replace(moved, proximal_logprobs_N=moved.trainer_logprobs_N.detach())

    def slopes(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
        losses_N = OUR_FUNCTIONS["algorithm.loss"][name](inputs, config).loss_N
        trainer_N = inputs.trainer_logprobs_N
        return torch.autograd.grad(losses_N[inputs.mask_N].sum(), trainer_N)[0][inputs.mask_N]

    for item in fields(usual):
        if item.name != "kind":
            value = getattr(usual, item.name)
            other = replace(usual, **{item.name: 1.01 if value is None else value / 100})
            assert not torch.allclose(slopes(moved, other), slopes(moved, usual)), item.name
            is_same = torch.allclose(slopes(unmoved, other), slopes(unmoved, usual))
            assert is_same == (anchor == "proximal"), item.name
    if anchor == "proximal":
        of_all_N = -unmoved.advantages_N[unmoved.mask_N]
        torch.testing.assert_close(slopes(unmoved, usual), of_all_N)


# Corrections --------------------------------------------------------------------------------------

BOUNDS = {
    "tis_cap": 1.2,
    "icepop_low": 0.8,
    "icepop_high": 1.2,
    "geometric_low": 0.95,
    "geometric_high": 1.05,
    "product_low": 0.8,
    "product_high": 1.3,
    "veto_below": 0.8,
    "opsm_limit": 0.02,
    "m2po_limit": 0.04,
    "kpop_limit": 0.02,
}


def m2po_keeps(p: Floats, others: list[Floats], A: float, off: Floats) -> Floats:
    squares = np.sort(np.concatenate([np.log(x) ** 2 for x in others]))
    means = np.cumsum(squares) / np.arange(1, len(squares) + 1)
    largest = squares[means <= 0.04].max()
    return np.asarray(np.log(p) ** 2 <= largest * (1 + 1e-6), np.float64)


def kpop_keeps(prox: Floats, roll: Floats) -> Floats:
    both = [max(binary_kl(a, b), binary_kl(b, a)) for a, b in zip(prox, roll, strict=True)]
    return np.array([float(x <= 0.02) for x in both])


def within(x: Floats, low: float, high: float) -> Floats:
    return np.asarray((low <= x) & (x <= high), np.float64)


WEIGHTS_AND_MASKS: dict[str, Callable[[Floats, list[Floats], float, Floats], Floats]] = {
    "tis_token": lambda p, _, A, off: np.minimum(p, 1.2),
    "tis_sequence": lambda p, _, A, off: np.full(len(p), min(p.prod(), 1.2)),
    "tis_geometric": lambda p, _, A, off: np.full(len(p), min(p.prod() ** (1 / len(p)), 1.2)),
    "icepop": lambda p, _, A, off: p * within(p, 0.8, 1.2),
    "geometric_mask": lambda p, _, A, off: np.full(
        len(p), within(p.prod() ** (1 / len(p)), 0.95, 1.05)
    ),
    "product_mask": lambda p, _, A, off: np.full(len(p), within(p.prod(), 0.8, 1.3)),
    "veto": lambda p, _, A, off: np.full(len(p), float(p.min() >= 0.8)),
    "opsm": lambda p, _, A, off: np.full(len(p), float(not (A < 0 and -off.mean() > 0.02))),
    "m2po": m2po_keeps,
    "kpop": lambda p, _, A, off: np.zeros(len(p)),  # of probabilities, below
}
"""[T] factors from p = proximal / rollout of a trajectory, that of all, its advantage, and
log(trainer / rollout)."""


def factors_of(name: str, inputs: LossInputs) -> Floats:
    proximal, rollout = inputs.proximal_logprobs_N.numpy(), inputs.rollout_logprobs_N.numpy()
    trainer = inputs.trainer_logprobs_N.detach().numpy()
    segments = inputs.segment_ids_N.numpy()
    places = [
        np.flatnonzero((segments == s) & inputs.mask_N.numpy()) for s in range(inputs.num_segments)
    ]
    ratios = [np.exp(proximal[own] - rollout[own]) for own in places]
    result = np.zeros(len(proximal))
    for own, p in zip(places, ratios, strict=True):
        A = float(inputs.advantages_N[own[0]])
        if name == "kpop":
            result[own] = kpop_keeps(np.exp(proximal[own]), np.exp(rollout[own]))
        else:
            result[own] = WEIGHTS_AND_MASKS[name](p, ratios, A, trainer[own] - rollout[own])
    return result


def with_statistics(inputs: LossInputs, of: Algorithm) -> LossInputs:
    """With the statistics of the batch that consists of `inputs` alone."""
    return replace(inputs, batch=of.statistics([inputs], lambda sums: sums))


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_correction_gives_the_factors_of_its_formula(name: str, seed: int) -> None:
    chosen = algorithm(name, bounds=BOUNDS)
    inputs = with_statistics(batch(seed, spread=0.2), chosen)
    factors = chosen.corrections[0](inputs, chosen.config.correction[0]).factors_N
    assert not factors.requires_grad
    expected = factors_of(name, inputs)
    real = inputs.mask_N.numpy()
    np.testing.assert_allclose(factors.numpy()[real], expected[real], rtol=1e-6)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_acts_on_some_tokens_and_not_on_others(name: str) -> None:
    found = []
    for seed in range(3):
        chosen = algorithm(name, bounds=BOUNDS)
        inputs = with_statistics(batch(seed, spread=0.2), chosen)
        (values,) = chosen.corrections[0](inputs, chosen.config.correction[0]).diagnostics.values()
        found += values[inputs.mask_N].tolist()
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_multiplies_loss_and_gradient_and_keeps_the_denominator(name: str) -> None:
    chosen = loss_named("ppo", name, bounds=BOUNDS, proximal=Proximal.recomputed)
    plain = loss_named("ppo", proximal=Proximal.recomputed)
    inputs = with_statistics(batch(1, spread=0.2), chosen)
    scaled = replace(
        inputs, weights_N=inputs.weights_N * torch.from_numpy(factors_of(name, inputs))
    )
    mine, expected = chosen.objective(inputs, 3.0).loss, plain.objective(scaled, 3.0).loss
    torch.testing.assert_close(mine, expected)
    gradients = [
        torch.autograd.grad(loss, inputs.trainer_logprobs_N)[0] for loss in (mine, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_several_corrections_multiply() -> None:
    chosen = loss_named(
        "ppo", "tis_token", "veto", "opsm", bounds=BOUNDS, proximal=Proximal.recomputed
    )
    inputs = batch(2, spread=0.2)
    result = chosen.objective(inputs, 1.0)
    product = factors_of("tis_token", inputs) * factors_of("veto", inputs)
    product *= factors_of("opsm", inputs)
    real = inputs.mask_N.numpy()
    rejected = result.diagnostics["rejected_fraction"].numpy()[real]
    np.testing.assert_array_equal(rejected, product[real] == 0)
    assert 0 < rejected.sum() < len(rejected)


def test_normalized_weights_have_mean_one_over_the_batch() -> None:
    chosen = algorithm("tis_token", bounds={**BOUNDS, "normalize": True})
    parts = [batch(seed, spread=0.2) for seed in range(3)]
    statistics = chosen.statistics(parts, lambda sums: sums)
    weights = np.concatenate([factors_of("tis_token", p)[p.mask_N.numpy()] for p in parts])
    assert statistics.mean_weight == pytest.approx(weights.mean(), rel=1e-9)
    normal = [chosen.objective(replace(p, batch=statistics), 1.0).loss for p in parts]
    plain = algorithm("tis_token", bounds=BOUNDS)
    for mine, part in zip(normal, parts, strict=True):
        expected = plain.objective(part, 1.0).loss / weights.mean()
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("above", [6e-8, 1e-3])
def test_certain_token_whose_log_probability_is_rounded_above_zero_has_not_diverged(
    above: float,
) -> None:
    certain, rounded = torch.tensor([-1e-4, -1e-4]), torch.tensor([above, above])
    inputs = tokens(trainer=certain, proximal=certain, rollout=rounded, advantages=torch.ones(2))
    chosen = algorithm("kpop")
    assert chosen.corrections[0](inputs, chosen.config.correction[0]).factors_N.tolist() == [1, 1]
    assert losses.binary_kl(rounded, certain).isfinite().all()


def test_update_without_a_token_of_the_policy_has_no_weights_to_normalize() -> None:
    # Each answer was truncated and is masked; a stream of observations has tokens all the same.
    chosen = algorithm("tis_token", "m2po", bounds={**BOUNDS, "normalize": True})
    inputs = batch(1, spread=0.2)
    masked = replace(inputs, mask_N=torch.zeros_like(inputs.mask_N))
    statistics = chosen.statistics([masked], lambda sums: sums)
    assert statistics.mean_weight == 1.0
    assert chosen.objective(replace(masked, batch=statistics), 1.0).loss == 0.0


def test_mask_does_not_change_the_mean_by_which_weights_are_normalized() -> None:
    # Else the tokens that stay would weigh more, the more are rejected.
    means = []
    for kinds in (["tis_token"], ["tis_token", "veto"], ["veto", "tis_token", "m2po"]):
        chosen = algorithm(*kinds, bounds={**BOUNDS, "normalize": True})
        means.append(chosen.statistics([batch(1, spread=0.2)], lambda sums: sums).mean_weight)
    assert means[0] == means[1] == means[2] != 1


def test_entropy_bonus_pushes_the_policy_towards_entropy() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    inputs = tokens(
        trainer=every[:, 2],
        proximal=every[:, 2].detach(),
        rollout=every[:, 2].detach(),
        advantages=torch.zeros(4, dtype=torch.float64),
        weights=torch.tensor([1.0, 0.5, 1.0, 1.0], dtype=torch.float64),
        mask=torch.tensor([1.0, 1.0, 0.0, 1.0]),
    )
    inputs = replace(inputs, entropy_N=entropy)
    loss = algorithm(entropy_weight=0.01).objective(inputs, 2.0).loss
    expected = -0.01 * (entropy[0] + 0.5 * entropy[1] + entropy[3]) / 2
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (slope,) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(gradient, slope)
    assert float(gradient.abs().max()) > 1e-4


def test_entropy_bonus_without_a_gradient_is_refused() -> None:
    inputs = replace(batch(), entropy_N=torch.ones(sum(LENGTHS)))
    with pytest.raises(ValueError, match=r"algorithm\.entropy_weight=0\.01: .* without a gradient"):
        algorithm(entropy_weight=0.01).objective(inputs, 1.0)


@given(st.lists(st.floats(0, 400, width=32), min_size=1, max_size=30), st.floats(0.001, 10))
@settings(max_examples=60)
def test_limit_of_m2po_is_found_exactly(squares: list[float], limit: float) -> None:
    values = np.sort(np.array(squares, np.float32)).astype(np.float64)
    allowed = [x for x in values if values[values <= x].mean() <= limit]
    kept = int((values <= max(allowed)).sum()) if allowed else 0
    found = largest_square_kept(torch.tensor(squares), limit, lambda sums: sums)
    assert int((values <= found).sum()) == kept


# What must hold of all of them --------------------------------------------------------------------


def part_of(inputs: LossInputs, segments: range) -> LossInputs:
    """Some of its trajectories, as a micro-batch of their own."""
    chosen = torch.isin(inputs.segment_ids_N, torch.tensor([*segments]))
    return replace(
        inputs,
        trainer_logprobs_N=inputs.trainer_logprobs_N[chosen],
        proximal_logprobs_N=inputs.proximal_logprobs_N[chosen],
        rollout_logprobs_N=inputs.rollout_logprobs_N[chosen],
        advantages_N=inputs.advantages_N[chosen],
        weights_N=inputs.weights_N[chosen],
        mask_N=inputs.mask_N[chosen],
        staleness_N=inputs.staleness_N[chosen],
        segment_ids_N=inputs.segment_ids_N[chosen] - segments.start,
        num_segments=len(segments),
    )


CHOICES = [
    *((name, ()) for name in LOSSES),
    *(("ppo", (kind,)) for kind in CORRECTIONS),
    ("gspo", ("tis_sequence", "veto")),
]


@pytest.mark.parametrize(("name", "kinds"), CHOICES)
def test_split_into_micro_batches_changes_nothing(name: str, kinds: tuple[str, ...]) -> None:
    more = {"proximal": Proximal.recomputed} if kinds else {}
    chosen = loss_named(name, *kinds, bounds=BOUNDS, **more)
    inputs = with_statistics(batch(5, lengths=(4, 9, 1, 2, 6), spread=0.2), chosen)
    whole = chosen.objective(inputs, 11.0)
    parts = [
        part_of(inputs, range(0, 1)),
        part_of(inputs, range(1, 4)),
        part_of(inputs, range(4, 5)),
    ]
    results = [chosen.objective(part, 11.0) for part in parts]
    split = torch.stack([result.loss for result in results]).sum()
    torch.testing.assert_close(whole.loss, split)
    for a, b in zip(
        torch.autograd.grad(whole.loss, inputs.trainer_logprobs_N),
        torch.autograd.grad(split, inputs.trainer_logprobs_N),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    for key, values in whole.diagnostics.items():
        torch.testing.assert_close(values, torch.cat([r.diagnostics[key] for r in results]))


@pytest.mark.parametrize(("name", "kinds"), CHOICES)
def test_nothing_at_a_masked_position_has_any_influence(name: str, kinds: tuple[str, ...]) -> None:
    more = {"proximal": Proximal.recomputed} if kinds else {}
    chosen = loss_named(name, *kinds, bounds=BOUNDS, **more)
    inputs = batch(6)
    other = replace(
        inputs,
        weights_N=inputs.weights_N.masked_fill(~inputs.mask_N, 1e30),
        staleness_N=inputs.staleness_N.masked_fill(~inputs.mask_N, 7),
    )
    results = [chosen.objective(with_statistics(x, chosen), 2.0).loss for x in (inputs, other)]
    assert torch.equal(*results)
    (gradient,) = torch.autograd.grad(results[0], inputs.trainer_logprobs_N)
    assert torch.equal(gradient[~inputs.mask_N], torch.zeros_like(gradient[~inputs.mask_N]))


@pytest.mark.parametrize(("name", "kinds"), CHOICES)
def test_micro_batch_without_a_trained_token_has_a_gradient_of_zero(
    name: str, kinds: tuple[str, ...]
) -> None:
    # A rank must run backward in it, or the others wait for ever.
    more = {"proximal": Proximal.recomputed} if kinds else {}
    chosen = loss_named(name, *kinds, bounds=BOUNDS, **more)
    full = batch(7)
    empty = replace(full, mask_N=torch.zeros_like(full.mask_N))
    loss = chosen.objective(empty, 5.0).loss
    (gradient,) = torch.autograd.grad(loss, full.trainer_logprobs_N)
    assert loss == 0 and torch.equal(gradient, torch.zeros_like(gradient))


def gradient_of(chosen: Algorithm, inputs: LossInputs) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(chosen.objective(inputs, 1.0).loss, inputs.trainer_logprobs_N)
    return gradient


def on_policy(inputs: LossInputs) -> LossInputs:
    now = inputs.trainer_logprobs_N.detach()
    return replace(inputs, proximal_logprobs_N=now, rollout_logprobs_N=now)


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"supervised"}))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    inputs = on_policy(batch(8))
    gradient = gradient_of(loss_named(name, **UNCAPPED.get(name, {})), inputs)
    expected = -(inputs.weights_N * inputs.advantages_N).masked_fill(~inputs.mask_N, 0.0)
    torch.testing.assert_close(gradient, expected)


UNCAPPED: dict[str, dict[str, object]] = {
    "cispo": {"clip_low": 1.0, "clip_high": 1e9},
    "reinforce": {"weight_cap": 1e9},
    "dppo_tv": {"dppo_low": 2.0, "dppo_high": 2.0, "log_ratio_penalty": 0.0},
    "dppo_kl": {"dppo_low": 99.0, "dppo_high": 99.0, "log_ratio_penalty": 0.0},
    "ppo": {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None},
}


@pytest.mark.parametrize(("log_ratio", "mean"), [(25.0, 0.25), (-25.0, -0.25), (9000.0, 20.0)])
def test_gspo_bounds_the_mean_of_a_trajectory_and_no_token_of_it(
    log_ratio: float, mean: float
) -> None:
    inputs = batch(10, lengths=(100,))
    apart = torch.zeros(100, dtype=torch.float64)
    apart[7] = log_ratio
    inputs = replace(
        inputs,
        trainer_logprobs_N=(inputs.proximal_logprobs_N + apart).requires_grad_(),
        advantages_N=torch.full((100,), -1.0 if log_ratio > 0 else 1.0, dtype=torch.float64),
        mask_N=torch.ones(100, dtype=torch.bool),
    )
    chosen = loss_named("gspo", clip_low=0.05, clip_high=0.05)
    ratio_N = chosen.loss(inputs, chosen.config.loss).loss_N.abs()
    torch.testing.assert_close(ratio_N, torch.full_like(ratio_N, math.exp(mean)))
    # The gradient of the far token, too, is that of the others; a mean that is bounded has none.
    push_N = gradient_of(chosen, inputs).abs() / inputs.weights_N
    torch.testing.assert_close(push_N, ratio_N.detach() if mean < 20 else torch.zeros(100).double())


def test_proximal_is_between_rollout_and_trained_policy_by_version() -> None:
    scored, rollout = torch.tensor([-1.0] * 5), torch.tensor([-3.0] * 5)
    staleness = torch.tensor([0, 1, 2, 3, 5])
    found = algorithm("tis_token", proximal=Proximal.log_linear).proximal(
        scored, rollout, staleness
    )
    # One version before the trained one, of 1, 2, 3 and 5 steps from rollout.
    expected = [-3.0, -3.0, -2.0, -3 + 2 * 2 / 3, -3 + 2 * 4 / 5]
    torch.testing.assert_close(found, torch.tensor(expected))
    recomputed = algorithm("tis_token").proximal(scored, rollout, staleness)
    assert torch.equal(recomputed, scored)
    assert torch.equal(
        algorithm(proximal=Proximal.rollout).proximal(scored, rollout, staleness), rollout
    )


# KL -----------------------------------------------------------------------------------------------

KL = OUR_FUNCTIONS["algorithm.kl.estimator"]
KL_FORMULAS: dict[str, Callable[[float, float], float]] = {
    "k1": lambda d, w: d,
    "k2": lambda d, w: d * d / 2,
    "k3": lambda d, w: float(np.exp(-d) - 1 + d),
    "absolute": lambda d, w: abs(d),
    "unbiased": lambda d, w: w * float(np.exp(-d) - 1 + d),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimator_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    inputs = batch(13)
    reference = inputs.rollout_logprobs_N + 0.2
    inputs = replace(inputs, columns={REFERENCE_COLUMN: reference})
    trainer = inputs.trainer_logprobs_N

    def formula(values: Floats) -> Floats:
        pairs = zip(
            values - reference.numpy(), values - inputs.rollout_logprobs_N.numpy(), strict=True
        )
        found = np.array([KL_FORMULAS[name](d, float(np.exp(w))) for d, w in pairs])
        return found * inputs.mask_N.numpy()

    mine = KL[name](inputs, KLConfig()).masked_fill(~inputs.mask_N, 0.0)
    at = trainer.detach().numpy()
    np.testing.assert_allclose(mine.detach().numpy(), formula(at), rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(mine.sum(), trainer)
    slope = (formula(at + EPSILON) - formula(at - EPSILON)) / (2 * EPSILON)
    np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "is_right"), [("k2", True), ("k1", False), ("k3", False)])
def test_gradient_of_k2_is_that_of_the_divergence(name: str, is_right: bool) -> None:
    # All three outcomes of a small distribution, each with its own probability as weight.
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - other)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    inputs = tokens(
        trainer=logprobs, proximal=logprobs.detach(), rollout=logprobs.detach(), advantages=other
    )
    inputs = replace(inputs, columns={REFERENCE_COLUMN: other})
    estimate = (logprobs.detach().exp() * KL[name](inputs, KLConfig())).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert torch.allclose(gradient, expected) == is_right


# Aggregation --------------------------------------------------------------------------------------


def naive_mean(kind: str, losses_of: list[Floats], shares: list[float], groups: list[int]) -> float:
    rows = [*zip(losses_of, shares, groups, strict=True)]
    episodes = sum(shares)
    if kind == "token_mean":
        return sum(s * x.sum() for x, s, _ in rows) / sum(s * len(x) for x, s, _ in rows)
    if kind == "token_sum":
        return float(sum(s * x.sum() for x, s, _ in rows))
    if kind == "sequence_mean_token_mean":
        return sum(s * x.mean() for x, s, _ in rows) / episodes
    if kind == "sequence_mean_token_sum":
        return sum(s * x.sum() for x, s, _ in rows) / episodes
    if kind == "sequence_mean_token_sum_norm":
        return sum(s * x.sum() / 50 for x, s, _ in rows) / episodes
    assert kind == "prompt_mean"
    means = [
        sum(s * x.sum() for x, s, g in rows if g == group)
        / sum(s * len(x) for x, s, g in rows if g == group)
        for group in sorted(set(groups))
    ]
    return float(np.mean(means))


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregation_is_the_mean_that_it_says_however_groups_are_spread(kind: str) -> None:
    random = np.random.default_rng(3)
    lengths, shares, groups = [3, 1, 8, 2, 5, 4], [1, 0.5, 0.5, 1, 1, 1], [0, 0, 0, 1, 2, 2]
    losses_of = [random.normal(size=length) for length in lengths]
    length = {"aggregation_length": 50} if kind == "sequence_mean_token_sum_norm" else {}
    chosen = algorithm(aggregation=kind, **length)

    def share_of(rows: list[int]) -> tuple[float, float | None]:
        place = {group: i for i, group in enumerate(sorted({groups[r] for r in rows}))}
        found = chosen.aggregate(
            AggregationInputs(
                num_tokens_R=np.array([lengths[r] for r in rows], np.int64),
                shares_R=np.array([shares[r] for r in rows], np.float64),
                groups_R=np.array([place[groups[r]] for r in rows], np.int64),
            )
        )
        total = sum(w * losses_of[r].sum() for w, r in zip(found.weights_R, rows, strict=True))
        return float(total), found.denominator

    expected = naive_mean(kind, losses_of, shares, groups)
    for split in ([[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]], [[3], [], [4, 5, 0, 1, 2]]):
        parts = [share_of(rows) for rows in split]
        denominators = [d for _, d in parts if d is not None]
        total = sum(numerator for numerator, _ in parts)
        assert total / (sum(denominators) if denominators else 1) == pytest.approx(expected)
