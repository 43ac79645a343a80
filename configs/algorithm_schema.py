"""The settings of the algorithm: loss, advantage, corrections, aggregation, and their legal
combinations.

A function is chosen by its kind, or is a user's own as `file.py:function`; its settings stand in
the file of its family. `AlgorithmConfig.rules` and `off_policy_rules` refuse combinations that
would not train what they say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from configs.advantages import (
    ADVANTAGES,
    AGGREGATIONS,
    AdvantageConfig,
    AggregationConfig,
    CriticConfig,
    Normalized,
    OwnAdvantage,
    OwnAggregation,
)
from configs.checks import (
    CODE_PATTERN,
    FINITE,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    FunctionConfig,
    Rule,
    Section,
    matching,
)
from configs.choices import KLPlace, Proximal, StreamTokens
from configs.corrections import CORRECTIONS, CorrectionConfig, OwnCorrection, Truncated
from configs.losses import (
    LOSSES,
    STREAM_LOSSES,
    LossConfig,
    OwnLoss,
    OwnStreamLoss,
    Ppo,
    StreamLossConfig,
)


class Family(NamedTuple):
    """The functions from which one kind of setting chooses, as `algorithm.loss` from losses."""

    kinds: Mapping[str, type[FunctionConfig]]
    """The settings of each of ours; the first is the default."""
    own: type[FunctionConfig]
    """The settings of a user's function."""

    def section(self, kind: str) -> type[FunctionConfig] | None:
        """The settings that a function of this name has; None: there is none."""
        return self.own if re.fullmatch(CODE_PATTERN, kind) else self.kinds.get(kind)


SETTINGS_FAMILIES: Mapping[type[FunctionConfig], Family] = {
    LossConfig: Family(LOSSES, OwnLoss),
    StreamLossConfig: Family(STREAM_LOSSES, OwnStreamLoss),
    AdvantageConfig: Family(ADVANTAGES, OwnAdvantage),
    AggregationConfig: Family(AGGREGATIONS, OwnAggregation),
    CorrectionConfig: Family(CORRECTIONS, OwnCorrection),
}
"""Every family, by the type of a setting that chooses one of its functions."""
KL_ESTIMATORS = ("k1", "k2", "k3", "absolute", "unbiased")
ESTIMATOR = matching(
    rf"{'|'.join(KL_ESTIMATORS)}|{CODE_PATTERN}", f"{', '.join(KL_ESTIMATORS)} or file.py:name"
)
POLICY = "policy"
"""Name of the stream whose settings are `loss`, `correction` and `advantage`."""
TEACHER_COLUMN, REFERENCE_COLUMN = "teacher_logprobs", "reference_logprobs"
VALUE_COLUMN, RETURN_COLUMN = "values", "returns"


@dataclass(kw_only=True, slots=True)
class KLConfig(Section):
    """Holds the policy near a reference; each rank keeps its part of the reference's weights."""

    SECTION: ClassVar[str] = "algorithm.kl"

    weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Factor of the divergence in the loss, or in the reward; 0: there is no reference."""
    estimator: str = field(default="k3", metadata=ESTIMATOR)
    """The estimator of KL(trainer | reference) at each token: docs/algorithms.md#reference."""
    where: KLPlace = KLPlace.loss
    """The divergence is a term of the loss, or is subtracted from the reward."""
    reference: str | None = field(default=None, metadata=NOT_EMPTY)
    """Folder or name of the reference model, of the same config.json; None is the policy that RL
    begins with, after its warm start."""
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own estimator, by any names."""
    offload: bool = False
    """Keep its weights in pinned host memory between passes, which frees GPU memory."""

    def rules(self) -> Iterator[Rule]:
        for name in ("reference", "offload"):
            fix = "with algorithm.kl.weight=0 there is no reference; raise it, or leave this out"
            yield Rule(self.weight > 0 or not getattr(self, name), name, fix)
        fix = f"algorithm.kl.estimator={self.estimator} reads none; leave them out"
        yield Rule(not self.params or ":" in self.estimator, "params", fix)
        yield Rule(
            not (self.weight and self.where is KLPlace.loss and self.estimator == "k1"),
            "estimator",
            "as a term of the loss the gradient of k1 has the mean 0: nothing would be held; "
            "set k2, k3 or unbiased, or algorithm.kl.where=reward",
        )
        yield Rule(
            not (self.where is KLPlace.reward and self.estimator == "unbiased"),
            "estimator",
            "a reward is computed with the policy that sampled the tokens, so there is no ratio to "
            "weight by; set k1, whose mean is the divergence",
        )


@dataclass(kw_only=True, slots=True)
class StreamConfig(Section):
    """A further loss in the same step, with a denominator of its own; its name is its key in
    `algorithm.streams`."""

    SECTION: ClassVar[str] = "algorithm.streams.*"

    weight: float = field(default=1.0, metadata=POSITIVE)
    """Factor of this loss in the sum of all."""
    loss: StreamLossConfig = field(default_factory=lambda: StreamLossConfig(kind="supervised"))
    tokens: StreamTokens = StreamTokens.answers
    """The tokens that it trains."""
    aggregation: AggregationConfig = field(
        default_factory=lambda: AggregationConfig(kind="token_mean")
    )
    min_reward: float | None = field(default=None, metadata=FINITE)
    """Train only episodes with at least this reward; None: all."""

    def rules(self) -> Iterator[Rule]:
        yield Rule(
            self.loss.kind != "teacher_kl" or self.tokens is StreamTokens.answers,
            "tokens",
            "algorithm.streams.*.loss=teacher_kl compares two policies on tokens that one of them "
            "sampled; set answers",
        )


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Section):
    """The algorithm that trains on a batch. docs/algorithms.md explains the functions and their
    sources."""

    SECTION: ClassVar[str] = "algorithm"

    proximal: Proximal = Proximal.recomputed
    """The policy that a step's ratios compare the trained one with."""
    loss: LossConfig = field(default_factory=lambda: Ppo(kind="ppo"))
    """The policy's loss of a token."""
    aggregation: AggregationConfig = field(
        default_factory=lambda: AggregationConfig(kind="token_mean")
    )
    """How the losses of tokens become that of an update."""
    advantage: AdvantageConfig = field(default_factory=lambda: Normalized(kind="grpo"))
    """How rewards become advantages."""
    critic: CriticConfig | None = None
    """None: no values are learnt, and no memory is taken."""
    correction: list[CorrectionConfig] = field(
        default_factory=lambda: [Truncated(kind="tis_token")]
    )
    """Weights and masks for tokens that another policy sampled. All that are named apply; `[]` for
    none."""
    kl: KLConfig = field(default_factory=KLConfig)
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Further losses by name, such as distillation from a teacher: docs/algorithms.md#streams."""
    entropy_weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Entropy bonus: this times the policy's entropy (nats) is subtracted from the loss of each
    token; corrections do not change it."""
    load_balancing_weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Factor of the load balancing loss of a mixture of experts, which is added to the loss of each
    update; each step then makes one more forward pass: docs/algorithms.md#load-balancing."""
    policy_weight: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """Factor of `loss` in the sum of all streams; 0: only `streams` are trained."""

    @property
    def corrections(self) -> list[str]:
        """The kinds of `correction`."""
        return [correction.kind for correction in self.correction]

    @property
    def functions(self) -> list[FunctionConfig]:
        """The settings of all chosen functions but the KL estimator."""
        streams = self.streams.values()
        return [
            *(self.loss, self.aggregation, self.advantage, *self.correction),
            *(one for stream in streams for one in (stream.loss, stream.aggregation)),
        ]

    @property
    def is_anchored_at_rollout(self) -> bool:
        """The loss itself weights tokens by trainer / rollout."""
        uses_rollout = self.proximal is Proximal.rollout
        return self.loss.ANCHOR == "rollout" or (self.loss.ANCHOR == "proximal" and uses_rollout)

    def has_unit_ratio(self, num_minibatches: int) -> bool:
        """The ratio of the loss is 1 for every token, because the proximal policy is that of the
        only update's own forward pass."""
        is_recomputed = self.proximal is Proximal.recomputed
        return self.loss.ANCHOR == "proximal" and is_recomputed and num_minibatches == 1

    @property
    def needs_proximal(self) -> bool:
        """A loss or a correction reads the proximal policy's log-probabilities."""
        losses = [self.loss, *(stream.loss for stream in self.streams.values())]
        has_own = any(loss.is_own for loss in losses)
        return has_own or self.loss.ANCHOR == "proximal" or bool(self.correction)

    @property
    def needs_teacher(self) -> bool:
        """A stream learns from a teacher's log-probabilities."""
        return any(stream.loss.kind == "teacher_kl" for stream in self.streams.values())

    @property
    def may_read_teacher(self) -> bool:
        """A chosen function can read a teacher's log-probabilities: any of a user's may."""
        has_own_kl = self.kl.weight > 0 and ":" in self.kl.estimator
        readers = [one for one in self.functions if not isinstance(one, AggregationConfig)]
        return self.needs_teacher or has_own_kl or any(one.is_own for one in readers)

    def rules(self) -> Iterator[Rule]:
        yield Rule(
            self.policy_weight > 0 or bool(self.streams),
            "policy_weight",
            "nothing would be learnt; raise it, or set a stream, as "
            "algorithm.streams.teacher.loss=teacher_kl",
        )
        yield Rule(
            self.policy_weight > 0 or self.kl.weight == 0 or self.kl.where is KLPlace.loss,
            "policy_weight",
            "algorithm.kl.where=reward acts by the policy's loss; raise this, or set "
            "algorithm.kl.where=loss",
        )
        yield Rule(
            POLICY not in self.streams and all(name.isidentifier() for name in self.streams),
            "streams",
            f"names must be words of letters, digits and _, and {POLICY} is that of algorithm.loss",
            [*self.streams],
        )
        kind, has_critic = self.advantage.kind, self.critic is not None
        fix = "it needs the values of a critic; set algorithm.critic={} too"
        yield Rule(has_critic or kind != "gae", "advantage.kind", fix)
        is_read = kind == "gae" and self.policy_weight > 0 and self.loss.kind != "supervised"
        yield Rule(
            is_read or not has_critic,
            "critic",
            "only algorithm.advantage=gae reads values, for a loss that reads advantages; set "
            "these, or null here",
            {},
        )
        yield from self._penalty_rules()
        yield from self._correction_rules()
        yield Rule(
            self.needs_proximal or self.proximal is Proximal.recomputed,
            "proximal",
            f"algorithm.loss={self.loss.kind} without a correction does not read it; set "
            "recomputed",
        )

    def _penalty_rules(self) -> Iterator[Rule]:
        """For what is taken off rewards, which reaches the loss by advantages alone."""
        kind = self.advantage.kind
        if self.loss.kind == "supervised" or self.policy_weight == 0:
            where = "loss=supervised" if self.policy_weight else "policy_weight=0"
            why = f"with algorithm.{where} no reward is learnt from, so this would do nothing"
        elif kind == "gdpo":
            why = (
                "algorithm.advantage.kind=gdpo learns from the parts of rewards, which lose nothing"
            )
        elif kind == "max_rl":
            why = "algorithm.advantage.kind=max_rl cannot use the rewards below 0 that this makes"
        else:
            return
        fix = f"{why}; set null"
        yield Rule(self.advantage.overlong_start is None, "advantage.overlong_start", fix)
        fix = f"{why}; set loss"
        yield Rule(self.kl.weight == 0 or self.kl.where is KLPlace.loss, "kl.where", fix)

    def _correction_rules(self) -> Iterator[Rule]:
        kinds = self.corrections
        weights = [one.kind for one in self.correction if one.IS_WEIGHT]
        yield Rule(
            len(set(kinds)) == len(kinds), "correction", "each correction applies once", kinds
        )
        fix = f"{' and '.join(weights)} would multiply two weights for the same ratio; keep one"
        yield Rule(len(weights) <= 1, "correction", fix, kinds)
        fix = "algorithm.loss=supervised imitates tokens, whichever policy sampled them; set []"
        yield Rule(self.loss.kind != "supervised" or not kinds, "correction", fix, kinds)
        where = f"algorithm.loss={self.loss.kind}"
        if self.proximal is Proximal.rollout:
            where += " with algorithm.proximal=rollout"
        yield Rule(
            not (self.is_anchored_at_rollout and weights),
            "correction",
            f"{where} already weights tokens by trainer / rollout, and a second weight would count "
            "staleness twice; keep only masks, or set []",
            kinds,
        )
        blind = [kind for kind in kinds if kind in CORRECTIONS and kind != "opsm"]
        yield Rule(
            not (self.proximal is Proximal.rollout and blind),
            "correction",
            "with algorithm.proximal=rollout the ratio to rollout is 1 for every token, so "
            f"{' and '.join(blind)} would change nothing; set algorithm.proximal=recomputed, or []",
            kinds,
        )

    def off_policy_rules(self, max_staleness: int, num_minibatches: int) -> Iterator[Rule]:
        """Rules for data of other versions, and for several updates with one batch."""
        loss = self.loss
        yield Rule(
            max_staleness == 0
            or loss.ANCHOR != "proximal"
            or self.proximal is Proximal.rollout
            or not all(one.IS_PARTIAL for one in self.correction),
            "correction",
            f"with buffer.max_staleness={max_staleness} algorithm.loss={loss.kind} would treat "
            "tokens of older versions as the trained one's: its denominator is algorithm.proximal="
            f"{self.proximal.name}; add a correction such as tis_token, set "
            "algorithm.proximal=rollout, or buffer.max_staleness=0",
            self.corrections,
        )
        yield Rule(
            self.proximal is not Proximal.log_linear or max_staleness > 1,
            "proximal",
            f"with buffer.max_staleness={max_staleness} the version before the trained one is that "
            "of each older token, so there is nothing to interpolate; set recomputed, or rollout "
            "without a weight",
        )
        yield Rule(
            not (isinstance(loss, Ppo) and loss.dual_clip is not None)
            or not self.has_unit_ratio(num_minibatches),
            "loss.dual_clip",
            "with trainer.num_minibatches=1 the ratio to the policy at the start of the step is 1 "
            "and there is nothing to bound; set null, raise trainer.num_minibatches, or set "
            "algorithm.proximal=rollout",
        )
