"""The values of the catalogue's metrics, as Prometheus reads them.

`RecordTotals` adds up the run's metrics stream from where the previous scrape stopped; entries
trimmed from the stream before that are missing. All other values are read from Redis at each
scrape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from buffer.results import BufferStats
from buffer.run_state import MetricsEntry
from controller.metrics.catalogue import METRICS, RECORDED, Kind, Metric
from controller.metrics.counters import Counters, Distribution, times
from controller.metrics.history import LENGTHS, Record, finite_only

# Otherwise each counter comes with a second one that says since when it counts.
disable_created_metrics()  # type: ignore[no-untyped-call]

ENGINE = "engine"
"""The kind of the records that workers write of an engine every few seconds."""
KEPT_MS = 60_000
"""A record that is older than the newest one by more belongs to an engine or a worker that is gone.
"""
PER_WORKER = ("limit", "in_flight", "scoring")
"""Each worker has its own; the other values are the engine's, as the worker saw them last."""

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Fixed, because histograms with changing bounds cannot be compared over time."""


Value = float | Mapping[str, float] | Mapping[int, float] | Distribution | None
"""A number, numbers by label, or a histogram; None: not measured."""


def family(run: str, metric: Metric, value: Value) -> Family:
    """A metric with its samples; without any if `value` is None."""
    labels = ("run", *([metric.label] if metric.label else []))
    if isinstance(value, Distribution):
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        buckets = [
            ("+Inf" if bound == math.inf else str(float(bound)), float(number))
            for bound, number in value.cumulative.items()
        ]
        histogram.add_metric((run,), buckets, value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.counter else GaugeMetricFamily
    found = kind(metric.name, metric.help, labels=labels)
    if isinstance(value, Mapping):
        for label, number in value.items():
            found.add_metric((run, str(label)), number)
    elif value is not None:
        found.add_metric((run,), value)
    return found


def families(run: str, source: str, value_of: Callable[[Metric], Value]) -> Iterator[Family]:
    """All metrics of the catalogue that are read from `source`."""
    for metric in METRICS[source]:
        yield family(run, metric, value_of(metric))


def buffer_families(run: str, stats: BufferStats) -> Iterator[Family]:
    trained = stats.trained_by_staleness
    distributions = {
        "trained_by_staleness": Distribution(
            {
                bound: sum(number for staleness, number in trained.items() if staleness <= bound)
                for bound in (*STALENESS_BOUNDS, math.inf)
            },
            sum(staleness * number for staleness, number in trained.items()),
        ),
        "trained_by_age": Distribution(stats.trained_by_age, stats.trained_age_sum_s),
    }

    def value_of(metric: Metric) -> Value:
        value: Value = distributions.get(metric.field) or getattr(stats, metric.field)
        return value

    return families(run, "buffer", value_of)


def counter_families(run: str, counters: Counters) -> Iterator[Family]:
    """Counters of the workers; 0 for those without a label that are not set (pure)."""

    def value_of(metric: Metric) -> Value:
        if metric.kind is Kind.histogram:
            return times(counters, metric.field)
        return metric.by_label(counters) if metric.label else counters.get(metric.field, 0.0)

    return families(run, "count", value_of)


class RecordTotals:
    """Totals and last values of the records in the run's metrics stream, in their own registry.

    totals = RecordTotals("night")
    totals.add(MetricsEntry("5-0", "step", {"step": 3, "loss": 0.5}))
    totals.registry.collect()                              # train_loss{run="night"} 0.5
    """

    def __init__(self, run: str) -> None:
        self.registry = CollectorRegistry()
        self._run = run
        self._instruments = {
            kind: [(metric, self._instrument(metric)) for metric in METRICS[kind]]
            for kind in RECORDED
        }

    def _instrument(self, metric: Metric) -> Counter | Gauge | Histogram:
        labels = ("run", *([metric.label] if metric.label else []))
        if metric.kind is Kind.histogram:
            return Histogram(
                metric.name, metric.help, labels, buckets=SECONDS_BOUNDS, registry=self.registry
            )
        kind = Counter if metric.kind is Kind.counter else Gauge
        instrument = kind(metric.name, metric.help, labels, registry=self.registry)
        if isinstance(instrument, Counter) and not metric.label:
            instrument.labels(self._run)  # 0 from the start
        return instrument

    def add(self, entry: MetricsEntry) -> None:
        """Add one record; other kinds are ignored."""
        record = Record(t=0.0, kind=entry.kind, values=finite_only(entry.record))
        for metric, instrument in self._instruments.get(record.kind, ()):
            if record.kind == LENGTHS and metric.label:
                instrument.clear()  # each record has its own lengths
            if metric.when is None or record.values.get(metric.when[0]) == metric.when[1]:
                for labels, number in _samples(metric, record):
                    _apply(instrument.labels(self._run, *labels), number)


def _samples(metric: Metric, record: Record) -> Iterator[tuple[tuple[str, ...], float]]:
    """The record's values of a metric, each with its label, if any."""
    if "*" in metric.field:
        numbers = {name: record.number(name) for name in record.values}
        yield from (((label,), number) for label, number in metric.by_label(numbers).items())
    else:
        label = (str(record.values.get(metric.label)),) if metric.label else ()
        yield label, record.number(metric.field) if metric.field else 1.0


def _apply(instrument: Counter | Gauge | Histogram, number: float) -> None:
    if not math.isfinite(number):
        return
    if isinstance(instrument, Histogram):
        instrument.observe(number)
    elif isinstance(instrument, Gauge):
        instrument.set(number)
    elif number > 0:
        instrument.inc(number)


class EngineGauges:
    """The last value of each gauge, by engine."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._last: dict[tuple[str, str], tuple[int, Record]] = {}

    def add(self, entry: MetricsEntry) -> None:
        """Takes one record; other kinds are ignored."""
        if entry.kind == ENGINE:
            record = Record(t=0.0, kind=ENGINE, values=finite_only(entry.record))
            names = str(record.values.get("engine")), str(record.values.get("worker"))
            self._last[names] = int(entry.id.partition("-")[0]), record

    def families(self) -> Iterator[Family]:
        """The gauges of the engines that were recorded lately."""
        newest = max((at for at, _ in self._last.values()), default=0)
        self._last = {k: v for k, v in self._last.items() if v[0] >= newest - KEPT_MS}
        return families(self._run, ENGINE, self._by_engine)

    def _by_engine(self, gauge: Metric) -> dict[str, float]:
        values: dict[str, float] = {}
        # Of several workers' reports on an engine the newest stands last.
        for (engine, _), (_, record) in sorted(self._last.items(), key=lambda item: item[1][0]):
            if math.isfinite(value := record.number(gauge.field)):
                before = values.get(engine, 0.0) if gauge.field in PER_WORKER else 0.0
                values[engine] = before + value
        return values
