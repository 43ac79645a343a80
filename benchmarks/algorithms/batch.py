"""Random batches, our functions of them, and whether two results are equal for a reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from configs.advantages import ADVANTAGES, AGGREGATIONS, AdvantageConfig
from configs.algorithm_schema import REFERENCE_COLUMN, TEACHER_COLUMN, AlgorithmConfig, KLConfig
from configs.checks import FunctionConfig
from configs.corrections import CORRECTIONS
from configs.losses import LOSSES, TeacherKl
from trainer_pool.algorithms import types
from trainer_pool.algorithms.advantages import AdvantageInputs, overlong_penalty
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.registry import OUR_FUNCTIONS, Algorithm
from trainer_pool.algorithms.types import BatchStatistics, LossInputs

BATCHES, ROWS, GROUP, LENGTH = 20, 6, 3, 11
LONG = 40
"""`aggregation_length`, and its namesakes."""
TOLERANCE = 1e-5
"""The largest difference between equal numbers, relative to those above 1."""
CLIP = ("clip_low", "clip_high")
PARTS = {"rewards": 1.0, "other_rewards": 0.5}
"""The parts of the reward, and their weights."""

OURS = {*chain(*OUR_FUNCTIONS.values()), "log_linear", "overlong_penalty"}
"""Names of all our functions: those of the families, and two that belong to none."""
called: set[str] = set()
"""Functions that a comparison has called: `examine` reads and clears them."""
F = TypeVar("F", bound=FunctionConfig)
Values = Mapping[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Batch:
    """[B, T] each; values of tokens whose mask is 0 mean nothing."""

    trainer: Tensor
    proximal: Tensor
    rollout: Tensor
    reference: Tensor
    mask: Tensor
    advantages: Tensor
    """The same for all tokens of an answer."""
    rewards: Tensor
    """[B]"""
    other_rewards: Tensor
    """[B] a second part of the reward, for functions that take several."""
    groups: np.ndarray

    @property
    def num_tokens(self) -> Tensor:
        return self.mask.sum(1)


def random_batch(seed: int) -> Batch:
    """Some ratios are far from 1, so that every bound of `BOUNDS` is passed by some tokens."""
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    def moved(logprobs: Tensor, spread: float) -> Tensor:
        is_far = torch.rand(ROWS, LENGTH, generator=dice) < 0.25
        steps = spread * normal(ROWS, LENGTH) * torch.where(is_far, 5.0, 1.0)
        return (logprobs + steps).clamp(max=-0.01)

    rollout = -3 * normal(ROWS, LENGTH).abs() - 0.05
    proximal = moved(rollout, 0.4)
    trainer = moved(proximal, 0.3)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=dice)
    mask = (torch.arange(LENGTH) < lengths) & (torch.arange(LENGTH) != 1)  # a tool's word at 1
    return Batch(
        trainer=trainer.requires_grad_(),
        proximal=proximal,
        rollout=rollout,
        reference=moved(trainer.detach(), 1.0),
        mask=mask.double(),
        advantages=normal(ROWS, 1).expand(-1, LENGTH).contiguous(),
        rewards=torch.randint(0, 4, (ROWS,), generator=dice).double(),
        other_rewards=torch.randint(0, 3, (ROWS,), generator=dice).double(),
        groups=np.repeat([0, 1], GROUP),
    )


def with_wild_tokens(batch: Batch) -> Batch:
    """The first token of the longest answer has moved up by 17 to 27 nats since it was sampled,
    that of the next one down."""
    up, down = batch.num_tokens.argsort(descending=True)[:2].tolist()
    step = 17 + float(10 * batch.advantages[0, 0].abs() % 10)
    rollout, trainer = batch.rollout.clone(), batch.trainer.detach().clone()
    rollout[up, 0], trainer[up, 0] = -30, step - 30
    rollout[down, 0], trainer[down, 0] = -1, -1 - step
    proximal = batch.proximal.clone()
    proximal[[up, down], 0] = rollout[[up, down], 0]
    return replace(batch, rollout=rollout, proximal=proximal, trainer=trainer.requires_grad_())


def inputs_of(batch: Batch, weights: Tensor, algorithm: Algorithm) -> LossInputs:
    is_real = batch.mask.flatten() != 0

    def real(values: Tensor) -> Tensor:
        return values.flatten()[is_real]

    return LossInputs(
        trainer_logprobs_N=real(batch.trainer),
        proximal_logprobs_N=algorithm.proximal(
            real(batch.proximal), real(batch.rollout), torch.ones(int(is_real.sum()))
        ),
        rollout_logprobs_N=real(batch.rollout),
        advantages_N=real(batch.advantages),
        weights_N=real(weights.unsqueeze(1).expand_as(batch.mask)),
        mask_N=torch.ones(int(is_real.sum()), dtype=torch.bool),
        staleness_N=torch.ones(int(is_real.sum()), dtype=torch.int64),
        segment_ids_N=real(torch.arange(ROWS).unsqueeze(1).expand_as(batch.mask)),
        num_segments=ROWS,
        columns=dict.fromkeys([REFERENCE_COLUMN, TEACHER_COLUMN], real(batch.reference)),
    )


def loss_of(
    batch: Batch,
    corrections: Sequence[str] = (),
    *,
    loss: str = "ppo",
    aggregation: str = "token_mean",
    max_log_ratio: float = types.MAX_LOG_RATIO,
    **settings: Any,
) -> Tensor:
    """Our loss; `settings` of the corrections are prefixed with `correction_`."""
    bounds = {k.removeprefix("correction_"): v for k, v in settings.items()}
    config = AlgorithmConfig(
        correction=[of_kind(CORRECTIONS, kind, bounds) for kind in corrections],
        loss=of_kind(LOSSES, loss, settings),
        aggregation=of_kind(AGGREGATIONS, aggregation, {"aggregation_length": LONG}),
    )
    called.update([loss, *corrections, aggregation])
    algorithm = Algorithm.load(config)
    found = algorithm.aggregate(
        AggregationInputs(
            num_tokens_R=batch.num_tokens.numpy().astype(np.int64),
            shares_R=np.ones(ROWS),
            groups_R=batch.groups,
        )
    )
    inputs = inputs_of(batch, torch.from_numpy(found.weights_R), algorithm)
    statistics = BatchStatistics()
    if algorithm.needs_batch:
        statistics = algorithm.statistics([inputs], lambda sums: sums)
    inputs = replace(inputs, batch=statistics)
    with log_ratios_up_to(max_log_ratio):
        return algorithm.objective(inputs, found.denominator or 1.0).loss


def of_kind(kinds: Mapping[str, type[F]], kind: str, settings: Values) -> F:
    """The settings of a function of this kind, with those of `settings` that it has."""
    section = kinds[kind](kind=kind)
    for name in {item.name for item in fields(section)} & settings.keys():
        setattr(section, name, settings[name])  # past the bounds, by which gspo has no wide ones
    return section


@contextmanager
def log_ratios_up_to(bound: float) -> Iterator[None]:
    """For a bound that is no setting of ours, but is to be lifted here as the others are."""
    usual = types.MAX_LOG_RATIO
    try:
        types.MAX_LOG_RATIO = bound
        yield
    finally:
        types.MAX_LOG_RATIO = usual


def advantages_of(batch: Batch, kind: str, **settings: Any) -> Tensor:
    """[B] our advantages."""
    called.add(kind)
    given = {"part_weights": PARTS, **settings}
    config = AlgorithmConfig(advantage=of_kind(ADVANTAGES, kind, given))
    inputs = AdvantageInputs(
        rewards_E=batch.rewards.numpy(),
        groups_E=batch.groups,
        num_tokens_E=batch.num_tokens.numpy(),
        parts={name: getattr(batch, name).numpy() for name in PARTS},
        trajectories=[SimpleNamespace(num_tokens=1)] * ROWS,  # type: ignore[list-item]
        episodes=range(ROWS),
    )
    return torch.tensor(
        np.concatenate(Algorithm.load(config).advantages(inputs)), dtype=torch.float64
    )


def overlong_of(batch: Batch, **settings: int) -> Tensor:
    """[B] what is added to the rewards."""
    called.add("overlong_penalty")
    config = AdvantageConfig(kind="rloo", **settings)  # type: ignore[arg-type]
    return torch.tensor(
        [-overlong_penalty(int(count), config) for count in batch.num_tokens], dtype=torch.float64
    )


def distillation_of(batch: Batch, weight_cap: float) -> Tensor:
    """The mean of `teacher_kl` over the tokens, with the reference as teacher."""
    called.add("teacher_kl")
    config = TeacherKl(kind="teacher_kl", weight_cap=weight_cap)
    function = OUR_FUNCTIONS["algorithm.streams.*.loss"]["teacher_kl"]
    inputs = inputs_of(batch, torch.ones(ROWS), Algorithm.load(AlgorithmConfig()))
    found: Tensor = function(inputs, config).loss_N.mean()
    return found


def kl_of(batch: Batch, name: str, kl_cap: float = math.inf) -> Tensor:
    """[B, T] within a bound that others have and we do not."""
    called.add(name)
    function = OUR_FUNCTIONS["algorithm.kl.estimator"][name]
    inputs = inputs_of(batch, torch.ones(ROWS), Algorithm.load(AlgorithmConfig()))
    values_N: Tensor = function(inputs, KLConfig())
    values_N = values_N.clamp(-kl_cap, kl_cap)
    return torch.zeros_like(batch.mask).masked_scatter(batch.mask != 0, values_N)


def with_gradient(loss: Tensor, batch: Batch) -> Tensor:
    """[1 + B T] the loss and its gradient."""
    (gradient,) = torch.autograd.grad(loss, batch.trainer)
    return torch.cat([loss.detach().view(1), gradient.flatten()])


def gradient_of(loss: Tensor, batch: Batch) -> Tensor:
    return with_gradient(loss, batch)[1:]


# What is compared -------------------------------------------------------------------------------

Pair = Callable[[Batch, Values, Values], tuple[Tensor, Tensor]]
"""(batch, their bounds, our bounds) -> our result and theirs."""


class Bound(NamedTuple):
    """Values for a setting of ours that bounds something, and one with which it binds nothing."""

    low: float
    high: float
    """For each batch of a comparison a value from low to high is drawn: neither a default of ours,
    nor the value of another comparison, passes for it."""
    lifted: float | None
    """For a slope: another value."""

    def draw(self, dice: np.random.Generator) -> float:
        if isinstance(self.low, int):
            return int(dice.integers(self.low, int(self.high), endpoint=True))
        return float(dice.uniform(self.low, self.high))


BOUNDS = {
    "clip_low": Bound(0.1, 0.4, 1.0),
    "clip_high": Bound(0.1, 0.5, 1e9),
    "dual_clip": Bound(1.6, 3.0, None),
    "weight_cap": Bound(1.2, 3.0, 1e9),
    "sapo_good": Bound(0.5, 2.0, 4.0),
    "sapo_bad": Bound(0.5, 2.0, 4.0),
    "dppo_low": Bound(0.05, 0.2, 1e9),
    "dppo_high": Bound(0.05, 0.2, 1e9),
    "max_log_ratio": Bound(20.0, 20.0, 1e9),
    "kl_cap": Bound(10.0, 10.0, math.inf),
    "correction_tis_cap": Bound(1.2, 3.0, 1e9),
    "correction_icepop_low": Bound(0.3, 0.8, 0.0),
    "correction_icepop_high": Bound(1.3, 4.0, 1e9),
    "correction_geometric_low": Bound(0.6, 0.9, 0.0),
    "correction_geometric_high": Bound(1.1, 1.5, 1e9),
    "correction_product_low": Bound(0.2, 0.8, 0.0),
    "correction_product_high": Bound(1.3, 5.0, 1e9),
    "correction_veto_below": Bound(0.1, 0.5, 1e-9),
    "correction_opsm_limit": Bound(0.05, 0.3, 1e9),
    "overlong_start": Bound(2, 5, 0),
    "overlong_end": Bound(7, 9, 100),
    "epsilon": Bound(0.01, 0.3, 0.0),
}


class Comparison(NamedTuple):
    """A function of ours with one of theirs, and the bounds of it that must be active."""

    pair: Pair
    bounds: Mapping[str, Bound]


def compared(pair: Pair, *bounds: str) -> Comparison:
    return Comparison(pair, {name: BOUNDS[name] for name in bounds})


class Outcome(NamedTuple):
    difference: float
    """The largest over all batches, relative to each of their values that is above 1."""
    functions: list[str]
    """Our functions that it compares."""
    num_values: int
    """Trained tokens of all batches, or answers where a result has a value for each of them."""
    active: Mapping[str, int]
    """The number of values that each bound changes."""
    unnoticed: list[str]
    """Bounds that could differ by a tenth between ours and theirs, and no value would show it."""

    @property
    def problems(self) -> list[str]:
        """Why nothing follows from it that the results are equal."""
        idle = [n for n, count in self.active.items() if not 0 < count < self.num_values]
        return [*(f"{n} is not active on some and not on others" for n in idle)] + [
            f"{n} may differ" for n in self.unnoticed
        ]


def examine(name: str, comparison: Comparison, num_batches: int = BATCHES) -> Outcome:
    """Compares on all batches; and with each bound of ours lifted, or off by a tenth, to see that
    the comparison depends on it."""
    called.clear()
    worst, num_values, active = 0.0, 0, Counter(dict.fromkeys(comparison.bounds, 0))
    unnoticed = {*comparison.bounds}
    for seed in range(num_batches):
        batch = random_batch(seed)
        dice = np.random.default_rng([crc32(name.encode()), seed])
        values = {key: bound.draw(dice) for key, bound in comparison.bounds.items()}
        plain, apart = _results(comparison, batch, values)
        assert apart.isfinite().all(), name
        worst = max(worst, float(apart.max()))
        num_values += int(batch.num_tokens.sum()) if plain.numel() >= batch.mask.numel() else ROWS
        for key, bound in comparison.bounds.items():
            lifted, _ = _results(comparison, batch, values, {key: bound.lifted})
            changed = (lifted - plain).flatten()[-batch.mask.numel() :]  # without the loss itself
            active[key] += int((changed.abs() > TOLERANCE).sum())
            other = values[key] + 1 if isinstance(bound.low, int) else 1.1 * values[key]
            _, apart = _results(comparison, batch, values, {key: other})
            if apart.max() > TOLERANCE:
                unnoticed.discard(key)
    return Outcome(worst, sorted(called), num_values, active, sorted(unnoticed))


def _results(
    comparison: Comparison, batch: Batch, values: Values, changes: Values = MappingProxyType({})
) -> tuple[Tensor, Tensor]:
    """Our result, of bounds with these changes, and how far it is from theirs."""
    ours, theirs = (r.detach() for r in comparison.pair(batch, values, {**values, **changes}))
    assert ours.shape == theirs.shape  # else one would be broadcast
    return ours, (ours - theirs).abs() / theirs.abs().clamp(min=1)
