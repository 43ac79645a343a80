"""The run's metrics for Prometheus, one line per metric.

On the wire the name of a counter ends in `_total`. `WeightTotals` adds up the run's metrics stream
from where the previous scrape stopped; entries trimmed from the stream before that are missing.
All other values are read from Redis at each scrape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from buffer.results import BufferStats
from buffer.run_state import MetricsEntry
from controller.metrics.counters import COUNTED, COUNTED_BY, TIMES, Counters, times
from controller.metrics.records import Record, finite_only
from controller.metrics.weights import SKIPPED

# Otherwise each counter comes with a second one that says since when it counts.
disable_created_metrics()  # type: ignore[no-untyped-call]

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Fixed, because histograms with changing bounds cannot be compared over time."""


def family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    run: str,
    name: str,
    what: str,
    value: float | None = None,
    **by_label: Mapping[str, float] | Mapping[int, float],
) -> Metric:
    """A metric with its value (None: no sample), or with one value for each value of a label."""
    metric = kind(name, what, labels=("run", *by_label))
    if value is not None:
        metric.add_metric((run,), value)
    for values in by_label.values():
        for key, number in values.items():
            metric.add_metric((run, str(key)), number)
    return metric


def histogram(
    run: str, name: str, what: str, cumulative: Mapping[float, float], total: float
) -> Metric:
    """`cumulative`: number of observations up to each bound; the last bound is infinite."""
    metric = HistogramMetricFamily(name, what, labels=("run",))
    buckets = [
        ("+Inf" if bound == math.inf else str(float(bound)), float(number))
        for bound, number in cumulative.items()
    ]
    metric.add_metric((run,), buckets, total)
    return metric


def buffer_families(run: str, s: BufferStats) -> Iterator[Metric]:
    """Metrics of the buffer (pure)."""
    gauge, counter = (
        partial(family, GaugeMetricFamily, run),
        partial(family, CounterMetricFamily, run),
    )
    yield gauge("replay_depth_groups", "Groups waiting to be trained.", s.ready)
    yield gauge(
        "replay_ready_groups",
        "Groups waiting to be trained, by versions behind the trainer.",
        staleness=s.by_staleness,
    )
    yield gauge("replay_running_groups", "Groups being generated.", s.running)
    yield gauge("replay_leased_groups", "Groups in a batch of the trainer.", s.leased)
    yield gauge("replay_consumed_groups", "Trained, not yet in a durable checkpoint.", s.consumed)
    yield gauge("replay_quarantined_groups", "Groups in quarantine.", s.quarantined)
    yield gauge("replay_quarantined_prompts", "Prompts in quarantine.", s.prompts_quarantined)
    yield gauge("replay_bytes", "Size of the stored payloads.", s.bytes)
    yield gauge("replay_capacity_groups", "buffer.capacity_groups, if set.", s.capacity_groups)
    yield gauge("replay_capacity_bytes", "buffer.capacity_bytes, if set.", s.capacity_bytes)
    yield gauge(
        "replay_oldest_age_seconds",
        "Time since the stalest ready group was pushed, if there is one.",
        s.oldest_ready_age_s,
    )
    yield gauge("replay_retries_waiting", "Prompts queued to run again.", s.retries_waiting)
    yield gauge("replay_trainer_version", "The trainer's policy version.", s.trainer_version)
    yield gauge("replay_max_staleness", "Current buffer.max_staleness.", s.max_staleness)
    yield gauge(
        "replay_engine_version", "Policy version that an engine serves.", engine=s.engine_versions
    )
    yield counter("replay_pushed", "Groups pushed.", s.pushed)
    yield counter("replay_acked", "Groups in a durable checkpoint.", s.acked)
    yield counter("replay_dropped", "Groups dropped.", reason=s.dropped)
    yield counter("replay_dropped_tokens", "Tokens of dropped groups.", reason=s.dropped_tokens)
    yield counter(
        "replay_abandoned", "Groups given up before they were pushed.", reason=s.abandoned_by_reason
    )
    yield counter("replay_requeued", "Prompts queued to run again.", s.requeued)
    yield counter(
        "replay_rerun",
        "Prompts queued to run again because their group failed or their worker died.",
        s.rerun,
    )
    yield counter("replay_expired", "Groups whose lease was not renewed in time.", s.expired)
    yield counter("replay_push_blocked", "Pushes that had to wait for room.", s.push_blocked)
    yield counter("replay_push_blocked_seconds", "Time that pushes waited.", s.push_blocked_s)
    yield counter("replay_tokens_pushed", "Tokens of pushed groups.", s.tokens_pushed)
    yield counter("replay_tokens_trained", "Trainable tokens of trained groups.", s.tokens_trained)
    yield counter(
        "replay_tokens_masked", "Tokens left out of the loss as too old.", s.tokens_masked
    )
    yield counter("replay_tokens_dropped", "Trainable tokens of dropped groups.", s.tokens_dropped)
    yield from _buffer_histograms(run, s)


def _buffer_histograms(run: str, s: BufferStats) -> Iterator[Metric]:
    trained = s.trained_by_staleness
    by_staleness = {
        bound: sum(number for staleness, number in trained.items() if staleness <= bound)
        for bound in (*STALENESS_BOUNDS, math.inf)
    }
    total = sum(staleness * number for staleness, number in trained.items())
    for name, what, cumulative, total_of_all in (
        (
            "replay_staleness_versions",
            "Staleness of groups when they were trained.",
            by_staleness,
            total,
        ),
        (
            "replay_age_seconds",
            "Time from a group's push until it was trained.",
            s.trained_by_age,
            s.trained_age_sum_s,
        ),
    ):
        yield histogram(run, name, what, cumulative, total_of_all)


def counter_families(run: str, counters: Counters) -> Iterator[Metric]:
    """The workers' counters; 0 for those that are not set (pure)."""
    counter = partial(family, CounterMetricFamily, run)
    for name, counted in COUNTED.items():
        yield counter(f"rollout_{name}", counted.what, counters.get(name, 0.0))
    for prefix, (metric, what, label) in COUNTED_BY.items():
        start = f"{prefix}:"
        values = {n.removeprefix(start): v for n, v in counters.items() if n.startswith(start)}
        yield counter(metric, what, None, **{label: values})
    for kind, (name, what) in TIMES.items():
        found = times(counters, kind)
        yield histogram(run, name, f"{what[0].upper()}{what[1:]}.", found.within, found.sum_s)


WEIGHT_TIMES = (
    ("publish", "snapshot_s", "weights_snapshot_seconds", "Trainer's pause for a publish."),
    ("publish", "encode_s", "weights_encode_seconds", "Finding the changes for a delta."),
    ("publish", "wire_s", "weights_wire_seconds", "First byte sent to last bucket received."),
    ("publish", "verify_s", "weights_verify_seconds", "Verifying bytes, slowest receiver."),
    ("publish", "convergence_s", "weights_convergence_seconds", "Until all live engines serve it."),
    ("commit", "pause_s", "weights_commit_pause_seconds", "An engine's pause for one commit."),
    ("commit", "load_s", "weights_commit_load_seconds", "Part of it that loaded the weights."),
    ("commit", "gate_wait_s", "weights_commit_gate_seconds", "Waiting for other engines before."),
    ("commit", "drain_s", "weights_commit_drain_seconds", "Waiting for its requests to end."),
)
"""Histograms: kind of the record, its value, metric and help. Those of commits are by engine."""


class WeightTotals:
    """Totals of the weight records, in their own registry."""

    def __init__(self, run: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._run = run

        def counter(name: str, what: str, *label: str) -> Counter:
            return Counter(name, what, ("run", *label), registry=registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(name, what, ("run",), registry=registry)

        self._publishes = counter("weights_publishes", "Versions by how they were sent.", "mode")
        self._events = counter("weights_events", "Events of receivers and engines.", "event")
        self._bytes = counter("weights_bytes", "Bytes of published versions.").labels(run)
        self._wire_bytes = counter("weights_wire_bytes", "Bytes that were sent.").labels(run)
        self._density = gauge("weights_delta_density", "Share of elements in the last delta.")
        self._epoch = gauge("weights_epoch", "Membership epoch of the last publish.")
        self._times: dict[str, dict[str, Histogram]] = {"publish": {}, "commit": {}}
        for kind, name, metric, what in WEIGHT_TIMES:
            labels = ("run", "engine") if kind == "commit" else ("run",)
            self._times[kind][name] = Histogram(
                metric, what, labels, buckets=SECONDS_BOUNDS, registry=registry
            )

    def add(self, entry: MetricsEntry) -> None:
        """Add one record; other kinds are ignored."""
        record = Record(t=0.0, kind=entry.kind, values=finite_only(entry.record))
        engine = [str(record.values.get("engine"))] if record.kind == "commit" else []
        for name, histogram in self._times.get(record.kind, {}).items():
            if math.isfinite(seconds := record.number(name)):
                histogram.labels(self._run, *engine).observe(seconds)
        if record.kind == "publish":
            self._add_publish(record)
        elif record.kind == "weights_event":
            self._events.labels(self._run, str(record.values.get("event"))).inc()

    def _add_publish(self, publish: Record) -> None:
        mode = str(publish.values.get("mode"))
        self._publishes.labels(self._run, mode).inc()
        if mode == SKIPPED:
            return
        for name, total in (("bytes", self._bytes), ("wire_bytes", self._wire_bytes)):
            if (number := publish.number(name)) > 0:  # false for NaN, too
                total.inc(number)
        for name, gauge in (("epoch", self._epoch), ("density", self._density)):
            is_known = math.isfinite(number := publish.number(name))
            if is_known and (name != "density" or mode == "delta"):
                gauge.labels(self._run).set(number)


def weight_families(
    run: str,
    *,
    published: int | None,
    staged: Mapping[str, int],
    served: Mapping[str, int],
    num_receivers: int,
) -> Iterator[Metric]:
    """Metrics of the weights in Redis (pure)."""
    gauge = partial(family, GaugeMetricFamily, run)
    yield gauge("weights_published_version", "Newest version that engines may take.", published)
    yield gauge("weights_receivers", "Registered receivers.", num_receivers)
    yield gauge("weights_engines", "Engines that serve a version.", len(served))
    yield gauge("weights_staged_version", "Newest at a receiver.", receiver=staged)
    yield gauge("weights_served_version", "Served by an engine.", engine=served)
