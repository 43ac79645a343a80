"""The settings of each loss, by the name of its function in `trainer_pool/algorithms/losses.py`.

A new loss is a class here, which has its anchor and its settings, and a function there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from configs.checks import NOT_NEGATIVE, POSITIVE, FunctionConfig, within


@dataclass(kw_only=True, slots=True)
class LossConfig(FunctionConfig):
    """The policy's loss of a token: docs/algorithms.md#losses."""

    SECTION: ClassVar[str] = "algorithm.loss"
    ANCHOR: ClassVar[str | None] = None
    """The policy that its ratio compares the trained one with; None: neither, or not known."""


@dataclass(kw_only=True, slots=True)
class OwnLoss(LossConfig):
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own function, by any names."""


@dataclass(kw_only=True, slots=True)
class ProximalLoss(LossConfig):
    """A loss of r = trainer / proximal, whose settings change no gradient where r is 1:
    `AlgorithmConfig.has_unit_ratio`."""

    ANCHOR: ClassVar[str | None] = "proximal"


@dataclass(kw_only=True, slots=True)
class ClippedLoss(ProximalLoss):
    clip_low: float = field(default=0.2, metadata=within(above=0, most=1))
    """The ratio is clipped to at least 1 - clip_low. With the defaults trainer.num_minibatches=1
    and algorithm.proximal=recomputed it is 1 everywhere, and nothing is clipped."""
    clip_high: float = field(default=0.28, metadata=POSITIVE)
    """The ratio is clipped to at most 1 + clip_high, which is without effect where
    clip_low is."""


@dataclass(kw_only=True, slots=True)
class Ppo(ClippedLoss):
    dual_clip: float | None = field(default=None, metadata=within(above=1))
    """A token of negative advantage A has a loss of at most this times |A|; None: no bound."""


@dataclass(kw_only=True, slots=True)
class Gspo(Ppo):
    # PPO with another ratio: the geometric mean over a whole trajectory stays near 1.
    clip_low: float = field(default=3e-4, metadata=within(above=0, most=0.05))
    clip_high: float = field(default=4e-4, metadata=within(above=0, most=0.05))


@dataclass(kw_only=True, slots=True)
class Sapo(ProximalLoss):
    sapo_good: float = field(default=1.0, metadata=POSITIVE)
    """Steepness of the gate for tokens of positive advantage. It has no effect where the ratio is
    1, as with trainer.num_minibatches=1 and algorithm.proximal=recomputed."""
    sapo_bad: float = field(default=1.05, metadata=POSITIVE)
    """Steepness of the gate for the other tokens; without effect where sapo_good is."""


@dataclass(kw_only=True, slots=True)
class RolloutLoss(LossConfig):
    """A loss of w = trainer / rollout."""

    ANCHOR: ClassVar[str | None] = "rollout"


@dataclass(kw_only=True, slots=True)
class Reinforce(RolloutLoss):
    weight_cap: float = field(default=2.0, metadata=POSITIVE)
    """The largest importance weight, trainer / rollout."""


@dataclass(kw_only=True, slots=True)
class Dppo(RolloutLoss):
    dppo_low: float = field(default=0.2, metadata=POSITIVE)
    """A token of negative advantage that has diverged down by more keeps only the gradient of
    log_ratio_penalty."""
    dppo_high: float = field(default=0.2, metadata=POSITIVE)
    """A token of positive advantage that has diverged up by more keeps only the gradient of
    log_ratio_penalty."""
    log_ratio_penalty: float = field(default=1e-3, metadata=NOT_NEGATIVE)
    """Factor of log(trainer / rollout)^2 in the loss."""


LOSSES: dict[str, type[LossConfig]] = {
    "ppo": Ppo,
    "gspo": Gspo,
    "cispo": ClippedLoss,
    "sapo": Sapo,
    "reinforce": Reinforce,
    "importance_sampling": RolloutLoss,
    "dppo_tv": Dppo,
    "dppo_kl": Dppo,
    "supervised": LossConfig,
}


@dataclass(kw_only=True, slots=True)
class StreamLossConfig(FunctionConfig):
    """The stream's loss of a token: docs/algorithms.md#streams."""

    SECTION: ClassVar[str] = "algorithm.streams.*.loss"


@dataclass(kw_only=True, slots=True)
class OwnStreamLoss(StreamLossConfig):
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own function, by any names."""


@dataclass(kw_only=True, slots=True)
class TeacherKl(StreamLossConfig):
    weight_cap: float = field(default=2.0, metadata=POSITIVE)
    """The largest importance weight, trainer / rollout."""


STREAM_LOSSES: dict[str, type[StreamLossConfig]] = {
    "supervised": StreamLossConfig,
    "teacher_kl": TeacherKl,
}
