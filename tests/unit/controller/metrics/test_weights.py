"""The way of the weights folded from records, by hand, and the words made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.metrics.weights import WeightsView, behind_words, engines_behind, weights_result
from tests.support.controller.records import (
    commit_record,
    event_record,
    publish_record,
    skipped_record,
    weights_records,
)


def test_view_keeps_the_recent_times() -> None:
    view = WeightsView()
    for version in range(30):
        for record in weights_records(version, 100.0 + version):
            view.apply(record)
    view.apply(skipped_record(30, 140.0))
    assert len(view.convergence_s) == 20
    assert view.pace(0.5, 29, {"e": 29}).convergence_s == pytest.approx(0.9)
    assert view.pace(0.5, 29, {"e": 29}).is_too_slow
    assert not view.pace(2.0, 29, {"e": 29}).is_too_slow
    assert not view.pace(None, 29, {"e": 29}).is_too_slow


def test_one_version_behind_is_on_its_way_and_two_are_late() -> None:
    served = {"engine-2": 10, "engine-0": 9, "engine-1": 7, "engine-3": 8}
    assert engines_behind(10, served) == {"engine-1": 3, "engine-3": 2}
    assert engines_behind(10, served, publish_every=2) == {"engine-1": 3}
    assert behind_words({"engine-1": 3}) == "engine-1 is 3 versions behind"
    words = behind_words(engines_behind(10, served))
    assert words == "engine-1 (and 1 more) is 3 versions behind"


def test_lost_engine_stays_lost_until_it_commits_again() -> None:
    view = WeightsView()
    view.apply(event_record("engine_lost", "engine-1"))
    view.apply(event_record("joined", "receiver-0"))
    assert view.lost_engines == {"engine-1"}
    view.apply(commit_record("engine-0", 3, 10.0))
    assert view.lost_engines == {"engine-1"}
    view.apply(commit_record("engine-1", 3, 10.0))
    assert view.lost_engines == set()


def test_result_is_the_sum_of_its_records_by_hand() -> None:
    records = [
        *weights_records(0, 100.0),
        skipped_record(1, 101.0),
        *weights_records(2, 102.0, mode="delta"),
        commit_record("engine-0", 3, 110.0, pause_s=0.5),
        event_record("epoch", "trainer"),
        event_record("excluded", "receiver-0"),
        event_record("excluded", "receiver-0"),
    ]
    result = weights_result(records)
    assert (result.publishes_delta, result.versions_skipped) == (1, 1)
    assert result.snapshot_s == {"p50": 0.05, "max": 0.15}
    assert result.convergence_s == {"p50": 0.9, "max": 0.9}
    assert result.engine_pause_s == {"p50": pytest.approx(0.1), "max": 0.5}
    assert (result.publish_bytes, result.weights_wire_bytes) == (2_500_000, 2_750_000)
    assert result.delta_density == 0.05
    assert result.weights_events == {"epoch": 1, "excluded": 2}


def test_what_was_not_measured_is_none() -> None:
    result = weights_result([])
    assert result.publish_bytes is result.delta_density is result.convergence_s["p50"] is None
    assert result.weights_wire_bytes == result.publishes_delta == 0
    record = publish_record(4, 100.0)
    values = {k: v for k, v in record.values.items() if not k.startswith("converge")}
    late = weights_result([replace(record, values=values)])
    assert (late.convergence_s["max"], late.weights_wire_bytes) == (None, 2_500_000)
