"""The transfer of weights from the trainer to the engines, as recorded (pure).

Three kinds of record; times are in seconds, `*_at` is Unix time:

    publish         one version: snapshot_s, encode_s, wire_s, verify_s, convergence_s, bytes, mode
    commit          one engine taking a version: merge_s, gate_wait_s, load_s, pause_s
    weights_event   a member joined, was excluded, caught up, came back
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.metrics.history import Record, of_kind, series

SKIPPED = "skipped"
"""The mode of a version that was replaced by a newer one before it was sent."""
LATE = 2
"""Versions behind the trainer from which an engine is late, if it gets each: 1 is normal."""
_RECENT, _FEW = 20, 3
_LOSSES = {"engine_lost", "engine_restarted"}
"""Events after which an engine serves nothing until its next commit."""
EXCLUDED = "excluded"
"""Event of a receiver that does not respond: it gets no versions until its next event."""
MUCH_LATER_S = 2.0
"""An engine is named that gets a version so much later than the first one does."""
ENGINE_JOINED, ENGINE_LEFT = "engine_joined", "engine_left"
"""Events of an engine that was added to the run, and of one that is gone for good."""
RECEIVER_LEFT = "receiver_left"
"""Event of a receiver that is gone for good."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPace:
    """How long weights take to reach the engines, compared with how often they are sent."""

    convergence_s: float | None = None
    """Median of recent publishes: from the snapshot until every engine serves the version."""
    seconds_per_publish: float | None = None
    """From one version that the engines get to the next."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """Late engines and how many versions they are behind."""

    @property
    def is_too_slow(self) -> bool:
        if self.convergence_s is None or self.seconds_per_publish is None:
            return False
        return self.convergence_s > self.seconds_per_publish


def engines_behind(
    trainer_version: int, engine_versions: Mapping[str, int], publish_every: int = 1
) -> dict[str, int]:
    """The late engines and how many versions they are behind."""
    lags = {name: trainer_version - version for name, version in sorted(engine_versions.items())}
    return {name: lag for name, lag in lags.items() if lag >= LATE + publish_every - 1}


def behind_words(behind: Mapping[str, int]) -> str:
    """`engine-1 is 3 versions behind`; names the one that is furthest behind."""
    name, lag = max(behind.items(), key=lambda item: item[1])
    others = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
    return f"{name}{others} is {lag} versions behind"


@dataclass(slots=True)
class WeightsView:
    """Recent transfers, accumulated from records in order."""

    publish_every: int = 1
    """trainer.publish_every."""
    convergence_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    pause_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    lost_engines: set[str] = field(default_factory=set)
    """Engines that died or stalled and have not committed since."""
    silent_receivers: dict[str, str] = field(default_factory=dict)
    """Receivers that do not respond, and the error."""
    _seen: dict[int, float] = field(default_factory=dict)
    """When the first engine had each of the last versions."""
    _late_s: dict[str, deque[float]] = field(default_factory=dict)
    """How much later each engine had its last versions."""

    def apply(self, record: Record) -> None:
        """Add a record; other kinds are ignored."""
        if record.kind == "publish":
            self.convergence_s.extend(series([record], "convergence_s"))
        elif record.kind == "commit":
            self.pause_s.extend(series([record], "pause_s"))
            engine = str(record.values.get("engine"))
            self.lost_engines.discard(engine)
            self._note_seen(engine, record.count("version"), record.number("seen_at"))
        elif record.kind == "weights_event":
            event, who = record.values.get("event"), str(record.values.get("who"))
            if event in _LOSSES:
                self.lost_engines.add(who)
            elif event == ENGINE_LEFT:
                self.lost_engines.discard(who)
                self._late_s.pop(who, None)
            for name in who.split(", "):
                self.silent_receivers.pop(name, None)
            if event == EXCLUDED:
                self.silent_receivers[who] = str(record.values.get("detail"))

    def _note_seen(self, engine: str, version: int, seen_at: float) -> None:
        first = self._seen.setdefault(version, seen_at)
        self._late_s.setdefault(engine, deque(maxlen=_FEW)).append(max(0.0, seen_at - first))
        while len(self._seen) > _RECENT:
            del self._seen[min(self._seen)]

    @property
    def late_receiver(self) -> tuple[str, float] | None:
        """The engine that lately had each version much later than the first one, and how much."""
        late = {name: min(of) for name, of in self._late_s.items() if len(of) == _FEW}
        name = max(late, key=late.__getitem__, default="")
        return (name, late[name]) if name and late[name] >= MUCH_LATER_S else None

    def pace(
        self,
        seconds_per_publish: float | None,
        trainer_version: int,
        engine_versions: Mapping[str, int],
    ) -> WeightsPace:
        return WeightsPace(
            convergence_s=median(self.convergence_s),
            seconds_per_publish=seconds_per_publish,
            behind=engines_behind(trainer_version, engine_versions, self.publish_every),
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsResult:
    """Totals of a run. Times in seconds, `p50` and `max`; None if nothing was measured."""

    versions_skipped: int
    """Replaced by a newer version before they were sent."""
    snapshot_s: Mapping[str, float | None]
    """The trainer's pause for a publish, on its slowest rank."""
    convergence_s: Mapping[str, float | None]
    """From the snapshot until every live engine serves the version or a later one."""
    engine_pause_s: Mapping[str, float | None]
    """One engine's pause for one commit."""
    publish_bytes: int | None
    """Size of a full version."""
    weights_wire_bytes: int
    """Sent by the trainer during the run, including version 0."""
    publishes_delta: int
    """Publishes that sent only the changes."""
    delta_density: float | None
    """Mean fraction of the elements in a delta."""
    weights_events: Mapping[str, int]
    """Events of receivers and engines, by kind."""


def weights_result(records: Sequence[Record]) -> WeightsResult:
    publishes = of_kind(records, "publish")
    sent = [r for r in publishes if r.values.get("mode") != SKIPPED]
    deltas = [r for r in sent if r.values.get("mode") == "delta"]
    events = Counter(str(r.values.get("event")) for r in of_kind(records, "weights_event"))
    densities = series(deltas, "density")
    return WeightsResult(
        versions_skipped=len(publishes) - len(sent),
        snapshot_s=_median_and_max(publishes, "snapshot_s"),
        convergence_s=_median_and_max(sent, "convergence_s"),
        engine_pause_s=_median_and_max(of_kind(records, "commit"), "pause_s"),
        publish_bytes=int(max(series(sent, "bytes"), default=0)) or None,
        weights_wire_bytes=int(sum(series(sent, "wire_bytes"))),
        publishes_delta=len(deltas),
        delta_density=statistics.fmean(densities) if densities else None,
        weights_events=dict(sorted(events.items())),
    )


def median(values: Sequence[float] | deque[float]) -> float | None:
    return statistics.median(values) if values else None


def _median_and_max(records: Sequence[Record], name: str) -> dict[str, float | None]:
    values = series(records, name)
    return {"p50": median(values), "max": max(values, default=None)}
