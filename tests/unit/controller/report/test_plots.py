"""The plots of a run, read from the figures before they become files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.axes import Axes

from controller.metrics.history import Record
from controller.report.plots import MAX_AREA_SAMPLES, PLOTS, figures
from tests.support.controller.records import (
    STATS,
    buffer_record,
    commit_record,
    eval_record,
    publish_record,
    run_records,
    step_record,
)


def x_ticks(axes: Axes) -> list[float]:
    low, high = axes.get_xlim()
    return [float(tick) for tick in axes.get_xticks() if low <= tick <= high]


def test_updates_are_drawn_over_steps_from_their_records() -> None:
    lengths = [10.0, 12.0, 14.0]
    steps = [
        step_record(
            step,
            1000.0 + step,
            loss=-0.1 * step,
            grad_norm=1.0 - step / 2,
            num_empty_updates=int(step == 2),
            response_length_mean=lengths[step],
        )
        for step in range(3)
    ]
    by_title = {axes.get_title(loc="left"): axes for axes in figures(steps)["updates.png"].axes}
    assert len(by_title) == 6
    for title, values in (
        ("loss", [0.0, -0.1, -0.2]),
        ("gradient norm before clipping", [1.0, 0.5, 0.0]),
        ("entropy, nats per token", [1.5] * 3),
        ("tokens per answer, mean", lengths),
        ("share of the tokens", [0.01] * 3),
        ("importance ratio, mean distance from 1", [0.02] * 3),
    ):
        raw = by_title[title].get_lines()[0]
        assert list(raw.get_xdata()) == [1, 2, 3], title
        assert list(raw.get_ydata()) == pytest.approx(values), title
    (_, _, empty) = by_title["gradient norm before clipping"].get_lines()
    assert list(empty.get_xdata()) == [3] and empty.get_label() == "no gradient"


def test_axes_have_whole_ticks_and_legends_cover_nothing() -> None:
    plots = figures(run_records(num_steps=2))
    for figure in plots.values():
        figure.draw_without_rendering()
    assert plots.keys() == PLOTS.keys()
    for name in ("learning_by_step.png", "updates.png", "time_shares.png", "weights.png"):
        for axes in plots[name].axes:
            ticks = x_ticks(axes)
            assert ticks and all(tick == int(tick) for tick in ticks), (name, ticks)
    for name, figure in plots.items():
        for axes in figure.axes:
            if (legend := axes.get_legend()) is not None:
                box, picture = legend.get_window_extent(), axes.get_window_extent()
                assert box.y0 >= picture.y1 - 3 or box.x0 >= picture.x1, name


def test_times_of_weights_are_read_in_ms_and_s() -> None:
    records = [step_record(0, 1000.0)]
    for version, seconds in ((1, 0.004), (2, 3.0)):
        publish = publish_record(version, 1000.0)
        values = {**publish.values, "convergence_s": seconds, "snapshot_s": seconds / 4}
        records.append(Record(t=publish.t, kind="publish", values=values))
        records.append(commit_record("engine-0", version, 1000.0, pause_s=seconds / 2))
    figure = figures(records)["weights.png"]
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"5 ms", "100 ms", "1 s"} <= set(labels)


@pytest.mark.parametrize("num_samples", [10, 5 * MAX_AREA_SAMPLES])
def test_area_of_the_buffer_reaches_every_peak(num_samples: int) -> None:
    peak = num_samples // 2
    few, many = replace(STATS, ready=8, leased=0), replace(STATS, ready=40, leased=0)
    samples = [buffer_record(1000.0 + i, many if i == peak else few) for i in range(num_samples)]
    (axes,) = figures([step_record(0, 1000.0), *samples])["buffer.png"].axes
    tops = [float(area.get_paths()[0].vertices[:, 1].max()) for area in axes.collections]
    assert max(tops) == 40


def test_time_shares_have_a_titled_legend() -> None:
    (axes,) = figures(run_records(20))["time_shares.png"].axes
    legend = axes.get_legend()
    assert legend is not None and legend.get_title().get_text() == "share of the training time"
    assert "training (62%)" in [text.get_text() for text in legend.get_texts()]


def test_evaluation_is_drawn_over_the_versions_that_answered() -> None:
    records = run_records(8)
    middle = eval_record(2, 1004.0, 0.5)
    records.insert(1, replace(middle, values={**middle.values, "version_max": 6}))
    _, axes = figures(records)["learning_by_step.png"].axes
    bars = [tuple(x for x, _ in bar) for bar in axes.collections[0].get_segments()]
    assert bars[1] == (2, 6)
    (points,) = axes.lines
    assert list(points.get_xdata())[1] == 4


def test_steps_count_from_one_and_evaluations_are_placed_at_the_steps_that_they_follow() -> None:
    steps = [step_record(n, 1000.0 + n, version=7 + n // 2) for n in range(6)]
    evals = [eval_record(version, 1010.0, 0.5) for version in (7, 8, 10)]
    plots = figures([*steps, *evals])
    reward, accuracy = plots["learning_by_step.png"].axes
    assert list(reward.lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(accuracy.lines[0].get_xdata()) == [0, 2, 6], "a version of two steps each"
    for name in ("updates.png", "time_shares.png", "learning_by_step.png"):
        assert {axes.get_xlabel() for axes in plots[name].axes} <= {"", "training step"}
    assert list(plots["updates.png"].axes[0].lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("length_s", "unit", "end"),
    [(20.0, "seconds", 20.0), (600.0, "minutes", 10.0), (36000.0, "hours", 10.0)],
)
def test_axis_of_time_has_the_unit_that_fits_the_run(
    length_s: float, unit: str, end: float
) -> None:
    steps = [step_record(n, 1000.75 + n * length_s, step_s=0.5) for n in range(2)]
    buffers = [buffer_record(1000.0 + length_s * n / 2, STATS) for n in range(3)]
    plots = figures([*steps, *buffers])
    for name in ("learning_by_time.png", "buffer.png"):
        assert plots[name].axes[-1].get_xlabel() == f"{unit} since training began"
    (line, _) = plots["learning_by_time.png"].axes[0].lines
    assert list(line.get_xdata())[-1] == pytest.approx(end, rel=0.05)


def test_values_that_hardly_change_have_whole_numbers_at_their_ticks() -> None:
    steps = [step_record(n, 1000.0 + n, entropy=6.894 + 1e-5 * n, loss=2e-6) for n in range(9)]
    figure = figures(steps)["updates.png"]
    figure.draw_without_rendering()
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    for title, value in (("entropy, nats per token", 6.894), ("loss", 2e-6)):
        axes = by_title[title]
        assert axes.yaxis.get_offset_text().get_text() == ""
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert len(set(labels)) == len(labels) and all(float(label) > 0 for label in labels)
        low, high = axes.get_ylim()
        assert low < value < high and high - low > 0.01 * value
    assert by_title["tokens per answer, mean"].get_ylim()[0] > 0


def test_reward_of_any_size_leaves_accuracy_its_own_axis() -> None:
    records = [step_record(n, 1000.0 + n, reward=40.0 * n - 100) for n in range(5)]
    plots = figures([*records, eval_record(0, 1000.0, 0.25)])
    for name in ("learning_by_step.png", "learning_by_time.png"):
        reward, accuracy = plots[name].axes
        assert reward.get_ylim()[0] < -90 and accuracy.get_ylim() == (0, 1.12)
    (only,) = figures(records)["learning_by_step.png"].axes
    assert only.get_title(loc="left") == "reward of the batch (sampled), mean"
