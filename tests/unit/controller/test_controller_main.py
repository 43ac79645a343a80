from __future__ import annotations

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
        (["--experiment=gsm8k-smoke", "task.path={folder}/bad.jsonl"], "/bad.jsonl, line 2"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "bad.jsonl").write_text(BAD_LINE)
    settings = [setting.replace("{folder}", str(tmp_path)) for setting in settings]
    assert main(["launch", f"run.dir={runs}", *settings]) == EXIT_BAD_INPUT
    error = capfd.readouterr().err
    assert error.startswith("leash: ") and message in error
    assert error.count("\n") == 1
    assert not runs.exists()


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
