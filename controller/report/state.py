"""What the panel knows of a run, folded from its metrics records and samples of its buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer.results import BufferStats
from controller.metrics.records import EVAL_FAILED, Record, Scalar
from controller.metrics.weights import WeightsPace, WeightsView
from controller.watch.bottleneck import Waits, WaitShares, WaitWindow
from controller.watch.learning import Alarm, learning_alarms

RATE_HORIZON_S = 30.0
_DROPPED = "dropped."


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalPoint:
    """Greedy accuracy on held-out prompts."""

    version: int
    """The oldest version that answered one of them."""
    accuracy: float


@dataclass(kw_only=True, slots=True)
class RunView:
    """One run as a person watches it. Times are Unix seconds.

    The controller hands every metrics record to `apply` and every sample of Redis to `observe`.
    """

    run: str
    num_steps: int
    started: float
    num_workers: int = 1
    phase: str = "starting"
    now: float = 0.0
    step: int = 0
    """Steps that are done."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step so far."""
    evals: list[EvalPoint] = field(default_factory=list)
    eval_failure: Record | None = None
    """Of the last evaluation, if it failed."""
    steps: list[Record] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    """Of the last step."""
    stats: BufferStats | None = None
    tokens_generated: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    """What the rollout workers counted."""
    waits: WaitWindow = field(default_factory=WaitWindow)
    weights: WeightsView = field(default_factory=WeightsView)
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def apply(self, record: Record) -> None:
        """Take in one metrics record."""
        self.now = max(self.now, record.t)
        if record.kind == "phase":
            self.phase = str(record.values.get("phase", self.phase))
        elif record.kind == "step":
            self.step = int(record.number("step"))
            self.rewards.append(record.number("reward_mean"))
            self.steps.append(record)
            self.alarms = learning_alarms(self.steps)
            self._step_times.append(record.t)
        elif record.kind == "eval":
            version, accuracy = record.number("version_min"), record.number("accuracy")
            self.evals.append(EvalPoint(version=int(version), accuracy=accuracy))
            self.eval_failure = None
        elif record.kind == EVAL_FAILED:
            self.eval_failure = record
        elif record.kind == "buffer":
            self.counters = counters_of(record)
            self._sample(record.t, waits_of(record), int(record.number("tokens_generated")))
        else:
            self.weights.apply(record)

    def observe(
        self, now: float, stats: BufferStats, waits: Waits, counters: Mapping[str, float]
    ) -> None:
        """Take in one sample of what Redis holds; `waits` and `counters` are totals.

        Stands in place of `apply` for the `buffer` record made of the same sample.
        """
        self.now = max(self.now, now)
        self.stats = stats
        self.counters = counters
        self._sample(now, waits, int(counters.get("tokens_generated", 0)))

    def _sample(self, t: float, waits: Waits, tokens_generated: int) -> None:
        self.tokens_generated = tokens_generated
        self.waits.add(t, waits)
        self._tokens.append((t, tokens_generated))
        while len(self._tokens) > 2 and self._tokens[1][0] <= t - RATE_HORIZON_S:
            self._tokens.popleft()

    @property
    def last_step(self) -> Record | None:
        return self.steps[-1] if self.steps else None

    @property
    def elapsed_s(self) -> float:
        return max(0.0, self.now - self.started)

    @property
    def seconds_per_step(self) -> float | None:
        """Over the last twenty steps; None before the second."""
        times = self._step_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def eta_s(self) -> float | None:
        """Time left for the remaining steps at the present pace."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, self.num_steps - self.step)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated, over the last half minute."""
        if len(self._tokens) < 2:
            return None
        (t0, tokens0), (t1, tokens1) = self._tokens[0], self._tokens[-1]
        return (tokens1 - tokens0) / (t1 - t0) if t1 > t0 else None

    @property
    def shares(self) -> WaitShares:
        return self.waits.shares(self.num_workers)

    @property
    def weights_pace(self) -> WeightsPace:
        if self.stats is None:
            return WeightsPace()
        return self.weights.pace(
            self.seconds_per_step, self.stats.trainer_version, self.stats.engine_versions
        )


def buffer_values(
    stats: BufferStats, waits: Waits, counters: Mapping[str, float]
) -> Mapping[str, Scalar]:
    """A `buffer` record: what `metrics.jsonl` keeps of one sample."""
    oldest = min(stats.engine_versions.values(), default=stats.trainer_version)
    return {
        "pushed": stats.pushed,
        "trained": stats.trained,
        "dropped": stats.num_dropped,
        "running": stats.running,
        "ready": stats.ready,
        "leased": stats.leased,
        "quarantined": stats.quarantined,
        "requeued": stats.requeued,
        "bytes": stats.bytes,
        "push_blocked": stats.push_blocked,
        "push_blocked_s": stats.push_blocked_s,
        "trainer_version": stats.trainer_version,
        "engine_lag": stats.trainer_version - oldest,
        "max_staleness": stats.max_staleness,
        "max_staleness_largest": stats.max_staleness_largest,
        "limit": stats.limit(),
        "prompts_quarantined": stats.prompts_quarantined,
        "rerun": stats.rerun,
        "tokens_trained": stats.tokens_trained,
        "tokens_dropped": stats.tokens_dropped,
        **{f"{_DROPPED}{reason}": number for reason, number in stats.dropped.items()},
        **_if_known("max_staleness_trained", stats.max_staleness_trained),
        "tokens_generated": int(counters.get("tokens_generated", 0)),
        **{f"count.{name}": value for name, value in counters.items()},
        **{f"wait_s.{who}.{on}": seconds for (who, on), seconds in waits.items()},
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class BufferTotals:
    """The part of BufferStats that `buffer_values` keeps and a summary tells."""

    pushed: int
    trained: int
    dropped: Mapping[str, int]
    quarantined: int
    ready: int
    leased: int
    trainer_version: int
    max_staleness: int
    max_staleness_largest: int
    max_staleness_trained: int | None
    prompts_quarantined: int
    tokens_trained: int
    tokens_dropped: int

    @property
    def is_conserved(self) -> bool:
        placed = self.trained + sum(self.dropped.values()) + self.quarantined
        return self.pushed == placed + self.ready + self.leased


def totals_of(record: Record | None, max_staleness: int) -> BufferTotals:
    """What a `buffer` record kept; None is of a run that has none yet."""
    values = record.values if record is not None else {}

    def number(name: str) -> int:
        return int(values.get(name, 0))

    dropped = {
        name.removeprefix(_DROPPED): number(name) for name in values if name.startswith(_DROPPED)
    }
    if not dropped and number("dropped"):
        dropped = {"reason not recorded": number("dropped")}
    return BufferTotals(
        pushed=number("pushed"),
        trained=number("trained"),
        dropped=dropped,
        quarantined=number("quarantined"),
        ready=number("ready"),
        leased=number("leased"),
        trainer_version=number("trainer_version"),
        max_staleness=number("max_staleness") if record is not None else max_staleness,
        max_staleness_largest=number("max_staleness_largest"),
        max_staleness_trained=(
            number("max_staleness_trained") if "max_staleness_trained" in values else None
        ),
        prompts_quarantined=number("prompts_quarantined"),
        tokens_trained=number("tokens_trained"),
        tokens_dropped=number("tokens_dropped"),
    )


def _if_known(name: str, value: int | None) -> dict[str, Scalar]:
    return {} if value is None else {name: value}


def waits_of(record: Record) -> dict[tuple[str, str], float]:
    """The totals that `buffer_values` kept."""
    waits = {}
    for name in record.values:
        kind, _, pair = name.partition(".")
        if kind == "wait_s":
            who, _, on = pair.partition(".")
            waits[who, on] = record.number(name)
    return waits


def counters_of(record: Record) -> dict[str, float]:
    """The counters that `buffer_values` kept."""
    prefix = "count."
    return {
        name.removeprefix(prefix): record.number(name)
        for name in record.values
        if name.startswith(prefix)
    }
