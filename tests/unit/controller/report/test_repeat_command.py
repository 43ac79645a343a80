"""The command of a summary repeats the run: through the shell, and through make."""

from __future__ import annotations

import re
import shlex
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from configs.load import load_config
from controller.report.result import summarize
from controller.report.summary import summary_markdown, task_label
from controller.run_dir import EXPERIMENT_FILE, RunDir
from tests.support.controller.records import buffer_record, run_records
from tests.support.repository import ROOT


def command_of(run_dir: RunDir) -> str:
    """The command in the summary."""
    records = [*run_records(), buffer_record(1022.0, tokens_generated=1.0)]
    config = load_config([])
    result = summarize(run="night", config=config, records=records, wall_s=1.0)
    found = re.search(r"^    (make .*)$", summary_markdown(run_dir.path, result, config), re.M)
    return found[1] if found else ""


def test_command_of_a_summary_gives_the_same_settings(tmp_path: Path) -> None:
    config = load_config(["algorithm=gspo", "model=pretrained", "model.path=a/b"], "gsm8k-smoke")
    run_dir = RunDir.create(str(tmp_path / "my runs"), "night", "gsm8k-smoke")
    assert command_of(run_dir) == "", "a run of an older version has no such file"
    run_dir.write_experiment(config)
    command = command_of(run_dir)
    told = subprocess.run(
        ["bash", "-c", command.replace("make ", "make --no-print-directory -n ", 1)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(told.stdout.strip().splitlines()[-1])
    assert load_config([], words[words.index("--experiment") + 1]) == config


def test_command_of_a_summary_is_short_in_the_folder_of_the_runs(tmp_path: Path) -> None:
    run_dir = RunDir.create(str(tmp_path / "runs"), "night", "quickstart")
    run_dir.write_experiment(load_config([]))
    with chdir(tmp_path):
        assert command_of(run_dir) == f"make launch EXPERIMENT=runs/night/{EXPERIMENT_FILE}"


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "reasoning_gym, spell_backward"),
        (["task.kind=custom", "task.factory=pkg.mine:make"], "custom, pkg.mine:make"),
        (["task.kind=gsm8k", "task.path=/data/mine.jsonl"], "gsm8k, mine.jsonl"),
        (["task=gsm8k"], "gsm8k, openai/gsm8k"),
        (["task=alphabet_sort"], "alphabet_sort"),
    ],
)
def test_task_label_distinguishes_tasks_of_a_kind(overrides: list[str], label: str) -> None:
    assert task_label(load_config(overrides).task) == label
