"""The settings of each advantage and aggregation, by the names of their functions in
`trainer_pool/algorithms/advantages.py` and `aggregation.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from configs.checks import (
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    FunctionConfig,
    Rule,
    Section,
    at_least,
    within,
)


@dataclass(kw_only=True, slots=True)
class AdvantageConfig(FunctionConfig):
    """How rewards become advantages: docs/algorithms.md#advantages."""

    SECTION: ClassVar[str] = "algorithm.advantage"

    overlong_start: int | None = field(default=None, metadata=at_least(0))
    """Generated tokens above which an episode loses reward; None: length costs nothing."""
    overlong_end: int | None = field(default=None, metadata=at_least(1))
    """Generated tokens at which it loses all of `overlong_penalty`; None is
    rollout.max_response_tokens."""
    overlong_penalty: float = field(default=1.0, metadata=POSITIVE)
    """The reward that an episode can lose by its length."""
    mask_truncated: bool = False
    """Do not train on answers that ended at their token limit; their rewards still count in the
    statistics of their group."""

    def rules(self) -> Iterator[Rule]:
        start, end = self.overlong_start, self.overlong_end
        fix = f"must be below algorithm.advantage.overlong_end={end}"
        yield Rule(start is None or end is None or start < end, "overlong_start", fix)
        fix = "without algorithm.advantage.overlong_start length costs nothing; set both"
        yield Rule(end is None or start is not None, "overlong_end", fix)


@dataclass(kw_only=True, slots=True)
class OwnAdvantage(AdvantageConfig):
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own function, by any names."""
    part_weights: dict[str, float] = field(default_factory=dict)
    """The weight of each part of the reward; if empty, those of task.rewards."""


@dataclass(kw_only=True, slots=True)
class Normalized(AdvantageConfig):
    ddof: int = field(default=1, metadata=within(0, 1))
    """Standard deviations divide by the number minus this."""
    epsilon: float = field(default=1e-6, metadata=NOT_NEGATIVE)
    """Added to a standard deviation before it divides."""


@dataclass(kw_only=True, slots=True)
class Gae(AdvantageConfig):
    gamma: float = field(default=1.0, metadata=within(above=0, most=1))
    """Discount of a reward for each further token."""
    gae_lambda: float = field(default=1.0, metadata=within(0, 1))
    """How far the critic's values are trusted: 1: the reward less the value, 0: the difference of
    two values."""
    whiten: bool = True
    """Subtract the mean over all tokens of the batch, and divide by the standard deviation."""


@dataclass(kw_only=True, slots=True)
class CriticConfig(Section):
    """A model of values, by which `gae` estimates advantages: docs/algorithms.md#a-critic."""

    SECTION: ClassVar[str] = "algorithm.critic"

    path: str | None = field(default=None, metadata=NOT_EMPTY)
    """Folder or name of the model that it begins as, of the policy's config.json, with a new head;
    None is the policy that RL begins with, after its warm start."""
    learning_rate: float = field(default=1e-5, metadata=POSITIVE)
    """In place of trainer.learning_rate, whose schedule it follows."""
    clip_range: float | None = field(default=0.5, metadata=POSITIVE)
    """A step gains nothing by moving a value further than this; None: as far as it may."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Steps in which the critic alone learns."""


@dataclass(kw_only=True, slots=True)
class Gdpo(Normalized):
    part_weights: dict[str, float] = field(default_factory=dict)
    """The weight of each part of the reward; if empty, those of task.rewards."""

    def rules(self) -> Iterator[Rule]:
        yield from Normalized.rules(self)
        weights = self.part_weights.values()
        yield Rule(all(map(math.isfinite, weights)), "part_weights", "weights must be finite")
        fix = "nothing would be learnt; give one part another weight"
        yield Rule(not weights or any(weights), "part_weights", fix)


ADVANTAGES: dict[str, type[AdvantageConfig]] = {
    "grpo": Normalized,
    "dr_grpo": AdvantageConfig,
    "rloo": AdvantageConfig,
    "reinforce_pp": Normalized,
    "reinforce_pp_baseline": Normalized,
    "batch_std": Normalized,
    "max_rl": AdvantageConfig,
    "gdpo": Gdpo,
    "pass_at_k": Normalized,
    "gae": Gae,
}


@dataclass(kw_only=True, slots=True)
class AggregationConfig(FunctionConfig):
    """How the losses of tokens become that of an update: docs/algorithms.md#aggregation."""

    SECTION: ClassVar[str] = "algorithm.aggregation"


@dataclass(kw_only=True, slots=True)
class OwnAggregation(AggregationConfig):
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own function, by any names."""


@dataclass(kw_only=True, slots=True)
class SequenceMeanTokenSumNorm(AggregationConfig):
    aggregation_length: int | None = field(default=None, metadata=at_least(1))
    """The constant; None is rollout.max_response_tokens."""


AGGREGATIONS: dict[str, type[AggregationConfig]] = {
    "token_mean": AggregationConfig,
    "token_sum": AggregationConfig,
    "sequence_mean_token_mean": AggregationConfig,
    "sequence_mean_token_sum": AggregationConfig,
    "sequence_mean_token_sum_norm": SequenceMeanTokenSumNorm,
    "prompt_mean": AggregationConfig,
}
