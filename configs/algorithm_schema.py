"""The settings of the algorithm: loss, advantage, corrections, aggregation, and their legal
combinations.

A function is chosen by its name, or is a user's own as `file.py:function`. `AlgorithmConfig.rules`
and `off_policy_rules` refuse combinations that would not train what they say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from configs.checks import (
    CODE_PATTERN,
    FINITE,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Bound,
    Rule,
    Section,
    at_least,
    matching,
    within,
)
from configs.choices import KLPlace, Proximal, StreamTokens

LOSSES = {
    "ppo": "proximal",
    "gspo": "proximal",
    "cispo": "proximal",
    "sapo": "proximal",
    "reinforce": "rollout",
    "importance_sampling": "rollout",
    "dppo_tv": "rollout",
    "dppo_kl": "rollout",
    "supervised": None,
}
"""Each loss, and its anchor: the policy that its ratio compares the trained one with."""
ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "batch_std",
    "max_rl",
    "gdpo",
    "pass_at_k",
)
WEIGHTS = ("tis_token", "tis_sequence", "tis_geometric", "icepop")
"""Corrections that weight tokens by proximal / rollout."""
MASKS = ("geometric_mask", "product_mask", "veto", "opsm", "m2po", "kpop")
"""Corrections that reject tokens or trajectories."""
PARTIAL_MASKS = ("veto", "opsm")
"""Those that leave most of what staleness does to p as it is."""
AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "prompt_mean",
)
KL_ESTIMATORS = ("k1", "k2", "k3", "absolute", "unbiased")
STREAM_LOSSES = ("supervised", "teacher_kl")
POLICY = "policy"
"""Name of the stream whose settings are `loss`, `correction` and `advantage`."""
TEACHER_COLUMN, REFERENCE_COLUMN = "teacher_logprobs", "reference_logprobs"


def named(names: Iterable[str]) -> Mapping[str, Bound]:
    """Metadata of a setting that names one of our functions or a user's."""
    return matching(rf"{'|'.join(names)}|{CODE_PATTERN}", f"{', '.join(names)} or file.py:name")


@dataclass(kw_only=True, slots=True)
class AdvantageConfig(Section):
    """How rewards become advantages."""

    SECTION: ClassVar[str] = "algorithm.advantage"

    kind: str = field(default="grpo", metadata=named(ADVANTAGES))
    """The function: docs/algorithms.md#advantages."""
    ddof: int = field(default=1, metadata=within(0, 1))
    """Standard deviations divide by the number minus this."""
    epsilon: float = field(default=1e-6, metadata=NOT_NEGATIVE)
    """Added to a standard deviation before it divides."""
    part_weights: dict[str, float] = field(default_factory=dict)
    """gdpo: the weight of each part of the reward; if empty, those of task.rewards."""
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
        yield Rule(
            start is None or end is None or start < end,
            "overlong_start",
            f"must be below algorithm.advantage.overlong_end={end}",
        )
        yield Rule(
            end is None or start is not None,
            "overlong_end",
            "without algorithm.advantage.overlong_start length costs nothing; set both",
        )
        weights = self.part_weights.values()
        yield Rule(
            all(map(math.isfinite, weights)),
            "part_weights",
            "weights must be finite",
        )
        yield Rule(
            self.kind != "gdpo" or not weights or any(weights),
            "part_weights",
            "nothing would be learnt; give one part another weight",
        )


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Section):
    """Weights and masks for tokens that another policy sampled, by p = proximal / rollout. A
    rejected token has no gradient, but still counts in the denominator of the loss."""

    SECTION: ClassVar[str] = "algorithm.correction"

    kinds: list[str] = field(
        default_factory=lambda: ["tis_token"], metadata=named((*WEIGHTS, *MASKS))
    )
    """All that are named apply; `[]` for none: docs/algorithms.md#corrections."""
    tis_cap: float = field(default=2.0, metadata=within(1))
    """tis_token, tis_sequence, tis_geometric: the largest weight, which is p itself, its product
    over the trajectory, or its geometric mean."""
    normalize: bool = False
    """tis_token, tis_sequence, tis_geometric: divide the weights by their mean over the update."""
    icepop_low: float = field(default=0.5, metadata=within(0, below=1))
    """icepop: tokens with p below this are rejected."""
    icepop_high: float = field(default=5.0, metadata=within(above=1))
    """icepop: tokens with p above this are rejected; the others are weighted by p."""
    geometric_low: float = field(default=0.999, metadata=within(0, below=1))
    """geometric_mask: the smallest geometric mean of p over a trajectory."""
    geometric_high: float = field(default=1.001, metadata=within(above=1))
    """geometric_mask: the largest one; the defaults are verl's."""
    product_low: float = field(default=0.5, metadata=within(0, below=1))
    """product_mask: the smallest product of p over a trajectory."""
    product_high: float = field(default=2.0, metadata=within(above=1))
    """product_mask: the largest one."""
    veto_below: float = field(default=1e-4, metadata=within(above=0, below=1))
    """veto: the smallest p that any token of a trajectory may have."""
    opsm_limit: float = field(default=0.1, metadata=POSITIVE)
    """opsm: the largest mean of log(rollout / trainer) of a trajectory of negative advantage."""
    m2po_limit: float = field(default=0.04, metadata=POSITIVE)
    """m2po: the largest mean of (log p)^2 over the tokens of an update that are kept."""
    kpop_limit: float = field(default=0.05, metadata=POSITIVE)
    """kpop: the largest KL divergence, in nats, of the binary choice of a token or any other."""

    def rules(self) -> Iterator[Rule]:
        weights = [kind for kind in self.kinds if kind in WEIGHTS]
        yield Rule(len(set(self.kinds)) == len(self.kinds), "kinds", "each correction applies once")
        yield Rule(
            len(weights) <= 1,
            "kinds",
            f"{' and '.join(weights)} would multiply two weights for the same ratio; keep one",
        )
        yield Rule(
            not self.normalize or (bool(weights) and weights != ["icepop"]),
            "normalize",
            "there is no truncated weight to divide by its mean; add tis_token to "
            "algorithm.correction.kinds, or set false",
        )


@dataclass(kw_only=True, slots=True)
class KLConfig(Section):
    """Holds the policy near a reference; each rank keeps its share of the reference's weights."""

    SECTION: ClassVar[str] = "algorithm.kl"

    weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Factor of the divergence in the loss, or in the reward; 0: there is no reference."""
    estimator: str = field(default="k3", metadata=named(KL_ESTIMATORS))
    """The estimator of KL(trainer | reference) at each token: docs/algorithms.md#reference."""
    where: KLPlace = KLPlace.loss
    """Whether it is a term of the loss or is subtracted from the reward."""
    reference: str | None = field(default=None, metadata=NOT_EMPTY)
    """Folder or name of the reference model, of the same shape; None is the policy that RL begins
    with, after its warm start."""
    offload: bool = False
    """Keep its weights in pinned host memory between passes, which frees GPU memory."""

    def rules(self) -> Iterator[Rule]:
        for name in ("reference", "offload"):
            yield Rule(
                self.weight > 0 or not getattr(self, name),
                name,
                "with algorithm.kl.weight=0 there is no reference; raise it, or leave this out",
            )
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

    loss: str = field(default="supervised", metadata=named(STREAM_LOSSES))
    """The function: docs/algorithms.md#streams."""
    weight: float = field(default=1.0, metadata=POSITIVE)
    """Factor of this loss in the sum of all."""
    tokens: StreamTokens = StreamTokens.answers
    """The tokens that it trains."""
    aggregation: str = field(default="token_mean", metadata=named(AGGREGATIONS))
    """The weights of its tokens: docs/algorithms.md#aggregation."""
    min_reward: float | None = field(default=None, metadata=FINITE)
    """Train only episodes with at least this reward; None: all."""

    def rules(self) -> Iterator[Rule]:
        yield Rule(
            self.loss != "teacher_kl" or self.tokens is StreamTokens.answers,
            "tokens",
            "algorithm.streams.*.loss=teacher_kl compares two policies on tokens that one of them "
            "sampled; set answers",
        )


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Section):
    """The algorithm that trains on a batch. docs/algorithms.md explains the functions and their
    sources."""

    SECTION: ClassVar[str] = "algorithm"

    loss: str = field(default="ppo", metadata=named(LOSSES))
    """The policy's loss of a token: docs/algorithms.md#losses."""
    proximal: Proximal = Proximal.recomputed
    """The policy that a step's ratios compare the trained one with."""
    aggregation: str = field(default="token_mean", metadata=named(AGGREGATIONS))
    """How the losses of tokens become that of an update: docs/algorithms.md#aggregation."""
    aggregation_length: int | None = field(default=None, metadata=at_least(1))
    """sequence_mean_token_sum_norm: the constant; None is rollout.max_response_tokens."""
    clip_low: float = field(default=0.2, metadata=within(above=0, most=1))
    """ppo, gspo, cispo: the ratio is clipped to at least 1 - clip_low."""
    clip_high: float = field(default=0.28, metadata=POSITIVE)
    """ppo, gspo, cispo: the ratio is clipped to at most 1 + clip_high."""
    dual_clip: float | None = field(default=None, metadata=within(above=1))
    """ppo, gspo: a token of negative advantage A has a loss of at most this times |A|; None: no
    bound."""
    sapo_good: float = field(default=1.0, metadata=POSITIVE)
    """sapo: steepness of the gate for tokens of positive advantage."""
    sapo_bad: float = field(default=1.05, metadata=POSITIVE)
    """sapo: steepness of the gate for the other tokens."""
    weight_cap: float = field(default=2.0, metadata=within(above=0))
    """reinforce, teacher_kl: the largest importance weight, trainer / rollout."""
    dppo_low: float = field(default=0.2, metadata=POSITIVE)
    """dppo_tv, dppo_kl: a token of negative advantage that has diverged down by more keeps
    only the gradient of log_ratio_penalty."""
    dppo_high: float = field(default=0.2, metadata=POSITIVE)
    """dppo_tv, dppo_kl: a token of positive advantage that has diverged up by more keeps
    only the gradient of log_ratio_penalty."""
    log_ratio_penalty: float = field(default=1e-3, metadata=NOT_NEGATIVE)
    """dppo_tv, dppo_kl: factor of log(trainer / rollout)^2 in the loss."""
    entropy_weight: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Entropy bonus: this times the policy's entropy (nats) is subtracted from the loss of each
    token; corrections do not change it."""
    policy_weight: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """Factor of `loss` in the sum of all streams; 0: only `streams` are trained."""
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own functions, by any names."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Further losses by name, such as distillation from a teacher: docs/algorithms.md#streams."""

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is a user's, whose anchor is not known."""
        return self.loss not in LOSSES

    @property
    def is_anchored_at_rollout(self) -> bool:
        """Whether the loss itself weights tokens by trainer / rollout."""
        anchor = LOSSES.get(self.loss)
        uses_rollout = self.proximal is Proximal.rollout
        return anchor == "rollout" or (anchor == "proximal" and uses_rollout)

    @property
    def needs_proximal(self) -> bool:
        """Whether anything reads the proximal policy's log-probabilities."""
        is_own = self.has_own_loss or any(
            stream.loss not in STREAM_LOSSES for stream in self.streams.values()
        )
        return is_own or LOSSES[self.loss] == "proximal" or bool(self.correction.kinds)

    @property
    def needs_teacher(self) -> bool:
        """Whether a stream learns from a teacher's log-probabilities."""
        return any(stream.loss == "teacher_kl" for stream in self.streams.values())

    @property
    def may_read_teacher(self) -> bool:
        """Whether anything can read a teacher's log-probabilities: a user's function may."""
        chosen = [self.loss, self.advantage.kind, *self.correction.kinds]
        chosen += [stream.loss for stream in self.streams.values()]
        chosen += [self.kl.estimator] if self.kl.weight else []
        ours = {*LOSSES, *ADVANTAGES, *WEIGHTS, *MASKS, *KL_ESTIMATORS, *STREAM_LOSSES}
        return self.needs_teacher or not ours.issuperset(chosen)

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
        yield from self._penalty_rules()
        yield from self._correction_rules()
        yield Rule(
            self.needs_proximal or self.proximal is Proximal.recomputed,
            "proximal",
            f"algorithm.loss={self.loss} without a correction does not read it; set recomputed",
        )
        yield Rule(
            self.dual_clip is None or self.loss in ("ppo", "gspo") or self.has_own_loss,
            "dual_clip",
            f"algorithm.loss={self.loss} has no such bound; set null, or algorithm.loss=ppo",
        )
        for name in ("clip_low", "clip_high"):
            yield Rule(
                self.loss != "gspo" or getattr(self, name) <= 0.05,
                name,
                "algorithm.loss=gspo clips the geometric mean over a whole trajectory, which stays "
                "near 1; choose algorithm=gspo, which sets 3e-4 and 4e-4",
            )

    def _penalty_rules(self) -> Iterator[Rule]:
        """For what is taken off rewards, which reaches the loss by advantages alone."""
        kind = self.advantage.kind
        if self.loss == "supervised" or self.policy_weight == 0:
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
        yield Rule(
            self.advantage.overlong_start is None,
            "advantage.overlong_start",
            f"{why}; set null",
        )
        yield Rule(
            self.kl.weight == 0 or self.kl.where is KLPlace.loss,
            "kl.where",
            f"{why}; set loss",
        )

    def _correction_rules(self) -> Iterator[Rule]:
        kinds, shown = self.correction.kinds, "correction.kinds"
        weights = [kind for kind in kinds if kind in WEIGHTS]
        yield Rule(
            self.loss != "supervised" or not kinds,
            shown,
            "algorithm.loss=supervised imitates tokens, whichever policy sampled them; set []",
        )
        where = f"algorithm.loss={self.loss}"
        if self.proximal is Proximal.rollout:
            where += " with algorithm.proximal=rollout"
        yield Rule(
            not (self.is_anchored_at_rollout and weights),
            shown,
            f"{where} already weights tokens by trainer / rollout, and a second weight would count "
            "staleness twice; keep only masks, or set []",
        )
        blind = [kind for kind in kinds if kind in (*WEIGHTS, *MASKS) and kind != "opsm"]
        yield Rule(
            not (self.proximal is Proximal.rollout and blind),
            shown,
            "with algorithm.proximal=rollout the ratio to rollout is 1 for every token, so "
            f"{' and '.join(blind)} would change nothing; set algorithm.proximal=recomputed, or []",
        )

    def off_policy_rules(self, max_staleness: int, num_minibatches: int) -> Iterator[Rule]:
        """Rules for data of other versions, and for several updates with one batch."""
        is_anchored_at_proximal = LOSSES.get(self.loss) == "proximal"
        yield Rule(
            max_staleness == 0
            or not is_anchored_at_proximal
            or self.proximal is Proximal.rollout
            or not {*PARTIAL_MASKS}.issuperset(self.correction.kinds),
            "correction.kinds",
            f"with buffer.max_staleness={max_staleness} algorithm.loss={self.loss} would treat "
            "tokens of older versions as the trained one's: its denominator is algorithm.proximal="
            f"{self.proximal.name}; add a correction such as tis_token, set "
            "algorithm.proximal=rollout, or buffer.max_staleness=0",
        )
        yield Rule(
            self.proximal is not Proximal.log_linear or max_staleness > 1,
            "proximal",
            f"with buffer.max_staleness={max_staleness} the version before the trained one is that "
            "of each older token, so there is nothing to interpolate; set recomputed, or rollout "
            "without a weight",
        )
        yield Rule(
            self.dual_clip is None
            or num_minibatches > 1
            or self.proximal is not Proximal.recomputed
            or self.has_own_loss,
            "dual_clip",
            "with trainer.num_minibatches=1 the ratio to the policy at the start of the step is 1 "
            "and there is nothing to bound; set null, raise trainer.num_minibatches, or set "
            "algorithm.proximal=rollout",
        )
