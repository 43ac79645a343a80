"""The data of the page's charts: columns of a run's records, thinned out for a screen (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controller.metrics.catalogue import METRICS, Kind
from controller.metrics.history import READY_BY_STALENESS, Record, fullest, numbers, of_kind
from controller.watch.stages import STEP_PARTS

MAX_POINTS = 2000
"""Most of one line: more than any screen has columns."""
MAX_AREA_POINTS = 400
MAX_CURVES = 16
"""Lines of one metric: it may have one for each engine."""
MAX_STALENESS_LAYERS = 8
_OF_STEP = {f"step_{part}_s" for part in STEP_PARTS}
TIME_PARTS = {
    m.field: m.help
    for m in METRICS["step"]
    if m.unit == "s" and m.kind is Kind.counter and m.field not in _OF_STEP
}
"""The fields of a step record that add up to its time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    """NaN, which becomes null, where a value is missing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Area:
    """Layers over the same x, each on top of the last one."""

    layers: Sequence[Curve]
    limit: Sequence[float] = ()
    """A line above them."""


def find_metrics(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """The kind and the name of each number in the records."""
    for record in records:
        for name, value in record.values.items():
            if not isinstance(value, str):
                yield record.kind, name


def curves(
    records: Sequence[Record], kind: str, name: str, since_s: float = math.inf, *, by_time: bool
) -> list[Curve]:
    """The values of one metric in the last `since_s`, by step, or by seconds since the first
    record: one line, or a line for each engine."""
    start = records[0].t if records else 0.0
    lines: dict[str, list[Record]] = {}
    # Whichever engine was held for an evaluation, the policy is one.
    of = "" if kind == "eval" else "engine"
    for record in of_kind(latest(records, since_s), kind):
        if name in record.values:
            lines.setdefault(str(record.values.get(of, "")), []).append(record)
    found = []
    for label, line in sorted(lines.items())[:MAX_CURVES]:
        times = np.array([record.t for record in line])
        if by_time:
            x = times - start
        else:
            x = np.array(numbers(line, "step")) if kind == "step" else _steps_at(records, times)
        y = np.array(numbers(line, name))
        kept = thinned(y, MAX_POINTS)
        found.append(Curve(label=label, x=x[kept].tolist(), y=y[kept].tolist()))
    return found


def latest(records: Sequence[Record], seconds: float) -> Sequence[Record]:
    """The records of the last `seconds`: a long run's curves in detail."""
    if math.isinf(seconds):
        return records
    since = max((record.t for record in records), default=0.0) - seconds
    return [record for record in records if record.t >= since]


def thinned(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """The places of at most `most` values that draw the same line: the first, the last, and the
    lowest and highest of each interval. NaN is kept where an interval holds nothing else.

    thinned(np.array([0.0, 1, 9, 2, 3, 4, -5, 6]), 6)     # 0, 2, 6, 7
    """
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (most - 2) // 2 + 1).astype(int)
    low, high = np.where(np.isnan(values), [[math.inf], [-math.inf]], values)
    places = {0, len(values) - 1}
    for start, stop in pairwise(edges):
        places |= {int(start + low[start:stop].argmin()), int(start + high[start:stop].argmax())}
    return np.array(sorted(places))


def depth(records: Sequence[Record], since_s: float = math.inf) -> Area | None:
    """Groups in the buffer over the last `since_s`, those that wait by their staleness."""
    peaks = fullest(of_kind(latest(records, since_s), "buffer"), MAX_AREA_POINTS)
    if not peaks:
        return None
    x = [sample.t - records[0].t for sample in peaks]
    layers = {"being trained": numbers(peaks, "leased")}
    waiting = [_by_staleness(sample) for sample in peaks]
    for staleness in sorted({s for sample in waiting for s in sample}):
        more = " or more" if staleness == MAX_STALENESS_LAYERS else ""
        name = "ready" if staleness < 0 else f"ready, staleness {staleness}{more}"
        layers[name] = [sample.get(staleness, 0) for sample in waiting]
    layers["being sampled"] = numbers(peaks, "running")
    return Area(
        layers=[Curve(label=label, x=x, y=y) for label, y in layers.items()],
        limit=numbers(peaks, "limit"),
    )


def _by_staleness(sample: Record) -> dict[int, float]:
    """Groups that wait; by -1 where a record of an older version does not say more."""
    if READY_BY_STALENESS not in sample.values:
        return {-1: sample.count("ready")}
    counts: dict[int, float] = {}
    for staleness, number in sample.histogram(READY_BY_STALENESS).items():
        layer = min(staleness, MAX_STALENESS_LAYERS)
        counts[layer] = counts.get(layer, 0) + number
    return counts


def time_parts(records: Sequence[Record], since_s: float = math.inf) -> Area | None:
    """Seconds per step by what the trainer did: means of intervals."""
    steps = of_kind(latest(records, since_s), "step")
    if not steps:
        return None
    x = _means(numbers(steps, "step"))
    parts = {words: numbers(steps, name) for name, words in TIME_PARTS.items()}
    return Area(layers=[Curve(label=words, x=x, y=_means(part)) for words, part in parts.items()])


def _means(values: Sequence[float]) -> list[float]:
    number = min(len(values), MAX_AREA_POINTS)
    starts = np.linspace(0, len(values), number, endpoint=False).astype(int)
    sums = np.add.reduceat(np.nan_to_num(values), starts)
    return list((sums / np.diff([*starts, len(values)])).tolist())


def _steps_at(records: Sequence[Record], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many steps the run had made at these times."""
    steps = of_kind(records, "step")
    made = np.array([0.0, *numbers(steps, "step")])
    return made[np.searchsorted([step.t for step in steps], times, side="right")]


def titles() -> Mapping[str, str]:
    """Help of the metrics that the catalogue has, by kind and field."""
    return {f"{kind}/{m.field}": m.help for kind, found in METRICS.items() for m in found}
