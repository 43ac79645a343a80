"""`leash completion`, by a real bash, and by a real zsh where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from controller.completion import SHELLS, completion
from controller.main import _parser, main


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("completion") / "leash.bash"
    script.write_text(completion(_parser(), "bash"))
    return script


def completed(script: Path, folder: Path, *words: str) -> list[str]:
    """Returns what bash offers for the last of `words`."""
    asking = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_leash 2>/dev/null'
    )
    ask = ["bash", "-c", f'{asking}; printf "%s\\n" "${{COMPREPLY[@]}}"', "-", str(script)]
    told = subprocess.run([*ask, "leash", *words], cwd=folder, capture_output=True, text=True)
    return sorted(told.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], ["stacks", "status", "stop"]),
        (["tune", "buffer.max_st"], ["buffer.max_staleness="]),
        (["tune", "--run", "ni"], ["night", "night-2"]),
        (["tune", "--run", "night", "rollout.num_en"], ["rollout.num_engines="]),
        (["compare", "night", "night-"], ["night-2"]),
        (["completion", ""], ["bash", "zsh"]),
        (["launch", "--exp"], ["--experiment"]),
        (["buffer-load", "gro"], ["groups.dump"]),
        (["tune", "no.such"], []),
    ],
)
def test_bash_completes_commands_options_names_and_files(
    bash: Path, tmp_path: Path, words: list[str], offered: list[str]
) -> None:
    for name in ("night", "night-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    (tmp_path / "runs" / "nights").mkdir()  # none
    (tmp_path / "groups.dump").touch()
    assert completed(bash, tmp_path, *words) == offered


def test_folder_without_runs_completes_to_none(bash: Path, tmp_path: Path) -> None:
    assert completed(bash, tmp_path, "status", "--run", "") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_reads_what_the_command_prints(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on PATH")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "buffer.max_staleness=" in script
    env = {**os.environ, "LC_ALL": "C"}  # a locale that is missing makes bash warn
    told = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, env=env)
    assert (told.returncode, told.stderr) == (0, "")
