"""The data of the page's charts: as few points as a screen shows, and the same picture."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.metrics.history import Record
from controller.page.curves import TIME_PARTS, curves, depth, find_metrics, thinned, time_parts
from tests.support.controller.records import (
    buffer_record,
    commit_record,
    eval_record,
    run_records,
    step_record,
)


@given(st.lists(st.floats(-9, 9) | st.just(math.nan), min_size=1, max_size=300), st.integers(4, 40))
def test_thinned_values_keep_both_ends_and_the_extremes(values: list[float], most: int) -> None:
    every = np.array(values)
    kept = thinned(every, most)
    assert len(kept) <= max(most, 0) or len(kept) == len(values) <= most
    assert kept[0] == 0 and kept[-1] == len(values) - 1 and (np.diff(kept) > 0).all()
    if not np.isnan(every).all():
        assert np.nanmin(every[kept]) == np.nanmin(every)
        assert np.nanmax(every[kept]) == np.nanmax(every)


def test_curve_by_step_of_another_kind_is_at_the_steps_made_by_then() -> None:
    steps = [step_record(step, 100.0 + 10 * step) for step in range(3)]
    records = [*steps[:1], eval_record(1, 105.0, 0.5), *steps[1:], eval_record(3, 121.0, 0.75)]
    (line,) = curves(records, "eval", "accuracy", by_time=False)
    assert (line.x, line.y) == ([1.0, 3.0], [0.5, 0.75])
    (line,) = curves(records, "eval", "accuracy", by_time=True)
    assert line.x == [5.0, 21.0]
    (line,) = curves(records, "step", "reward_mean", by_time=False)
    assert line.x == [1.0, 2.0, 3.0]


def test_last_part_of_a_run_keeps_its_places_on_the_axes() -> None:
    steps = [step_record(step, 100.0 + 10 * step) for step in range(9)]
    records = [*steps, eval_record(9, 181.0, 0.75), *(buffer_record(100.0 + t) for t in range(81))]
    (line,) = curves(records, "step", "reward_mean", 25.0, by_time=False)
    assert line.x == [7.0, 8.0, 9.0]
    (line,) = curves(records, "step", "reward_mean", 25.0, by_time=True)
    assert line.x == [60.0, 70.0, 80.0]
    (line,) = curves(records, "eval", "accuracy", 25.0, by_time=False)
    assert line.x == [9.0]
    groups, time = depth(records, 25.0), time_parts(records, 25.0)
    assert groups is not None and time is not None
    assert groups.layers[0].x == [*range(56, 81)] and time.layers[0].x == [7.0, 8.0, 9.0]


def test_curve_of_a_metric_of_engines_is_a_line_for_each() -> None:
    records = [commit_record(f"engine-{n % 2}", n, 10.0 * n, 0.1 * (1 + n)) for n in range(4)]
    first, second = curves(records, "commit", "pause_s", by_time=True)
    assert (first.label, second.label) == ("engine-0", "engine-1")
    assert first.y == [0.1, 0.1 * 3] and second.y == [0.2, 0.4]
    assert curves(records, "commit", "no_such_thing", by_time=True) == []


def test_evaluations_that_held_several_engines_are_one_curve() -> None:
    values = [{**eval_record(n, 10.0 * n, 0.5).values, "engine": f"engine-{n}"} for n in (1, 2)]
    records = [Record(t=10.0 * n, kind="eval", values=one) for n, one in enumerate(values)]
    (line,) = curves(records, "eval", "accuracy", by_time=True)
    assert (line.label, line.x) == ("", [0.0, 10.0])


def test_depth_is_layered_by_staleness_and_keeps_the_peak() -> None:
    samples = [buffer_record(float(t)) for t in range(1000)]
    high = {**samples[500].values, "ready": 99, "ready_by_staleness": json.dumps({0: 90, 12: 9})}
    samples[500] = Record(t=500.0, kind="buffer", values=high)
    area = depth(samples)
    assert area is not None and len(area.limit) <= 400
    by_label = {layer.label: layer for layer in area.layers}
    assert max(by_label["ready, staleness 0"].y) == 90
    assert max(by_label["ready, staleness 8 or more"].y) == 9
    assert by_label["ready, staleness 1"].y[0] == 15
    assert by_label["being trained"].y[0] == 16
    assert depth([]) is None


def test_depth_of_an_older_run_has_one_layer_of_ready_groups() -> None:
    sample = buffer_record(1.0)
    values = {name: v for name, v in sample.values.items() if name != "ready_by_staleness"}
    area = depth([Record(t=1.0, kind="buffer", values=values)])
    assert area is not None
    assert [(layer.label, list(layer.y)) for layer in area.layers][1] == ("ready", [32])


def test_time_parts_add_up_to_the_time_of_the_steps() -> None:
    area = time_parts([step_record(step, float(step), lease_wait_s=step) for step in range(1000)])
    assert area is not None and len(area.layers) == len(TIME_PARTS) == 6
    waiting = area.layers[0]
    assert len(waiting.y) == 400 and abs(sum(waiting.y) / 400 - 499.5) < 1


def test_metrics_are_the_numbers_of_the_records() -> None:
    found = set(find_metrics(run_records(3)))
    assert {("step", "loss"), ("eval", "accuracy"), ("commit", "pause_s")} <= found
    assert ("publish", "mode") not in found and ("step", "staleness_counts") not in found
