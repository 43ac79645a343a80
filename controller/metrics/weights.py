"""What a run's records say of its weights on their way from the trainer to the engines (pure).

Three kinds of record, all times in seconds and `*_at` as Unix time:

    publish         one version: snapshot_s, encode_s, wire_s, verify_s, convergence_s, bytes, mode
    commit          one engine taking a version: gate_wait_s, load_s, pause_s
    weights_event   a member joined, was excluded, caught up, came back
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from controller.metrics.records import Record

SKIPPED = "skipped"
"""The mode of a version that a newer one overtook before it was sent."""
LATE = 2
"""Versions behind the trainer from which an engine is late: one is on its way after each step."""
_RECENT = 20
_LOSSES = {"engine_lost", "engine_restarted"}
"""Events after which an engine serves nothing until its next commit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPace:
    """How the way of the weights compares with the trainer's pace."""

    convergence_s: float | None = None
    """Median of the last publishes: from the snapshot until every engine serves the version."""
    seconds_per_step: float | None = None
    behind: Mapping[str, int] = field(default_factory=dict)
    """Engines that are late, and by how many versions."""

    @property
    def is_slower_than_steps(self) -> bool:
        if self.convergence_s is None or self.seconds_per_step is None:
            return False
        return self.convergence_s > self.seconds_per_step


def engines_behind(trainer_version: int, engine_versions: Mapping[str, int]) -> dict[str, int]:
    """Versions by which each engine is behind, of those that are late."""
    lags = {name: trainer_version - version for name, version in sorted(engine_versions.items())}
    return {name: lag for name, lag in lags.items() if lag >= LATE}


def behind_words(behind: Mapping[str, int]) -> str:
    """`engine-1 is 3 versions behind`; the one that is furthest behind, if there are several."""
    name, lag = max(behind.items(), key=lambda item: item[1])
    others = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
    return f"{name}{others} is {lag} versions behind"


@dataclass(slots=True)
class WeightsView:
    """The recent past, folded from records in their order."""

    convergence_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    pause_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    lost_engines: set[str] = field(default_factory=set)
    """That died or stalled, and have not committed since."""

    def apply(self, record: Record) -> None:
        """Takes in a record; those of other kinds change nothing."""
        if record.kind == "publish":
            self._add(self.convergence_s, record.number("convergence_s"))
        elif record.kind == "commit":
            self._add(self.pause_s, record.number("pause_s"))
            self.lost_engines.discard(str(record.values.get("engine")))
        elif record.kind == "weights_event" and record.values.get("event") in _LOSSES:
            self.lost_engines.add(str(record.values.get("who")))

    @staticmethod
    def _add(values: deque[float], value: float) -> None:
        if math.isfinite(value):
            values.append(value)

    def pace(
        self,
        seconds_per_step: float | None,
        trainer_version: int,
        engine_versions: Mapping[str, int],
    ) -> WeightsPace:
        return WeightsPace(
            convergence_s=median(self.convergence_s),
            seconds_per_step=seconds_per_step,
            behind=engines_behind(trainer_version, engine_versions),
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsResult:
    """A whole run's. Times in seconds, `p50` and `max`; None where nothing was measured."""

    versions_skipped: int
    """Overtaken by a newer one before they were sent."""
    snapshot_s: Mapping[str, float | None]
    """The trainer's standstill for a publish, of its slowest rank."""
    convergence_s: Mapping[str, float | None]
    """From the snapshot until every live engine serves the version or a later one."""
    engine_pause_s: Mapping[str, float | None]
    """One engine's standstill for one commit."""
    publish_bytes: int | None
    """Of one version, whole."""
    weights_wire_bytes: int
    """That left the trainer over the run, version 0 among them."""
    publishes_delta: int
    """Publishes that sent only what had changed."""
    delta_density: float | None
    """Mean share of the elements that these held."""
    weights_events: Mapping[str, int]
    """What happened to receivers and engines, by kind."""


def weights_result(records: Sequence[Record]) -> WeightsResult:
    """Folds the records of a run that is over."""
    publishes = [r for r in records if r.kind == "publish"]
    sent = [r for r in publishes if r.values.get("mode") != SKIPPED]
    deltas = [r for r in sent if r.values.get("mode") == "delta"]
    commits = [r for r in records if r.kind == "commit"]
    events = Counter(str(r.values.get("event")) for r in records if r.kind == "weights_event")
    densities = list(_numbers(deltas, "density"))
    return WeightsResult(
        versions_skipped=len(publishes) - len(sent),
        snapshot_s=_median_and_max(publishes, "snapshot_s"),
        convergence_s=_median_and_max(sent, "convergence_s"),
        engine_pause_s=_median_and_max(commits, "pause_s"),
        publish_bytes=int(max(_numbers(sent, "bytes"), default=0)) or None,
        weights_wire_bytes=int(sum(_numbers(sent, "wire_bytes"))),
        publishes_delta=len(deltas),
        delta_density=statistics.fmean(densities) if densities else None,
        weights_events=dict(sorted(events.items())),
    )


def median(values: Sequence[float] | deque[float]) -> float | None:
    return statistics.median(values) if values else None


def _median_and_max(records: Sequence[Record], name: str) -> dict[str, float | None]:
    values = list(_numbers(records, name))
    return {"p50": median(values), "max": max(values, default=None)}


def _numbers(records: Sequence[Record], name: str) -> Iterator[float]:
    return (x for r in records if math.isfinite(x := r.number(name)))
