"""The way of the weights under the names that Prometheus knows it by.

Gauges say what Redis holds now. Counters and histograms are folded from the run's metrics stream,
on from where the scrape before had read: what the stream's bound cut off before that is missing.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from buffer.run_state import STREAM_START, MetricsEntry, RunState
from controller.metrics.buffer_families import one
from controller.metrics.weights import SKIPPED

SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Fixed, since histograms of which the bounds change cannot be compared over time."""

PUBLISH_TIMES = (
    ("snapshot_s", "weights_snapshot_seconds", "Trainer's standstill for a publish."),
    ("encode_s", "weights_encode_seconds", "Finding what changed, of a delta."),
    ("wire_s", "weights_wire_seconds", "First byte sent to last bucket received."),
    ("verify_s", "weights_verify_seconds", "Checking the staged bytes, the slowest receiver."),
    ("convergence_s", "weights_convergence_seconds", "Snapshot until every live engine serves it."),
)
COMMIT_TIMES = (
    ("pause_s", "weights_commit_pause_seconds", "An engine's standstill for one commit."),
    ("load_s", "weights_commit_load_seconds", "Part of it in which the weights were loaded."),
    ("gate_wait_s", "weights_commit_gate_seconds", "Waiting for others to be done, before it."),
)


@dataclass(slots=True)
class Times:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in SECONDS_BOUNDS), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@dataclass(slots=True)
class WeightTotals:
    """What the records so far add up to."""

    publishes: Counter[str] = field(default_factory=Counter)
    """By mode."""
    events: Counter[str] = field(default_factory=Counter)
    num_bytes: float = 0.0
    wire_bytes: float = 0.0
    density: float | None = None
    """Of the last delta."""
    epoch: int | None = None
    publish_times: dict[str, Times] = field(default_factory=dict)
    commit_times: dict[tuple[str, str], Times] = field(default_factory=dict)
    """By field and engine."""

    def add(self, entry: MetricsEntry) -> None:
        """One record; those of other kinds change nothing."""
        if entry.kind == "publish":
            self._add_publish(entry.record)
        elif entry.kind == "commit":
            engine = str(entry.record.get("engine"))
            for name, _, _ in COMMIT_TIMES:
                if (seconds := _number(entry.record, name)) is not None:
                    self.commit_times.setdefault((name, engine), Times()).add(seconds)
        elif entry.kind == "weights_event":
            self.events[str(entry.record.get("event"))] += 1

    def _add_publish(self, record: Mapping[str, float | int | str]) -> None:
        mode = str(record.get("mode"))
        self.publishes[mode] += 1
        for name, _, _ in PUBLISH_TIMES:
            if (seconds := _number(record, name)) is not None:
                self.publish_times.setdefault(name, Times()).add(seconds)
        if mode == SKIPPED:
            return
        self.num_bytes += _number(record, "bytes") or 0.0
        self.wire_bytes += _number(record, "wire_bytes") or 0.0
        if mode == "delta":
            self.density = _number(record, "density")
        if (epoch := _number(record, "epoch")) is not None:
            self.epoch = int(epoch)


def _number(record: Mapping[str, float | int | str], name: str) -> float | None:
    value = record.get(name)
    return None if value is None or isinstance(value, str) or math.isnan(value) else float(value)


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPicture:
    """What Redis says of the weights at one scrape."""

    published: int | None
    staged: Mapping[str, int]
    served: Mapping[str, int]
    num_receivers: int
    totals: WeightTotals


class WeightsReader:
    """Reads a run's picture, and the records since the last one. Used in one event loop."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._totals = WeightTotals()
        self._last_id = STREAM_START
        self._lock = asyncio.Lock()
        """Guards the two above: two scrapes at once would count a record twice."""

    async def read(self) -> WeightsPicture:
        async with self._lock:
            while entries := await self._state.read_metrics(self._last_id, 0):
                for entry in entries:
                    self._totals.add(entry)
                self._last_id = entries[-1].id
            return WeightsPicture(
                published=await self._state.published_weights(),
                staged=await self._state.staged_versions(),
                served=await self._state.engine_versions(),
                num_receivers=len(await self._state.receivers()),
                totals=self._totals,
            )


def weight_families(run: str, picture: WeightsPicture) -> Iterator[Metric]:
    """Every metric, labelled with the run's name (pure)."""
    totals = picture.totals
    for name, what, value in (
        ("weights_published_version", "Newest version that engines may take.", picture.published),
        ("weights_receivers", "Receivers that are registered.", picture.num_receivers),
        ("weights_engines", "Engines that serve a version.", len(picture.served)),
        ("weights_delta_density", "Share of elements in the last delta.", totals.density),
        ("weights_epoch", "Membership epoch of the last publish.", totals.epoch),
    ):
        if value is not None:
            yield one(GaugeMetricFamily, name, what, run, value)
    yield one(
        CounterMetricFamily, "weights_bytes", "Bytes of published versions.", run, totals.num_bytes
    )
    yield one(
        CounterMetricFamily, "weights_wire_bytes", "Bytes that were sent.", run, totals.wire_bytes
    )
    yield from _labelled(run, picture)
    yield from _histograms(run, totals)


def _labelled(run: str, picture: WeightsPicture) -> Iterator[Metric]:
    gauges = (
        ("weights_staged_version", "Newest at a receiver.", "receiver", picture.staged),
        ("weights_served_version", "What an engine serves.", "engine", picture.served),
    )
    counters = (
        ("weights_publishes", "Versions by how they went.", "mode", picture.totals.publishes),
        ("weights_events", "What happened to members.", "event", picture.totals.events),
    )
    for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, what, label, values in rows:
            family = kind(name, what, labels=("run", label))
            for key, value in values.items():
                family.add_metric((run, key), value)
            yield family


def _histograms(run: str, totals: WeightTotals) -> Iterator[Metric]:
    for name, metric, what in PUBLISH_TIMES:
        if (times := totals.publish_times.get(name)) is not None:
            family = HistogramMetricFamily(metric, what, labels=("run",))
            family.add_metric((run,), times.buckets, times.total)
            yield family
    for name, metric, what in COMMIT_TIMES:
        family = HistogramMetricFamily(metric, what, labels=("run", "engine"))
        for (of, engine), times in totals.commit_times.items():
            if of == name:
                family.add_metric((run, engine), times.buckets, times.total)
        yield family
