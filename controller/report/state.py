"""The state of a run for the panel, from its metrics records and samples of its buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from buffer.results import BufferStats
from controller.metrics.records import EVAL_FAILED, Record, Scalar
from controller.metrics.weights import WeightsPace, WeightsView
from controller.watch.bottleneck import Waits, WaitShares, WaitWindow
from controller.watch.learning import Alarm, learning_alarms

RATE_HORIZON_S = 30.0


@dataclass(kw_only=True, slots=True)
class RunView:
    """The state of one run. Times are Unix seconds.

    The controller passes every metrics record to `apply` and every sample of Redis to `observe`.
    """

    run: str
    num_steps: int
    started: float
    num_workers: int = 1
    phase: str = "starting"
    now: float = 0.0
    step: int = 0
    """Completed steps."""
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    eval_failure: Record | None = None
    """Record of the last evaluation, if it failed."""
    alarms: list[Alarm] = field(default_factory=list)
    """Alarms after the last step."""
    stats: BufferStats | None = None
    tokens_generated: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counters of the rollout workers."""
    waits: WaitWindow = field(default_factory=WaitWindow)
    weights: WeightsView = field(default_factory=WeightsView)
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)

    def apply(self, record: Record) -> None:
        """Add one metrics record."""
        self.now = max(self.now, record.t)
        if record.kind == "phase":
            self.phase = str(record.values.get("phase", self.phase))
        elif record.kind == "step":
            self.step = record.count("step")
            self.steps.append(record)
            self.alarms = learning_alarms(self.steps)
        elif record.kind == "eval":
            self.evals.append(record)
            self.eval_failure = None
        elif record.kind == EVAL_FAILED:
            self.eval_failure = record
        elif record.kind == "buffer":
            self.counters = counters_of(record)
            self._sample(record.t, waits_of(record), record.count("tokens_generated"))
        else:
            self.weights.apply(record)

    def observe(
        self, now: float, stats: BufferStats, waits: Waits, counters: Mapping[str, float]
    ) -> None:
        """Add one sample of Redis; `waits` and `counters` are totals.

        Replaces `apply` for the `buffer` record of the same sample.
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
        """Mean over the last twenty steps; None before the second."""
        recent = self.steps[-20:]
        return (recent[-1].t - recent[0].t) / (len(recent) - 1) if len(recent) > 1 else None

    @property
    def eta_s(self) -> float | None:
        """Time for the remaining steps at the current pace."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, self.num_steps - self.step)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens, over the last half minute."""
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
    trained = stats.max_staleness_trained
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
        **{f"dropped.{reason}": number for reason, number in stats.dropped.items()},
        **({} if trained is None else {"max_staleness_trained": trained}),
        "tokens_generated": int(counters.get("tokens_generated", 0)),
        **{f"count.{name}": value for name, value in counters.items()},
        **{f"wait_s.{who}.{on}": seconds for (who, on), seconds in waits.items()},
    }


def waits_of(record: Record) -> dict[tuple[str, str], float]:
    """The waits in a record of `buffer_values`."""
    waits = {}
    for name, pair in _below(record, "wait_s."):
        who, _, on = pair.partition(".")
        waits[who, on] = record.number(name)
    return waits


def counters_of(record: Record) -> dict[str, float]:
    """The counters in a record of `buffer_values`."""
    return {name: record.number(full) for full, name in _below(record, "count.")}


def dropped_of(record: Record) -> dict[str, int]:
    """Dropped groups by reason, in a record of `buffer_values`."""
    dropped = {reason: record.count(full) for full, reason in _below(record, "dropped.")}
    if not dropped and record.count("dropped"):
        return {"reason not recorded": record.count("dropped")}
    return dropped


def _below(record: Record, prefix: str) -> Iterator[tuple[str, str]]:
    """The names that begin with `prefix`, with and without it."""
    return ((name, name.removeprefix(prefix)) for name in record.values if name.startswith(prefix))
