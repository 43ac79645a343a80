"""The plots of a run, drawn from its metrics: PNG files in the run's folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from controller.metrics.records import Record, of_kind, series
from controller.watch.learning import has_no_gradient

# Okabe and Ito's colours: colour-blind readers can tell them apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#8C8C8C"
INK, FAINT = "#2B2B2B", "#D9D9D9"
UPDATES_INCHES = (10.0, 6.4)
TITLE_PAD, LEGEND_ROOM = 12, 16
"""Points between plot and title, and the height of a one-line legend between them."""
STYLE: dict[str, Any] = {
    "figure.figsize": (8.0, 4.2),
    "figure.dpi": 144,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": TITLE_PAD,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    **{f"{axis}tick.color": INK for axis in "xy"},
    **{f"{axis}tick.labelsize": 9 for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
}
STATES = ("running", "ready", "leased")
MAX_AREA_SAMPLES = 600
"""More would be narrower than a pixel."""

PLOTS = {
    "learning_by_step.png": "Reward and held-out accuracy over training steps",
    "learning_by_time.png": "Reward and held-out accuracy over time",
    "updates.png": "Updates, step by step",
    "staleness.png": "Staleness of the groups that were trained",
    "buffer.png": "Groups in the buffer over time",
    "time_shares.png": "How the trainer spent its time, step by step",
    "weights.png": "How long each version took to reach the engines",
}

TIME_PARTS = (
    ("lease_wait_s", "waiting for rollouts", ORANGE),
    ("step_s", "training", BLUE),
    ("snapshot_s", "copying weights", SKY),
    ("snapshot_wait_s", "waiting to copy weights", PINK),
    ("checkpoint_s", "checkpoint", GREY),
)
"""The fields of a step record that add up to its time."""


def write_plots(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw every plot that the records have data for; returns the files (names as in `PLOTS`)."""
    written = {folder / name: figure for name, figure in figures(records).items()}
    for path, figure in written.items():
        figure.savefig(path)
    return list(written)


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Each plot that the records have data for, by its name in `PLOTS`."""
    drawings: dict[str, Callable[[Axes, Sequence[Record]], bool]] = {
        "learning_by_step.png": _learning_by_step,
        "learning_by_time.png": _learning_by_time,
        "staleness.png": _staleness,
        "buffer.png": _buffer,
        "time_shares.png": _time_shares,
        "weights.png": _weights,
    }
    drawn = {}
    with rc_context(STYLE):
        if of_kind(records, "step"):
            drawn["updates.png"] = _updates(records)
        for name, draw in drawings.items():
            figure = Figure()
            axes = figure.add_subplot()
            if draw(axes, records):
                pad = TITLE_PAD + LEGEND_ROOM * name.startswith("learning")
                axes.set_title(PLOTS[name], pad=pad)
                drawn[name] = figure
    return drawn


def _learning_by_step(axes: Axes, records: Sequence[Record]) -> bool:
    # Both are placed at the version of the weights: a step's batch was sampled to train it.
    axes.set_xlabel("training steps")
    _count_axis(axes)
    return _learning(
        axes,
        records,
        lambda step: step.number("version"),
        lambda e: (e.number("version_min"), e.number("version_max")),
    )


def _learning_by_time(axes: Axes, records: Sequence[Record]) -> bool:
    start = _start(records)
    axes.set_xlabel("minutes since training began")
    return _learning(
        axes,
        records,
        lambda step: (step.t - start) / 60,
        lambda e: ((e.t - e.number("seconds") - start) / 60, (e.t - start) / 60),
    )


def _learning(
    axes: Axes,
    records: Sequence[Record],
    place: Callable[[Record], float],
    span: Callable[[Record], tuple[float, float]],
) -> bool:
    """A step is drawn at its `place`, an evaluation over its `span` with a point in the middle."""
    steps = [r for r in of_kind(records, "step") if math.isfinite(r.number("reward_mean"))]
    evals = of_kind(records, "eval")
    if not steps:
        return False
    x = [place(r) for r in steps]
    rewards, accuracy = series(steps, "reward_mean"), _numbers(evals, "accuracy")
    axes.plot(x, rewards, color=SKY, linewidth=0.8, alpha=0.6)
    axes.plot(x, _smooth(rewards), color=BLUE, linewidth=2, label="reward of the batch (sampled)")
    if evals:
        first, last = zip(*map(span, evals), strict=True)
        middle = [sum(span(r)) / 2 for r in evals]
        axes.hlines(accuracy, first, last, color=ORANGE, linewidth=4, alpha=0.4)
        axes.plot(middle, accuracy, "o-", color=ORANGE, markersize=5, label="held-out accuracy")
        above: dict[str, Any] = {"xytext": (0, 9), "textcoords": "offset points"}
        for i, side in {0: "left", len(evals) - 1: "right"}.items():
            text, point = f"{accuracy[i]:.0%}", (middle[i], accuracy[i])
            axes.annotate(text, point, **above, ha=side, fontweight="bold", color=ORANGE)
    _share_axis(axes, [*rewards, *accuracy])
    _legend_above(axes)
    return True


def _share_axis(axes: Axes, values: Sequence[float]) -> None:
    """From 0 to 1 if all values are in that range, otherwise automatic."""
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.06)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the run, narrower at both ends; ignores NaN."""
    half = max(1, len(values) // 40)
    window, known = np.ones(2 * half + 1), np.isfinite(values)
    totals = np.convolve(np.where(known, values, 0.0), window)
    counts = np.convolve(known, window)
    means = totals / np.where(counts, counts, math.nan)
    return [float(mean) for mean in means[half : half + len(values)]]


# Updates -------------------------------------------------------------------------------------

_UPDATES: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    ("loss", (("loss", "", BLUE),)),
    ("gradient norm before clipping", (("grad_norm", "", BLUE),)),
    ("entropy, nats per token", (("entropy", "", BLUE),)),
    ("tokens per answer, mean", (("response_length_mean", "", BLUE),)),
    (
        "share of the tokens",
        (
            ("clip_fraction", "clipped", BLUE),
            ("tis_clipped_fraction", "weight at its cap", ORANGE),
            ("rejected_fraction", "rejected", GREEN),
        ),
    ),
    ("importance ratio, mean distance from 1", (("ratio_mean_abs_dev", "", BLUE),)),
)
"""The title of each small plot; the field, label and colour of each of its lines."""


def _updates(records: Sequence[Record]) -> Figure:
    steps = of_kind(records, "step")
    figure = Figure(figsize=UPDATES_INCHES)
    figure.suptitle(PLOTS["updates.png"], x=0.01, ha="left")
    every: Any = figure.subplots(2, 3, sharex=True)
    for axes, (title, lines) in zip(every.flat, _UPDATES, strict=True):
        _draw_series(axes, steps, lines)
        # The same height for all, with or without a legend below the title.
        axes.set_title(title, fontsize=10, fontweight="normal", pad=LEGEND_ROOM)
    _mark_empty_updates(every.flat[1], steps)
    for axes in every[-1]:
        axes.set_xlabel("training step")
    return figure


def _draw_series(
    axes: Axes, steps: Sequence[Record], lines: Sequence[tuple[str, str, str]]
) -> None:
    x = _numbers(steps, "step")
    for name, label, color in lines:
        values = _numbers(steps, name)
        axes.plot(x, values, color=color, linewidth=0.8, alpha=0.35)
        axes.plot(x, _smooth(values), color=color, linewidth=1.6, label=label)
    _count_axis(axes)
    if len(lines) > 1:
        _legend_above(axes, fontsize=8)


def _mark_empty_updates(axes: Axes, steps: Sequence[Record]) -> None:
    empty = _numbers(filter(has_no_gradient, steps), "step")
    if empty:
        axes.plot(empty, [0.0] * len(empty), ".", color=ORANGE, markersize=4, label="no gradient")
        _legend_above(axes, fontsize=8)


def _staleness(axes: Axes, records: Sequence[Record]) -> bool:
    counts: Counter[int] = Counter()
    for step in of_kind(records, "step"):
        counts.update(step.histogram("staleness_counts"))
    if not counts:
        return False
    limits = _numbers(of_kind(records, "buffer"), "max_staleness")
    limit = int(max(limits, default=max(counts)))
    total = sum(counts.values())
    staleness = list(range(max(limit, *counts) + 1))
    bars = axes.bar(
        staleness,
        [counts[s] for s in staleness],
        color=[BLUE if s <= limit else ORANGE for s in staleness],
        width=0.62,
    )
    shares = [f"{counts[s] / total:.0%}\n{counts[s]:,}" for s in staleness]
    axes.bar_label(bars, labels=shares, fontsize=9, color=INK, padding=3)
    axes.axvline(limit + 0.5, color=ORANGE, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"max_staleness = {limit}",
        (limit + 0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-6, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color=ORANGE,
    )
    axes.set_xticks(staleness)
    axes.set_xlim(-0.6, staleness[-1] + 0.7)
    axes.set_ylim(0, max(counts.values()) * 1.3)
    axes.set_xlabel("policy versions between the oldest token of a group and the one trained")
    axes.set_ylabel("groups")
    return True


def _buffer(axes: Axes, records: Sequence[Record]) -> bool:
    samples = _peaks(of_kind(records, "buffer"))
    if len(samples) < 2:
        return False
    start = _start(records)
    minutes = [(r.t - start) / 60 for r in samples]
    depths = [_numbers(samples, name) for name in STATES]
    # Steps and peaks instead of means: the leash bounds the peaks.
    axes.stackplot(minutes, *depths, labels=STATES, colors=(SKY, GREEN, BLUE), lw=0, step="post")
    limits = _numbers(samples, "limit")
    if all(map(math.isfinite, limits)):
        label = "limit of the leash"
        style: dict[str, Any] = {"color": ORANGE, "linestyle": "--", "linewidth": 1.2}
        axes.step(minutes, limits, where="post", label=label, **style)
    axes.set_xlabel("minutes since training began")
    axes.set_ylabel("groups")
    axes.set_xlim(minutes[0], minutes[-1])
    axes.set_ylim(bottom=0)
    _legend_outside(axes)
    return True


def _peaks(samples: Sequence[Record]) -> list[Record]:
    """At most `MAX_AREA_SAMPLES`: the sample with the most groups of each interval."""

    def held(sample: Record) -> float:
        return sum(sample.number(name) for name in STATES)

    size = -(-len(samples) // MAX_AREA_SAMPLES) or 1
    return [max(samples[i : i + size], key=held) for i in range(0, len(samples), size)]


def _time_shares(axes: Axes, records: Sequence[Record]) -> bool:
    steps = of_kind(records, "step")
    if len(steps) < 2:
        return False
    parts = [_smooth(np.nan_to_num(_numbers(steps, name)).tolist()) for name, _, _ in TIME_PARTS]
    total = sum(map(sum, parts))
    if total <= 0:
        return False
    axes.stackplot(
        _numbers(steps, "step"),
        *parts,
        labels=[
            f"{label} ({sum(part) / total:.0%})"
            for (_, label, _), part in zip(TIME_PARTS, parts, strict=True)
        ],
        colors=[color for _, _, color in TIME_PARTS],
        linewidth=0,
    )
    axes.set_xlim(steps[0].number("step"), steps[-1].number("step"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training step")
    _count_axis(axes)
    axes.set_ylabel("seconds per step (running mean)")
    _legend_outside(axes, "share of the training time")
    return True


def _weights(axes: Axes, records: Sequence[Record]) -> bool:
    publishes = _positive(of_kind(records, "publish"), "convergence_s")
    commits = _positive(of_kind(records, "commit"), "pause_s")
    if not publishes or not commits:
        return False
    stalls = _positive(of_kind(records, "publish"), "snapshot_s")
    for points, label, color, marker in (
        (publishes, "until every engine serves it", BLUE, "o"),
        (commits, "engine pause", ORANGE, "."),
        (stalls, "trainer pause", GREEN, "."),
    ):
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=4, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda seconds, _: _tick(seconds))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("policy version")
    _count_axis(axes)
    _legend_outside(axes)
    return True


def _positive(records: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """(version, value) of the records with a value above 0, for a logarithmic axis."""
    return [(r.number("version"), value) for r in records if (value := r.number(name)) > 0]


def _numbers(records: Iterable[Record], name: str) -> list[float]:
    """The value of `name` in each record; NaN where it is missing."""
    return [record.number(name) for record in records]


def _tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


def _count_axis(axes: Axes) -> None:
    """An axis of steps or versions has only integer ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend_above(axes: Axes, fontsize: int = 9) -> None:
    """In one line between title and plot, where it covers no data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        ncols=3,
        fontsize=fontsize,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _legend_outside(axes: Axes, title: str | None = None) -> None:
    """Beside the plot, in the order of the stack."""
    handles, labels = axes.get_legend_handles_labels()
    legend: Any = axes.legend(
        handles[::-1],
        labels[::-1],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        title=title,
        alignment="left",
    )
    legend.set_in_layout(True)


def _start(records: Sequence[Record]) -> float:
    """Start of the first step; without steps the time of the first record."""
    steps = of_kind(records, "step")
    if not steps:
        return records[0].t if records else 0.0
    return steps[0].t - sum(sum(series(steps[:1], name)) for name, _, _ in TIME_PARTS)
