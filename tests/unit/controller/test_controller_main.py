from __future__ import annotations

import socket
from pathlib import Path

import pytest

import controller.run  # noqa: F401  (or the process that each launch forks imports torch and Ray)
from controller.main import EXIT_BAD_INPUT, main

BAD_LINE = '{"question": "a", "answer": "#### 1"}\n{"question": 3}\n'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["bufer.max_staleness=1"], "did you mean buffer.max_staleness?"),
        (["buffer.max_staleness=two"], "expected an integer"),
        (["cluster.gpus_per_rank=1"], "need 3 GPUs, and Ray has 0"),
        (["cluster.num_gpus=999"], "cluster.num_gpus=999: this machine has "),
        (["task=gsm8k", "task.path=/nowhere.jsonl"], "there is no such file"),
        (["model=pretrained", "model.path=/nowhere/model"], "model.path='/nowhere/model'"),
        (["task.name=spell_bakward"], "did you mean spell_backward?"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    runs = tmp_path / "runs"
    assert main(["launch", f"run.dir={runs}", *settings]) == EXIT_BAD_INPUT
    error = capfd.readouterr().err
    assert error.startswith("leash: ") and message in error
    assert error.count("\n") == 1
    assert not runs.exists()


def test_port_in_use_is_refused_before_anything_that_takes_long(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = [f"run.dir={tmp_path / 'runs'}", f"run.prometheus_port={port}"]
        assert main(["launch", *settings]) == EXIT_BAD_INPUT
    printed = capfd.readouterr()
    assert printed.err.startswith(f"leash: run.prometheus_port={port}: cannot listen on")
    assert "Ray" not in printed.out and not (tmp_path / "runs").exists()


def test_bad_line_of_a_task_file_is_named_by_its_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(BAD_LINE)
    runs = f"run.dir={tmp_path / 'runs'}"
    assert main(["launch", runs, "--experiment", "gsm8k-smoke", f"task.path={file}"]) == 2
    assert f"{file}, line 2" in capfd.readouterr().err


def test_settings_may_stand_on_both_sides_of_an_option(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["trainer.num_steps=7", "--experiment", "gsm8k-smoke", "run.seed=5"]
    assert main(["dry-run", *arguments]) == 0
    output = capfd.readouterr().out
    assert "num_steps: 7" in output and "seed: 5" in output and "Processes of this run" in output


def test_unknown_option_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["launch", "--experimnt", "x"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --experimnt" in capfd.readouterr().err
