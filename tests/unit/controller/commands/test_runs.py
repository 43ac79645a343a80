"""`make runs` on runs of every state, and on folders in which files are missing or damaged."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from controller.commands.runs import Row, lines, row_of
from controller.main import main
from controller.run_dir import RunDir
from tests.support.controller.buffers import fill
from tests.support.controller.records import record_all, run_records


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[dict[str, object]]:
    assert main(["runs", "--dir", str(folder), "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def ended(folder: Path, name: str, state: str, error: str | None = None) -> RunDir:
    run_dir = RunDir.create(str(folder), name, "quickstart")
    record_all(run_dir, run_records())
    run_dir.end(state, error)
    return run_dir


def test_folder_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--dir", str(tmp_path / "none")]) == 0
    assert (
        capsys.readouterr().out
        == f"no run below {tmp_path}/none/ yet: start one with `make launch`\n"
    )
    assert listed(capsys, tmp_path) == []


def test_newest_run_comes_first_with_its_verdict_or_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ended(tmp_path, "one", "finished")
    first.write_record(replace(first.read_record(), started=1000.0))
    ended(tmp_path, "two", "failed", "engine-0 died\nits log: ...")
    one, two = reversed(listed(capsys, tmp_path))
    assert (two["run"], two["state"], two["verdict"]) == ("two", "failed", "engine-0 died")
    assert (one["step"], one["reward"], one["accuracy"]) == (20, 0.95, 0.92)
    assert str(one["verdict"]).startswith("Well balanced")
    assert main(["runs", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("two  failed    ") and "reward 0.95  accuracy 0.92" in printed[0]
    assert printed[3].startswith("    Well balanced")


def test_run_of_an_older_version_is_listed_with_what_it_has(tmp_path: Path) -> None:
    old = ended(tmp_path, "old", "finished")
    (old.path / "config.yaml").write_text("trainer: {num_steps: 7, of_old: 3}\n")
    row = row_of(old)
    assert (row.step, row.num_steps, row.reward) == (20, 7, 0.95)
    for name in ("config.yaml", "metrics.jsonl"):
        (old.path / name).unlink()
    row = row_of(old)
    assert (row.state, row.step, row.num_steps, row.verdict) == ("finished", 0, None, "")


@pytest.mark.parametrize(
    ("file", "text", "state", "said"),
    [
        ("run.json", "{", "unreadable", "run.json is damaged"),
        ("metrics.jsonl", "what\n", "finished", "metrics.jsonl:1 is damaged"),
        ("config.yaml", "a: [", "finished", "config.yaml is damaged"),
    ],
)
def test_damaged_run_is_named_and_the_others_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, state: str, said: str
) -> None:
    ended(tmp_path, "whole", "finished")
    (ended(tmp_path, "broken", "finished").path / file).write_text(text)
    rows = {row["run"]: row for row in listed(capsys, tmp_path)}
    assert rows["broken"]["state"] == state and said in str(rows["broken"]["verdict"])
    assert rows["whole"]["step"] == 20


def test_run_whose_controller_was_killed_is_gone(run_dir: RunDir) -> None:
    run_dir.write_record(replace(run_dir.read_record(), process_started=1.0))
    row = row_of(run_dir)
    assert row.state == "gone" and "make attach" in row.verdict


def test_running_run_is_asked_for_its_verdict(live_run: RunDir, redis_url: str) -> None:
    row = row_of(live_run)
    assert row.state == "running" and "is not open in this Redis" in row.verdict
    asyncio.run(fill(redis_url, live_run.name, pushed=3))
    record_all(live_run, run_records())
    row = row_of(live_run)
    assert (row.state, row.step, row.num_steps, row.reward) == ("running", 20, 60, 0.95)
    assert row.verdict.startswith("receiver-0 does not respond: it was killed")


def test_start_that_is_no_time_is_left_out() -> None:
    assert [*lines([Row(run="a", state="finished", started=1e30)])] == ["a  finished"]


def test_lines_are_in_columns() -> None:
    rows = [Row(run="a", state="running", step=3, num_steps=9), Row(run="night", state="failed")]
    first, second = lines(rows)
    assert first.index("running") == second.index("failed")
    assert first.endswith("step 3 of 9")
