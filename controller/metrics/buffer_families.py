"""The buffer's numbers under the names that Prometheus knows them by (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from buffer.results import BufferStats

Number = Callable[[BufferStats], float | None]
Numbers = Callable[[BufferStats], Mapping[str, int] | Mapping[int, int]]

GAUGES: tuple[tuple[str, str, Number], ...] = (
    ("replay_depth_groups", "Groups that wait to be trained.", lambda s: s.ready),
    ("replay_running_groups", "Groups that are being generated.", lambda s: s.running),
    ("replay_leased_groups", "Groups in a batch of the trainer.", lambda s: s.leased),
    ("replay_consumed_groups", "Trained, in no durable checkpoint yet.", lambda s: s.consumed),
    ("replay_quarantined_groups", "Groups set aside as poison.", lambda s: s.quarantined),
    ("replay_quarantined_prompts", "Prompts set aside as poison.", lambda s: s.prompts_quarantined),
    ("replay_bytes", "Size of the payloads that are held.", lambda s: s.bytes),
    ("replay_capacity_groups", "buffer.capacity_groups, if set.", lambda s: s.capacity_groups),
    ("replay_capacity_bytes", "buffer.capacity_bytes, if set.", lambda s: s.capacity_bytes),
    (
        "replay_oldest_age_seconds",
        "Time since the stalest ready group was pushed, if there is one.",
        lambda s: s.oldest_ready_age_s,
    ),
    ("replay_retries_waiting", "Prompts in line to be run again.", lambda s: s.retries_waiting),
    ("replay_trainer_version", "The trainer's policy version.", lambda s: s.trainer_version),
    ("replay_max_staleness", "buffer.max_staleness at this moment.", lambda s: s.max_staleness),
)
"""Name, help and value. What has no value now is not told."""

GAUGES_BY: tuple[tuple[str, str, str, Numbers], ...] = (
    (
        "replay_ready_groups",
        "Groups that wait to be trained, by versions behind the trainer.",
        "staleness",
        lambda s: s.by_staleness,
    ),
    (
        "replay_engine_version",
        "Policy version that an engine serves.",
        "engine",
        lambda s: s.engine_versions,
    ),
)

COUNTERS: tuple[tuple[str, str, Number], ...] = (
    ("replay_pushed", "Groups pushed.", lambda s: s.pushed),
    ("replay_acked", "Groups in a durable checkpoint.", lambda s: s.acked),
    ("replay_requeued", "Prompts put in line again.", lambda s: s.requeued),
    (
        "replay_rerun",
        "Prompts put in line again since their group failed or their worker died.",
        lambda s: s.rerun,
    ),
    ("replay_expired", "Groups whose lease was not renewed in time.", lambda s: s.expired),
    ("replay_push_blocked", "Pushes that had to wait for room.", lambda s: s.push_blocked),
    ("replay_push_blocked_seconds", "Time that they waited.", lambda s: s.push_blocked_s),
    ("replay_tokens_masked", "Tokens left out of the loss as too old.", lambda s: s.tokens_masked),
    (
        "replay_tokens_dropped",
        "Trainable tokens of dropped groups.",
        lambda s: s.tokens_dropped,
    ),
    ("replay_tokens_pushed", "Tokens of pushed groups.", lambda s: s.tokens_pushed),
    ("replay_tokens_trained", "Trainable tokens of trained groups.", lambda s: s.tokens_trained),
)
"""On the wire their names end in `_total`."""

COUNTERS_BY: tuple[tuple[str, str, str, Numbers], ...] = (
    ("replay_dropped", "Groups dropped.", "reason", lambda s: s.dropped),
    ("replay_dropped_tokens", "Tokens of dropped groups.", "reason", lambda s: s.dropped_tokens),
    (
        "replay_abandoned",
        "Groups given up before they were pushed.",
        "reason",
        lambda s: s.abandoned_by_reason,
    ),
)

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Fixed, since histograms of which the bounds change cannot be compared over time."""


def metric_families(run: str, stats: BufferStats) -> Iterator[Metric]:
    """Every metric, labelled with the run's name."""
    for kind, numbers in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, what, number in numbers:
            if (value := number(stats)) is not None:
                yield one(kind, name, what, run, value)
    for kind, mappings in ((GaugeMetricFamily, GAUGES_BY), (CounterMetricFamily, COUNTERS_BY)):
        for name, what, label, by_label in mappings:
            family = kind(name, what, labels=("run", label))
            for key, value in by_label(stats).items():
                family.add_metric((run, str(key)), value)
            yield family
    yield _staleness_histogram(run, stats.trained_by_staleness)
    yield _age_histogram(run, stats)


def one(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    what: str,
    run: str,
    value: float,
) -> Metric:
    """A metric with a single value."""
    family = kind(name, what, labels=("run",))
    family.add_metric((run,), value)
    return family


def _staleness_histogram(run: str, trained: Mapping[int, int]) -> Metric:
    family = HistogramMetricFamily(
        "replay_staleness_versions", "Staleness of groups when they were trained.", labels=("run",)
    )
    buckets = [
        (str(float(bound)), float(sum(n for staleness, n in trained.items() if staleness <= bound)))
        for bound in STALENESS_BOUNDS
    ]
    everything = float(sum(trained.values()))
    total = float(sum(staleness * number for staleness, number in trained.items()))
    family.add_metric((run,), [*buckets, ("+Inf", everything)], total)
    return family


def _age_histogram(run: str, stats: BufferStats) -> Metric:
    family = HistogramMetricFamily(
        "replay_age_seconds", "Time from a group's push until it was trained.", labels=("run",)
    )
    buckets = [
        ("+Inf" if bound == inf else str(bound), float(number))
        for bound, number in stats.trained_by_age.items()
    ]
    family.add_metric((run,), buckets, stats.trained_age_sum_s)
    return family
