"""The report of a run that did not finish, from the files of its folder alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs.environment import RUN_VARIABLE
from controller.commands.stop import stop_run
from controller.metrics.history import Record, read_metrics
from controller.report.summary import draw_plots, report_end, write_summary
from controller.run_dir import RunDir
from processes.leftovers import list_path, write_list
from tests.support.controller.buffers import Command
from tests.support.controller.records import (
    STATS,
    buffer_record,
    eval_record,
    record_all,
    step_record,
    weights_records,
)


def train(run_dir: RunDir, num_steps: int, evals: dict[int, float]) -> None:
    start = run_dir.read_record().started + 10.0
    records: list[Record] = []
    for step in range(num_steps):
        t = start + step
        records += [step_record(step, t), *weights_records(step + 1, t)]
        if step in evals:
            records.append(eval_record(step, t, evals[step]))
        records.append(buffer_record(t, tokens_generated=100 * step))
    record_all(run_dir, records)


def test_report_of_a_stopped_run_has_summary_plots_and_result(run_dir: RunDir) -> None:
    train(run_dir, num_steps=8, evals={0: 0.25, 5: 0.5})
    run_dir.end("stopped")
    result = write_summary(run_dir, draw_plots(run_dir))
    assert (result.state, result.steps, result.groups_trained) == ("stopped", 8, STATS.trained)
    assert result.groups_dropped == STATS.dropped and result.is_conserved
    assert result.tokens_generated == 700
    assert result.wall_s == pytest.approx(17.0, abs=0.01), "to the last record"
    summary = (run_dir.path / "summary.md").read_text()
    assert "**Stopped** after 8 steps" in summary
    assert "from 25% to 50% (+25 points) by version 5" in summary
    assert "| held-out accuracy of version 5, the last one measured | 50% |" in summary
    written = json.loads((run_dir.path / "result.json").read_text())
    assert written["state"] == "stopped" and written["steps"] == 8
    assert {"learning_by_step.png", "timeline.png"} <= set(os.listdir(run_dir.path))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in run_dir.path.glob("*.png"))


def test_report_of_a_run_with_one_evaluation_claims_no_improvement(run_dir: RunDir) -> None:
    train(run_dir, num_steps=4, evals={0: 0.25})
    run_dir.end("stopped")
    result = write_summary(run_dir, read_metrics(run_dir.metrics))
    assert (result.eval_before, result.eval_after, result.eval_version) == (0.25, None, None)
    assert "points" not in (run_dir.path / "summary.md").read_text()


def test_report_of_a_run_that_failed_in_its_start_says_why(run_dir: RunDir) -> None:
    run_dir.end("failed", "engine-0 died (exit code -9); the last lines of it:\nloading")
    result = write_summary(run_dir, read_metrics(run_dir.metrics))
    assert (result.state, result.steps, result.groups_pushed) == ("failed", 0, 0)
    summary = (run_dir.path / "summary.md").read_text()
    assert "**Failed** after 0 steps" in summary
    assert "engine-0 died (exit code -9); the last lines of it." in summary
    assert "loading" not in summary


def test_report_of_a_run_whose_controller_was_killed_says_so(run_dir: RunDir) -> None:
    train(run_dir, num_steps=2, evals={})
    run_dir.write_record(replace(run_dir.read_record(), process_started=0.0))
    result = write_summary(run_dir, read_metrics(run_dir.metrics))
    assert result.state == "failed"
    assert result.error is not None and "`make stop RUN=" in result.error


def test_report_from_the_command_line_names_what_it_wrote(run_dir: RunDir, leash: Command) -> None:
    summary = run_dir.path / "summary.md"
    assert leash("report") == f"{run_dir.name} (running): wrote {summary}\n"
    assert "\n| Learning | |\n|---|---:|\n| held-out" in summary.read_text()
    result = json.loads((run_dir.path / "result.json").read_text())
    assert (result["state"], result["steps"]) == ("running", 0)


def test_end_of_a_launch_says_in_words_what_it_has_made(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_dir, num_steps=2, evals={})
    (run_dir.path / "final_model").mkdir()
    run_dir.end("finished", None)
    said = list[str]()
    report_end(run_dir, said.append)
    model = f"; the trained model: {run_dir.path / 'final_model'}"
    assert len(said) == 1
    assert said[0].endswith(f" The summary: {run_dir.path / 'summary.md'}{model}")
    assert capsys.readouterr().out.splitlines()[-1].startswith("RESULT {")


def test_stop_ends_and_removes_what_a_killed_controller_left(
    run_dir: RunDir, tmp_path: Path
) -> None:
    run_dir.write_redis_url("redis://:secret@127.0.0.1:1/0")
    ray, staged = tmp_path / "leash-ray-x", tmp_path / "staged"
    for folder in (ray, staged):
        folder.mkdir()
    (run_dir.path / "ray").symlink_to(ray)
    write_list(list_path(run_dir.path, "receiver-0"), [staged])
    run_dir.write_record(replace(run_dir.read_record(), process_started=0.0))
    environment = {**os.environ, RUN_VARIABLE: run_dir.run_id}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment) as left:
        stop_run(run_dir)
        left.wait(timeout=60)
    assert not ray.exists() and not staged.exists() and run_dir.temporary is None
    assert run_dir.read_redis_url() is None
    assert run_dir.read_record().state == "stopped"
    assert "**Stopped** after 0 steps" in (run_dir.path / "summary.md").read_text()
    stop_run(run_dir)  # once more finds nothing and changes nothing
    assert run_dir.read_record().state == "stopped"
