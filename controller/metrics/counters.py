"""The counters of the rollout workers: rows of the summary, and a line of the panel (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from controller.metrics.catalogue import METRICS, Kind
from controller.metrics.history import below
from controller.units import format_count, format_duration
from rollout_pool.worker.counters import LENGTHS as BUCKETS
from rollout_pool.worker.counters import LONGER

Counters = Mapping[str, float]

LENGTHS = (*(name for _, name in BUCKETS), LONGER)
"""Classes of a group's longest sample, in tokens."""
COUNTED = METRICS["count"]
WAITS = [metric for metric in COUNTED if metric.kind is Kind.histogram]
"""Each consists of the counters `<field>_within:<bound>` and `<field>_s:<engine>`."""


class Distribution(NamedTuple):
    """Observations of a histogram."""

    cumulative: Mapping[float, float]
    """Number of observations up to each bound; the last bound is infinite."""
    total: float
    """Sum of the observations."""


def times(counters: Counters, kind: str) -> Distribution:
    """Seconds that the requests have waited so far; `kind` is the field of one of WAITS."""
    buckets = {float(bound): counters[n] for n, bound in below(counters, f"{kind}_within:")}
    bounds = sorted({*buckets, math.inf})
    cumulative = accumulate(int(buckets.get(bound, 0)) for bound in bounds)
    return Distribution(dict(zip(bounds, cumulative, strict=True)), _sum(counters, f"{kind}_s:"))


def _sum(counters: Counters, prefix: str) -> float:
    return sum(counters[name] for name, _ in below(counters, prefix))


def wasted_fraction(counters: Counters, tokens_dropped: int) -> float | None:
    """Fraction of generated tokens that will never be trained, without deliberately discarded ones;
    None before the first token. `tokens_dropped`: by the buffer (`BufferStats.tokens_dropped`)."""
    generated = counters.get("tokens_generated", 0.0)
    wasted = counters.get("tokens_wasted", 0.0) + tokens_dropped
    # The workers' counters arrive slightly later than the buffer's.
    return min(1.0, wasted / generated) if generated else None


def epochs(counters: Counters) -> str:
    """The epochs that the workers are in, as "2 to 3", of a mixture "sums 2, words 1"; or ""."""
    begun: dict[str, list[int]] = {}
    for name, worker in below(counters, "epochs_begun:"):
        begun.setdefault(worker.partition("/")[2], []).append(int(counters[name]))
    spans = {task: [*dict.fromkeys((min(of), max(of)))] for task, of in sorted(begun.items())}
    return ", ".join(f"{task} {' to '.join(map(str, of))}".strip() for task, of in spans.items())


def summary_rows(counters: Counters, tokens_dropped: int) -> Iterator[tuple[str, str]]:
    if epoch := epochs(counters):
        yield "epoch of the task's problems", epoch
    fraction = wasted_fraction(counters, tokens_dropped)
    if fraction is not None:
        yield "tokens that never reached the trainer: failed, stopped or too old", f"{fraction:.1%}"
    filtered, generated = (counters.get(f"tokens_{what}") for what in ("filtered", "generated"))
    if filtered and generated:
        fraction = min(1.0, filtered / generated)
        yield "tokens that were filtered out, of groups with equal rewards", f"{fraction:.1%}"
    if prompts := _sum(counters, "prompt_tokens:"):
        cached = 1 - _sum(counters, "prefilled_tokens:") / prompts
        yield "prompt tokens found in the prefix cache", f"{cached:.1%}"
    for wait in WAITS:
        within, total_s = times(counters, wait.field)
        if num_waits := within[math.inf]:
            most_s = next(bound for bound, count in within.items() if count >= 0.99 * num_waits)
            most = "over 100 s" if math.isinf(most_s) else f"within {format_duration(most_s)}"
            yield wait.title, f"{format_duration(total_s / num_waits)} on average, 99% {most}"
    if num_preempted := _sum(counters, "preemptions:"):
        yield "requests that lost their KV cache for lack of memory", format_count(num_preempted)
    if num_episodes := _sum(counters, "episodes_ended:"):
        for name in ("turns", "branches"):
            yield f"{name} per episode", f"{counters.get(name, 0.0) / num_episodes:.2f}"
    for length in LENGTHS:
        completed = counters.get(f"completed:{length}", 0.0)
        given_up = counters.get(f"given_up:{length}", 0.0)
        if completed or given_up:
            seconds = counters.get(f"completed_s:{length}", 0.0) / max(1.0, completed)
            took = f", {format_duration(seconds)} each" if completed else ""
            yield (
                f"groups whose longest sample had {length} tokens",
                f"{completed:,.0f} completed{took}; {given_up:,.0f} given up",
            )
    for counted in COUNTED:
        if counted.in_summary and (number := counters.get(counted.field)):
            yield counted.title, format_count(number)


def panel_line(counters: Counters, tokens_dropped: int) -> str:
    """The notable counters for the panel; "" if there are none."""
    parts = [
        f"{format_count(number)} {counted.on_panel}"
        for counted in COUNTED
        if counted.on_panel and (number := counters.get(counted.field))
    ]
    if fraction := wasted_fraction(counters, tokens_dropped):
        parts.insert(0, f"{fraction:.1%} of tokens wasted")
    if epoch := epochs(counters):
        parts.insert(0, f"epoch {epoch}")
    return ", ".join(parts)
