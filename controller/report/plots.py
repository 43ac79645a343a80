"""The plots of a run, drawn from its metrics: PNG files in the run's folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from controller.metrics.history import Record, fullest, numbers, of_kind, series
from controller.watch.learning import has_no_gradient

# Okabe and Ito's colours: colour-blind readers can tell them apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#8C8C8C"
INK, FAINT = "#2B2B2B", "#D9D9D9"
UPDATES_INCHES = (10.0, 6.4)
LEARNING_INCHES = (8.0, 6.0)
LEGEND_ROOM = 16
"""Points between plot and title: the height of a one-line legend."""
STYLE = Path(__file__).with_suffix(".mplstyle")
STATES = ("running", "ready", "leased")
MAX_AREA_SAMPLES = 600
"""More would be narrower than a pixel."""

TIME_PARTS = (
    ("lease_wait_s", "waiting for rollouts", ORANGE),
    ("lease_ranks_s", "waiting for other ranks", GREEN),
    ("step_s", "training", BLUE),
    ("snapshot_s", "copying weights", SKY),
    ("snapshot_wait_s", "waiting to copy weights", PINK),
    ("checkpoint_s", "checkpoint", GREY),
)
"""The fields of a step record that add up to its time."""


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Each plot that the records have data for, by its name in `PLOTS`."""
    drawn = {}
    with rc_context(fname=STYLE):
        for name, (title, draw) in PLOTS.items():
            if (figure := draw(records)) is not None:
                figure.suptitle(title, x=0.01, ha="left")
                drawn[name] = figure
    return drawn


def _single(
    draw: Callable[[Axes, Sequence[Record]], bool], records: Sequence[Record]
) -> Figure | None:
    figure = Figure()
    return figure if draw(figure.add_subplot(), records) else None


def _learning_by_step(records: Sequence[Record]) -> Figure | None:
    steps = of_kind(records, "step")

    def trained_by(version: float) -> float:
        """Steps until the weights of this version: several may go into one publish."""
        return max((s.number("step") for s in steps if s.number("version") < version), default=0.0)

    return _learning(
        records,
        "training step",
        lambda step: step.number("step"),
        lambda e: (trained_by(e.number("version_min")), trained_by(e.number("version_max"))),
    )


def _learning_by_time(records: Sequence[Record]) -> Figure | None:
    since, unit = _clock(records)
    return _learning(
        records,
        f"{unit} since training began",
        lambda step: since(step.t),
        lambda e: (since(e.t - e.number("seconds")), since(e.t)),
    )


def _learning(
    records: Sequence[Record],
    label: str,
    place: Callable[[Record], float],
    span: Callable[[Record], tuple[float, float]],
) -> Figure | None:
    """Rewards above accuracy: a reward may be any number, an accuracy is a share.

    A step is drawn at its `place`, an evaluation over its `span` with a point in the middle.
    """
    steps = [r for r in of_kind(records, "step") if math.isfinite(r.number("reward_mean"))]
    evals = of_kind(records, "eval")
    if not steps:
        return None
    figure = Figure(figsize=LEARNING_INCHES if evals else None)
    panels: Any = figure.subplots(2 if evals else 1, sharex=True, squeeze=False)
    top, bottom = panels[0][0], panels[-1][0]
    rewards = series(steps, "reward_mean")
    _draw_line(top, [place(r) for r in steps], rewards, BLUE, "")
    _share_axis(top, rewards)
    _small_title(top, "reward of the batch (sampled), mean")
    if evals:
        accuracy, middle = numbers(evals, "accuracy"), [sum(span(r)) / 2 for r in evals]
        first, last = zip(*map(span, evals), strict=True)
        bottom.hlines(accuracy, first, last, color=ORANGE, linewidth=4, alpha=0.4)
        bottom.plot(middle, accuracy, "o-", color=ORANGE, markersize=5, clip_on=False)
        above: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points"}
        for i, side in {0: "left", len(evals) - 1: "right"}.items():
            text, point = f"{accuracy[i]:.0%}", (middle[i], accuracy[i])
            bottom.annotate(text, point, **above, ha=side, fontweight="bold", color=ORANGE)
        _share_axis(bottom, accuracy)
        _small_title(bottom, "held-out accuracy")
    bottom.set_xlabel(label)
    if label == "training step":
        _count_axis(bottom)
    return figure


def _small_title(axes: Axes, title: str) -> None:
    # The same height for all of a figure, with or without a legend below the title.
    axes.set_title(title, fontsize=10, fontweight="normal", pad=LEGEND_ROOM)


def _share_axis(axes: Axes, values: Sequence[float]) -> None:
    """From 0 to 1 if all values are in that range, otherwise around them."""
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    else:
        _value_axis(axes, values)


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """Every tick has its whole number, without an offset above the axis. The axis spans at least a
    fiftieth of the value, so that what hardly changes looks so."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    known = [value for value in values if math.isfinite(value)]
    if known and not any(known):
        axes.set_ylim(0, 1)
    elif known and max(known) - min(known) < (room := max(map(abs, known)) / 100):
        middle = (max(known) + min(known)) / 2
        axes.set_ylim(middle - room, middle + room)


def _draw_line(
    axes: Axes, x: Sequence[float], values: Sequence[float], color: str, label: str
) -> None:
    """The values, faint, and their running mean."""
    axes.plot(x, values, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(x, _smooth(values), color=color, linewidth=1.6, label=label)


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


def _updates(records: Sequence[Record]) -> Figure | None:
    steps = of_kind(records, "step")
    if not steps:
        return None
    figure = Figure(figsize=UPDATES_INCHES)
    every: Any = figure.subplots(2, 3, sharex=True)
    x = numbers(steps, "step")
    for axes, (title, lines) in zip(every.flat, _UPDATES, strict=True):
        for name, label, color in lines:
            _draw_line(axes, x, numbers(steps, name), color, label)
        _value_axis(axes, [value for name, _, _ in lines for value in numbers(steps, name)])
        _count_axis(axes)
        if len(lines) > 1:
            _legend_above(axes)
        _small_title(axes, title)
    if empty := numbers(filter(has_no_gradient, steps), "step"):
        axes = every.flat[1]
        axes.plot(empty, [0.0] * len(empty), ".", color=ORANGE, markersize=4, label="no gradient")
        _legend_above(axes)
    for axes in every[-1]:
        axes.set_xlabel("training step")
    return figure


_COMPARED = (
    ("reward of the batch (sampled), mean", "step", "reward_mean"),
    ("held-out accuracy", "eval", "accuracy"),
    ("tokens per answer, mean", "step", "response_length_mean"),
    ("entropy, nats per token", "step", "entropy"),
    ("staleness of the batch, mean", "step", "staleness_mean"),
    ("seconds that a step waited for rollouts", "step", "lease_wait_s"),
)
"""The title of each small plot of two runs, and the kind and the field of its records."""


def draw_over_each_other(runs: Sequence[tuple[str, Sequence[Record]]]) -> Figure | None:
    """The curves of two runs over their steps; None if neither has any."""
    if not any(of_kind(records, "step") for _, records in runs):
        return None
    with rc_context(fname=STYLE):
        figure = Figure(figsize=UPDATES_INCHES)
        every: Any = figure.subplots(2, 3)
        for axes, (title, kind, name) in zip(every.flat, _COMPARED, strict=True):
            shown = list[float]()
            for (run, records), color in zip(runs, (BLUE, ORANGE), strict=True):
                found = [r for r in of_kind(records, kind) if math.isfinite(r.number(name))]
                if found:
                    x = [_steps_before(records, record) for record in found]
                    _draw_line(axes, x, numbers(found, name), color, run)
                shown += numbers(found, name)
            _value_axis(axes, shown)
            _count_axis(axes)
            _small_title(axes, title)
        _legend_above(every.flat[0])
        figure.suptitle("Two runs, step by step", x=0.01, ha="left")
    return figure


def _steps_before(records: Sequence[Record], record: Record) -> float:
    if record.kind == "step":
        return record.number("step")
    return max((r.number("step") for r in of_kind(records, "step") if r.t <= record.t), default=0.0)


def _staleness(axes: Axes, records: Sequence[Record]) -> bool:
    counts: Counter[int] = Counter()
    for step in of_kind(records, "step"):
        counts.update(step.histogram("staleness_counts"))
    if not counts:
        return False
    limits = numbers(of_kind(records, "buffer"), "max_staleness")
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
    inside: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    inside |= {"xytext": (-6, -4), "ha": "right", "va": "top", "fontsize": 9, "color": ORANGE}
    axes.annotate(f"max_staleness = {limit}", (limit + 0.5, 1), **inside)
    axes.set_xticks(staleness)
    axes.set_xlim(-0.6, staleness[-1] + 0.7)
    axes.set_ylim(0, max(counts.values()) * 1.3)
    axes.set_xlabel("policy versions between the oldest token of a group and the one trained")
    axes.set_ylabel("groups")
    return True


def _buffer(axes: Axes, records: Sequence[Record]) -> bool:
    samples = fullest(of_kind(records, "buffer"), MAX_AREA_SAMPLES)
    if len(samples) < 2:
        return False
    since, unit = _clock(records)
    times = [since(r.t) for r in samples]
    depths = [numbers(samples, name) for name in STATES]
    # Steps instead of lines: the leash bounds the peaks.
    axes.stackplot(times, *depths, labels=STATES, colors=(SKY, GREEN, BLUE), lw=0, step="post")
    limits = numbers(samples, "limit")
    if all(map(math.isfinite, limits)):
        label = "limit of the leash"
        style: dict[str, Any] = {"color": ORANGE, "linestyle": "--", "linewidth": 1.2}
        axes.step(times, limits, where="post", label=label, **style)
    axes.set_xlabel(f"{unit} since training began")
    axes.set_ylabel("groups")
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_outside(axes)
    return True


def _time_shares(axes: Axes, records: Sequence[Record]) -> bool:
    steps = of_kind(records, "step")
    if len(steps) < 2:
        return False
    parts = [_smooth(np.nan_to_num(numbers(steps, name)).tolist()) for name, _, _ in TIME_PARTS]
    total = sum(map(sum, parts))
    if total <= 0:
        return False
    axes.stackplot(
        numbers(steps, "step"),
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
    beside = [] if commits else _positive(of_kind(records, "commit"), "load_s")
    if not publishes or not (commits or beside):
        return False
    stalls = _positive(of_kind(records, "publish"), "snapshot_s")
    for points, label, color, marker in (
        (publishes, "until every engine serves it", BLUE, "o"),
        (commits, "engine pause", ORANGE, "."),
        (beside, "engine's load, without a pause", ORANGE, "."),
        (stalls, "trainer pause", GREEN, "."),
    ):
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=4, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1000:g} ms")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("policy version")
    _count_axis(axes)
    _legend_outside(axes)
    return True


PLOTS: dict[str, tuple[str, Callable[[Sequence[Record]], Figure | None]]] = {
    "learning_by_step.png": ("Reward and held-out accuracy over training steps", _learning_by_step),
    "learning_by_time.png": ("Reward and held-out accuracy over time", _learning_by_time),
    "updates.png": ("Updates, step by step", _updates),
    "staleness.png": ("Staleness of the groups that were trained", partial(_single, _staleness)),
    "buffer.png": ("Groups in the buffer over time", partial(_single, _buffer)),
    "time_shares.png": (
        "How the trainer spent its time, step by step",
        partial(_single, _time_shares),
    ),
    "weights.png": (
        "How long each version took to reach the engines",
        partial(_single, _weights),
    ),
}
"""The title of each plot, and what draws it."""


def _positive(records: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """(version, value) of the records with a value above 0, for a logarithmic axis."""
    return [(r.number("version"), value) for r in records if (value := r.number(name)) > 0]


def _count_axis(axes: Axes) -> None:
    """An axis of steps or versions has only integer ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend_above(axes: Axes) -> None:
    """In one line between title and plot, where it covers no data."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 0.99), "ncols": 3}
    axes.legend(**place, fontsize=8, borderaxespad=0.2, handlelength=1.4, columnspacing=1.2)


def _legend_outside(axes: Axes, title: str | None = None) -> None:
    """Beside the plot, in the order of the stack."""
    handles, labels = axes.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    legend: Any = axes.legend(handles[::-1], labels[::-1], **place, title=title, alignment="left")
    legend.set_in_layout(True)


def _clock(records: Sequence[Record]) -> tuple[Callable[[float], float], str]:
    """From a record's time to that on an axis of the run, and the unit there.

    The axis begins with the first step, or with the first record where there is no step.
    """
    start = records[0].t if records else 0.0
    if steps := of_kind(records, "step")[:1]:
        start = steps[0].t - sum(sum(series(steps, name)) for name, _, _ in TIME_PARTS)
    length = max((r.t for r in records), default=start) - start
    fitting = (u for u in (("hours", 3600.0), ("minutes", 60.0)) if length >= 2 * u[1])
    unit, seconds = next(fitting, ("seconds", 1.0))
    return lambda t: (t - start) / seconds, unit
