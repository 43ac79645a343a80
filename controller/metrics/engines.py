"""The workers' `engine` records, one per engine and worker every few seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from buffer.run_state import MetricsEntry
from controller.metrics.records import Record, finite_only, of_kind

KIND = "engine"
KEPT_MS = 60_000
"""A record that is older than the newest one by more belongs to an engine or a worker that is gone.
"""
GAUGES = (
    ("running", "Requests that the engine is decoding."),
    ("queued", "Requests in the engine's queue."),
    ("kv_usage", "Share of the KV cache that requests hold, without cached prefixes."),
    ("limit", "Most samples that the workers send at a time."),
    ("in_flight", "Samples that the workers have there."),
)
PER_WORKER = ("limit", "in_flight")
"""Each worker has its own; the other values are the engine's, as the worker saw them last."""


class EngineGauges:
    """The last value of each gauge, by engine."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._last: dict[tuple[str, str], tuple[int, Record]] = {}

    def add(self, entry: MetricsEntry) -> None:
        """Takes one record; other kinds are ignored."""
        if entry.kind == KIND:
            record = Record(t=0.0, kind=KIND, values=finite_only(entry.record))
            names = str(record.values.get("engine")), str(record.values.get("worker"))
            self._last[names] = int(entry.id.partition("-")[0]), record

    def families(self) -> Iterator[Metric]:
        newest = max((at for at, _ in self._last.values()), default=0)
        self._last = {k: v for k, v in self._last.items() if v[0] >= newest - KEPT_MS}
        # Of several workers' reports on an engine the newest stands last.
        last = sorted(self._last.items(), key=lambda item: item[1][0])
        for name, what in GAUGES:
            values: dict[str, float] = {}
            for (engine, _), (_, record) in last:
                if math.isfinite(value := record.number(name)):
                    before = values.get(engine, 0.0) if name in PER_WORKER else 0.0
                    values[engine] = before + value
            metric = GaugeMetricFamily(f"rollout_engine_{name}", what, labels=("run", "engine"))
            for engine, value in values.items():
                metric.add_metric((self._run, engine), value)
            yield metric


def not_finite_shares(records: Sequence[Record]) -> dict[int, float]:
    """Share of the engines' log-probabilities that were missing, NaN or infinite, by version;
    only versions with any."""
    all_of, bad = Counter[int](), Counter[int]()
    for record in of_kind(records, KIND):
        all_of.update(record.histogram("logprobs"))
        bad.update(record.histogram("logprobs_not_finite"))
    return {version: bad[version] / max(all_of[version], bad[version]) for version in sorted(bad)}
