"""The metrics file: what is written is read, and what is broken is told."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from controller.metrics.history import MetricsLog, Record, read_metrics


def test_records_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append("phase", {"phase": "training"}, t=1.0)
        log.append("step", {"step": 0, "reward_mean": 0.5}, t=2.0)
        assert len(read_metrics(path)) == 2, "readable before the file is closed"
    with MetricsLog(path) as log:
        log.append("step", {"step": 1, "reward_mean": 0.6}, t=3.0)
    assert [record.t for record in read_metrics(path)] == [1.0, 2.0, 3.0]
    assert [record.number("reward_mean") for record in read_metrics(path, "step")] == [0.5, 0.6]


def test_missing_number_reads_as_nan(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        record = log.append("step", {"loss": math.nan, "norm": math.inf, "name": "x"})
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert all(math.isnan(read.number(name)) for name in ("loss", "norm", "name", "missing"))
    assert read.values == record.values == {"name": "x"}
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written["loss"] is written["norm"] is None


def test_incomplete_last_line_is_ignored_and_the_next_one_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"t": 1.0, "kind": "step", "step": 0}\n{"t": 2.0, "ki')
    assert len(read_metrics(path)) == 1
    with MetricsLog(path) as log:
        log.append("step", {"step": 1})
    assert [record.count("step") for record in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"kind": "step"}',
        '{"t": "x", "kind": "step"}',
        '{"t": 1e999, "kind": "step"}',
        '{"t": 1.0, "kind": ["step"]}',
        '{"t": 1.0, "kind": "step", "step": {"a": 1}}',
        '{"t": 1.0, "kind": "step", "step": %s}' % ("9" * 5000),
        '{"t": 1.0, "kind": "step", "step": %s}' % ("9" * 400),
        '{"t": %s, "kind": "step"}' % ("9" * 400),
        "\0" * 64,
        "\xff\xfe",
    ],
)
def test_invalid_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"t": 1.0, "kind": "step"}}\n{line}\n', encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{path}:2 is (damaged|not a metrics record)"):
        read_metrics(path)


def test_what_other_processes_report_never_makes_the_file_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        values: dict[str, int | str] = {
            "a": 10**30,
            "b": 2**63,
            "c": "half \ud83d of a pair",
            "d": 10**400,
            "e": 2**62,
        }
        written = log.append("step", {"step": 1, **values})
        log.append("half \udc00", {"half \udc00": 1})
    record, _ = read_metrics(path)
    assert record.values == written.values == {"step": 1, "c": "half ? of a pair", "e": 2**62}


def test_pipe_in_place_of_the_metrics_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("text", ["noise", '{"a": 1}', "[" * 100_000])
def test_damaged_histogram_is_named(text: str) -> None:
    record = Record(t=0.0, kind="step", values={"staleness_counts": text})
    with pytest.raises(ValueError, match="staleness_counts of a record of kind 'step' is damaged"):
        record.histogram("staleness_counts")


def test_histogram_is_kept_as_text() -> None:
    record = Record(t=0.0, kind="step", values={"staleness_counts": '{"2": 1, "0": 3}'})
    assert record.histogram("staleness_counts") == {0: 3, 2: 1}
    assert record.histogram("missing") == {}


def test_value_cannot_take_the_place_of_the_records_own_kind(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(AssertionError):
        log.append("publish", {"kind": "full"})
