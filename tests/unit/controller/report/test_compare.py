"""`make compare`: what differs between two runs, in words, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from controller.main import EXIT_BAD_INPUT, main
from controller.metrics.history import read_metrics
from controller.report.compare import differing
from controller.report.plots import draw_over_each_other
from controller.report.summary import write_summary
from controller.run_dir import RunDir, flat
from tests.support.controller.records import record_all, run_records

PNG = b"\x89PNG\r\n"


def a_run(folder: Path, name: str, config: Config, num_steps: int) -> RunDir:
    run_dir = RunDir.create(str(folder), name, "quickstart")
    run_dir.write_config(config)
    record_all(run_dir, run_records(num_steps))
    run_dir.end("finished")
    write_summary(run_dir, read_metrics(run_dir.metrics))
    return run_dir


@pytest.fixture
def two(tmp_path: Path, config: Config) -> Path:
    other = replace(config, buffer=replace(config.buffer, max_staleness=7))
    a_run(tmp_path, "night", config, 20)
    a_run(tmp_path, "night-2", other, 12)
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    assert main(["compare", "--dir", str(folder), "--json", "night", "night-2", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_settings_and_results_that_differ_stand_side_by_side(
    two: Path, capsys: pytest.CaptureFixture[str], config: Config
) -> None:
    found = compared(capsys, two)
    assert found["settings"] == {"buffer.max_staleness": [config.buffer.max_staleness, 7]}
    assert found["results"]["steps"] == [20, 12] and "seed" not in found["results"]
    assert not [name for name in found["results"] if name.startswith(("run", "rollout."))]
    drawn = two / "compare-night-night-2.png"
    assert drawn.read_bytes().startswith(PNG)
    assert drawn.stat().st_mode & 0o077 == 0, "as private as the runs"
    picture = two / "mine.png"
    words = ["compare", "--dir", str(two), "--plot", str(picture), "night", str(two / "night-2")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "settings that differ" in printed and "buffer.max_staleness" in printed
    assert printed.splitlines()[-1] == f"curves of both: {picture}" and picture.exists()


def test_run_compared_with_itself_differs_in_nothing(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--dir", str(two), "night", "night"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no settings that differ\nno results that differ\n")


def test_run_of_an_older_version_is_compared_in_what_it_has(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = two / "night-2"
    (old / "config.yaml").write_text("buffer: {of_old: 3}\n")
    (old / "result.json").unlink()
    (old / "metrics.jsonl").unlink()
    found = compared(capsys, two)
    assert found["settings"]["buffer.of_old"] == [None, 3]
    assert found["results"]["steps"] == [20, None] and found["plot"] is not None
    (old / "config.yaml").unlink()
    assert compared(capsys, two)["settings"]["buffer.max_staleness"][1] is None
    assert main(["compare", "--dir", str(two), "night", "night-2"]) == 0
    assert "night-2 has no result.json: `make report RUN=night-2" in capsys.readouterr().out


def test_values_are_printed_as_they_are(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two / "night" / "config.yaml").write_text("task: {note: '[/b] \\x1b[31m'}\n")
    assert main(["compare", "--dir", str(two), "night", "night-2"]) == 0
    assert "[/b] " in (printed := capsys.readouterr().out) and "\x1b[31m" not in printed


def test_runs_without_a_step_have_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("night", "night-2"):
        RunDir.create(str(tmp_path), name, "quickstart")
    assert compared(capsys, tmp_path)["plot"] is None
    assert main(["compare", "--dir", str(tmp_path), "night", "night-2"]) == 0
    assert "neither has trained a step" in capsys.readouterr().out
    assert main(["compare", "--dir", str(tmp_path), "night", "nigth"]) == EXIT_BAD_INPUT
    assert "there are: night, night-2" in capsys.readouterr().err


def test_curves_of_both_are_in_one_picture() -> None:
    records = run_records(12)
    figure = draw_over_each_other([("a", records), ("b", records[:30])])
    assert figure is not None
    rewards = figure.axes[0]
    assert [text.get_text() for text in rewards.get_legend().get_texts()] == ["a", "b"]
    lines = [line for line in rewards.lines if not line.get_label().startswith("_")]
    assert [next(iter(line.get_xdata())) for line in lines] == [1.0, 1.0]
    accuracy = figure.axes[1].lines[0]
    assert list(accuracy.get_xdata()) == [0.0, 12.0], "by the steps before an evaluation"


def test_names_of_settings_are_dotted() -> None:
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": [2]})) == {"a.b": 1, "a.c": {}, "d": [2]}
    assert differing({"a": 1, "b": 2}, {"a": 1, "c": 3}) == {"b": (2, None), "c": (None, 3)}
