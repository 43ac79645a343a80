"""The functions that the settings of the algorithm name: ours, or a user's as `file.py:name`.

rewards ─ advantage ─► advantages of tokens ┐
trajectories ─ aggregation ─► weights ──────┤
                                            ├─ loss x corrections x weights ─► sum / denominator
log-probabilities of three policies ────────┘

The loss of an update is the sum of its streams: the policy's, as above, and those of
`algorithm.streams`, each with its own loss, weights and denominator; and the load balancing loss of
a mixture of experts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.advantages import ADVANTAGES, AGGREGATIONS, AggregationConfig
from configs.algorithm_schema import KL_ESTIMATORS, POLICY, AlgorithmConfig
from configs.choices import KLPlace, Proximal
from configs.corrections import CORRECTIONS
from configs.losses import LOSSES, STREAM_LOSSES
from host.user_code import load_callable
from trainer_pool.algorithms import advantages, aggregation, corrections, kl, losses
from trainer_pool.algorithms.advantages import AdvantageInputs, TokenAdvantages
from trainer_pool.algorithms.aggregation import Aggregation, AggregationInputs
from trainer_pool.algorithms.load_balancing import RouterSums, load_balancing_loss
from trainer_pool.algorithms.types import (
    MAX_LOG_RATIO,
    BatchStatistics,
    Correction,
    LossInputs,
    LossOutputs,
)

# The second argument has the settings of the function's own kind.
LossFunction = Callable[[LossInputs, Any], LossOutputs]
CorrectionFunction = Callable[[LossInputs, Any], Correction]
AdvantageFunction = Callable[[AdvantageInputs, Any], TokenAdvantages]
AggregationFunction = Callable[[AggregationInputs, Any], Aggregation]
KLFunction = Callable[[LossInputs, Any], Tensor]
Columns = Mapping[str, NDArray[np.float32]]


def _functions(module: Any, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in names}


OUR_FUNCTIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "algorithm.loss": _functions(losses, LOSSES),
    "algorithm.correction": _functions(corrections, CORRECTIONS),
    "algorithm.advantage.kind": _functions(advantages, ADVANTAGES),
    "algorithm.aggregation": _functions(aggregation, AGGREGATIONS),
    "algorithm.kl.estimator": _functions(kl, KL_ESTIMATORS),
    "algorithm.streams.*.loss": _functions(losses, STREAM_LOSSES),
    "algorithm.streams.*.aggregation": _functions(aggregation, AGGREGATIONS),
}
"""Our functions by the setting that names them. Each takes (inputs, config)."""


def find(setting: str, name: str) -> Callable[..., Any]:
    """The function that `setting` names. Raises ValueError if a user's function cannot be loaded or
    does not take (inputs, config)."""
    if name in OUR_FUNCTIONS[setting]:
        return OUR_FUNCTIONS[setting][name]
    function: Callable[..., Any] = load_callable(name, setting)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{setting}={name!r}: must take (inputs, config), but takes "
            f"{inspect.signature(function)}; docs/algorithms.md has an example"
        ) from error
    return function


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Objective:
    """The loss of one micro-batch, and its contribution to the metrics of the step."""

    loss: Tensor
    """Scalar, to differentiate: this micro-batch's part of the loss of the update."""
    diagnostics: Mapping[str, Tensor]
    """[N] each: see `LossOutputs.diagnostics`."""
    metrics: Mapping[str, tuple[Tensor, Tensor]]
    """A sum and a count each: see `LossOutputs.metrics`."""

    def plus(self, stream: Objective) -> Objective:
        """This objective with a further stream's loss and metrics added."""
        metrics = {**self.metrics, **stream.metrics}
        return replace(self, loss=self.loss + stream.loss, metrics=metrics)


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Algorithm:
    """The functions that the settings name.

        algorithm = Algorithm.load(config)           # raises ValueError
        advantages = algorithm.advantages(episodes)
        objective = algorithm.objective(inputs, denominator)
        objective.loss.backward()

    The shapes and types that a user's functions return are checked here.
    """

    config: AlgorithmConfig
    loss: LossFunction
    corrections: tuple[CorrectionFunction, ...]
    advantage: AdvantageFunction
    kl: KLFunction
    streams: Mapping[str, LossFunction]
    """The losses of further streams."""
    aggregations: Mapping[str, tuple[AggregationFunction, AggregationConfig]]
    """By stream, the policy's by POLICY."""

    @classmethod
    def load(cls, config: AlgorithmConfig) -> Algorithm:
        """Raises ValueError naming the setting whose function cannot be used."""
        of_stream = "algorithm.streams.*.aggregation"
        return cls(
            config=config,
            loss=find("algorithm.loss", config.loss.kind),
            corrections=tuple(find("algorithm.correction", kind) for kind in config.corrections),
            advantage=find("algorithm.advantage.kind", config.advantage.kind),
            kl=find("algorithm.kl.estimator", config.kl.estimator),
            streams={
                name: find("algorithm.streams.*.loss", stream.loss.kind)
                for name, stream in config.streams.items()
            },
            aggregations={
                POLICY: (
                    find("algorithm.aggregation", config.aggregation.kind),
                    config.aggregation,
                ),
                **{
                    name: (find(of_stream, stream.aggregation.kind), stream.aggregation)
                    for name, stream in config.streams.items()
                },
            },
        )

    def advantages(self, inputs: AdvantageInputs) -> TokenAdvantages:
        """[T] for each of this rank's trajectories.

        Raises ValueError if a user's function returns something else, or numbers that are not
        finite.
        """
        config = self.config.advantage
        # A user's may be a generator, which gives its values once, or lists.
        found = [np.asarray(values, np.float32) for values in self.advantage(inputs, config)]
        what = f"algorithm.advantage.kind={config.kind!r}"
        shapes = [values.shape for values in found]
        expected = [(trajectory.num_tokens,) for trajectory in inputs.trajectories]
        if shapes != expected:
            raise ValueError(
                f"{what}: must return an array [T] for each of {len(expected)} trajectories, the "
                f"first of the shapes {expected[:3]}; it returned {len(shapes)}, the first "
                f"{shapes[:3]}"
            )
        if not found or np.isfinite(np.concatenate(found)).all():
            return found
        for place, values in enumerate(found):
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{what}: returned an advantage that is NaN or infinite, for trajectory "
                    f"{place} of {len(found)}, whose episode has the reward "
                    f"{inputs.rewards_E[inputs.episodes[place]]:g}; return finite numbers, as 0 "
                    "for a token from which nothing can be learnt"
                )
        return found

    def aggregate(self, inputs: AggregationInputs, stream: str = POLICY) -> Aggregation:
        """The weights of the loss of a stream.

        Raises ValueError if a user's function returns something else than [R] weights, or numbers
        that are negative or not finite.
        """
        function, config = self.aggregations[stream]
        place = "" if stream == POLICY else f"streams.{stream}."
        what = f"algorithm.{place}aggregation={config.kind!r}"
        found = function(inputs, config)
        if not isinstance(found, Aggregation):
            raise ValueError(f"{what}: must return Aggregation, not {type(found).__name__}")
        if found.weights_R.shape != inputs.shares_R.shape:
            raise ValueError(
                f"{what}: must return a weight for each of {len(inputs.shares_R)} trajectories, "
                f"not {found.weights_R.shape}"
            )
        numbers = [*found.weights_R, *([] if found.denominator is None else [found.denominator])]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(
                f"{what}: weights and denominator must be finite numbers of at least 0 (or the "
                f"denominator None); it returned the weights {found.weights_R[:3]} ... for "
                f"{inputs.num_tokens_R[:3]} ... tokens, and the denominator {found.denominator}"
            )
        return found

    def proximal(self, scored_N: Tensor, rollout_N: Tensor, staleness_N: Tensor) -> Tensor:
        """[N] log-probabilities of the proximal policy; `scored_N`: by the trained policy, at the
        start of the step if it was scored then, else now.

        log_linear (A-3PO, arXiv 2512.06547): the policy one version before the trained one, on a
        line from the rollout policy to the trained one that has a step for each version.
        """
        if self.config.proximal is Proximal.rollout:
            return rollout_N
        if self.config.proximal is Proximal.recomputed:
            return scored_N
        fraction_N = (staleness_N - 1).clamp(min=0) / staleness_N.clamp(min=1)
        return rollout_N + fraction_N.to(scored_N.dtype) * (scored_N - rollout_N)

    @property
    def needs_batch(self) -> bool:
        return corrections.needs_batch(self.config)

    def statistics(
        self, parts: Sequence[LossInputs], sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> BatchStatistics:
        """Statistics of an update whose micro-batches on this rank are `parts`; collective."""
        # Weights alone: a mask's zeros would lower the mean, and so raise the weight of the tokens
        # that remain.
        return corrections.batch_statistics(
            parts,
            self.config,
            lambda part: self._factors(part, only_weights=True)[0],
            sum_over_ranks,
        )

    def _factors(
        self, inputs: LossInputs, *, only_weights: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] product of the factors of all corrections, or of all weights; their diagnostics."""
        factors_N = torch.ones_like(inputs.rollout_logprobs_N)
        diagnostics: dict[str, Tensor] = {}
        for config, correction in zip(self.config.correction, self.corrections, strict=True):
            if only_weights and not config.IS_WEIGHT:
                continue
            part = correction(inputs, config)
            if not isinstance(part, Correction) or part.factors_N.shape != factors_N.shape:
                raise ValueError(
                    f"algorithm.correction={self.config.corrections!r}: each must "
                    f"return a Correction with a factor for each of the {len(factors_N)} tokens"
                )
            factors_N = factors_N * part.factors_N
            diagnostics.update(part.diagnostics)
        return factors_N, diagnostics

    def objective(self, inputs: LossInputs, denominator: float) -> Objective:
        """The policy's loss in a micro-batch: the sum over its tokens of

            weight x (policy_weight x factor x loss - entropy bonus + kl.weight x KL) / denominator

        Raises ValueError if a user's loss returns something else than [N] losses.
        """
        config = self.config
        outputs = self.loss(inputs, config.loss)
        self._check(outputs, inputs, f"algorithm.loss={config.loss.kind!r}")
        factors_N, diagnostics = self._factors(inputs)
        factors_N = factors_N / inputs.batch.mean_weight
        loss_N = config.policy_weight * factors_N * outputs.loss_N
        if config.entropy_weight:
            loss_N = loss_N - self._bonus(inputs)
        if config.kl.weight:
            kl_N = self._divergence(inputs)
            diagnostics["kl"] = kl_N.detach()
            if config.kl.where is KLPlace.loss:
                loss_N = loss_N + config.kl.weight * kl_N
        loss_N = inputs.weights_N * loss_N
        return Objective(
            loss=loss_N.masked_fill(~inputs.mask_N, 0.0).sum() / denominator,
            diagnostics={
                **outputs.diagnostics,
                **diagnostics,
                "rejected_fraction": factors_N == 0,
                "bounded_fraction": is_bounded(inputs),
            },
            metrics=outputs.metrics,
        )

    def stream_objective(self, name: str, inputs: LossInputs, denominator: float) -> Objective:
        """A further stream's loss in a micro-batch; `inputs` has the stream's weights and mask.

        Its diagnostics become metrics, since their means are over the stream's tokens. Raises
        ValueError if a user's loss returns something else than [N] losses.
        """
        config = self.config.streams[name]
        outputs = self.streams[name](inputs, config.loss)
        self._check(outputs, inputs, f"algorithm.streams.{name}.loss={config.loss.kind!r}")
        loss_N = (inputs.weights_N * outputs.loss_N).masked_fill(~inputs.mask_N, 0.0)
        count = inputs.mask_N.sum()
        sums = {"loss": outputs.loss_N, **outputs.diagnostics}
        return Objective(
            loss=config.weight * loss_N.sum() / denominator,
            diagnostics={},
            metrics={
                f"{name}/{key}": (values.detach().masked_fill(~inputs.mask_N, 0).sum(), count)
                for key, values in sums.items()
            }
            | {f"{name}/{key}": pair for key, pair in outputs.metrics.items()},
        )

    def balance_objective(self, sums: RouterSums, batch: BatchStatistics) -> Objective:
        """The load balancing loss of a micro-batch whose trained tokens have these `sums`."""
        assert batch.routers is not None
        loss = self.config.load_balancing_weight * load_balancing_loss(sums, batch.routers)
        return Objective(loss=loss, diagnostics={}, metrics={})

    @property
    def needs_reference(self) -> bool:
        """A term of the loss or the reward reads a reference's log-probabilities."""
        return self.config.kl.weight > 0

    def reward_penalty(self, rollout_T: NDArray[np.float32], columns: Columns) -> float:
        """The part of a trajectory's reward that its distance from the reference costs.

        [T] over its trained tokens: their log-probabilities by the engines, and each column.
        """
        logprobs_N = torch.from_numpy(rollout_T)
        inputs = LossInputs(
            trainer_logprobs_N=logprobs_N,
            proximal_logprobs_N=logprobs_N,
            rollout_logprobs_N=logprobs_N,
            advantages_N=torch.zeros_like(logprobs_N),
            weights_N=torch.ones_like(logprobs_N),
            mask_N=torch.ones_like(logprobs_N, dtype=torch.bool),
            staleness_N=torch.zeros_like(logprobs_N, dtype=torch.int64),
            segment_ids_N=torch.zeros_like(logprobs_N, dtype=torch.int64),
            num_segments=1,
            columns={name: torch.from_numpy(values) for name, values in columns.items()},
        )
        return self.config.kl.weight * float(self._divergence(inputs).double().sum())

    def _divergence(self, inputs: LossInputs) -> Tensor:
        kl_N: object = self.kl(inputs, self.config.kl)
        if not isinstance(kl_N, Tensor) or kl_N.shape != inputs.mask_N.shape:
            shape = getattr(kl_N, "shape", None)
            what = type(kl_N).__name__ if shape is None else f"the shape {tuple(shape)}"
            raise ValueError(
                f"algorithm.kl.estimator={self.config.kl.estimator!r}: must return a tensor with a "
                f"divergence for each of the {len(inputs.mask_N)} tokens; it returned {what}"
            )
        return kl_N

    def _bonus(self, inputs: LossInputs) -> Tensor:
        weight, entropy_N = self.config.entropy_weight, inputs.entropy_N
        # A bonus without a gradient would be a setting that does nothing.
        if entropy_N is None or not entropy_N.requires_grad:
            raise ValueError(
                f"algorithm.entropy_weight={weight:g}: the entropy comes without a gradient; set 0"
            )
        return weight * entropy_N

    def _check(self, outputs: object, inputs: LossInputs, what: str) -> None:
        if not isinstance(outputs, LossOutputs):
            raise ValueError(f"{what}: must return LossOutputs, not {type(outputs).__name__}")
        shape = inputs.mask_N.shape
        for name, values in {"loss_N": outputs.loss_N, **outputs.diagnostics}.items():
            if values.shape != shape:
                raise ValueError(
                    f"{what}: {name} has the shape {tuple(values.shape)}; return one value for "
                    f"each of the {shape[0]} tokens, not yet summed"
                )
        for name, pair in outputs.metrics.items():
            shapes = [getattr(number, "shape", type(number).__name__) for number in pair]
            if shapes != [(), ()]:
                shown = ", ".join(map(str, shapes))
                raise ValueError(
                    f"{what}: the metric {name} must be a pair of tensors without dimensions, a "
                    f"sum and a count, as (values_N.sum(), inputs.mask_N.sum()); it is ({shown})"
                )


def is_bounded(inputs: LossInputs) -> Tensor:
    """[N] whether a log ratio of the token exceeded MAX_LOG_RATIO."""
    moved_N = inputs.trainer_logprobs_N.detach() - inputs.proximal_logprobs_N
    stale_N = inputs.proximal_logprobs_N - inputs.rollout_logprobs_N
    return (moved_N.abs() > MAX_LOG_RATIO) | (stale_N.abs() > MAX_LOG_RATIO)
