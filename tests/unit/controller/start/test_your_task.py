"""The page docs/your-task.md, as a reader types it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from controller.start.preflight import check_plan
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "your-task.md").read_text()
COMMANDS = re.findall(r"^    ((?:make|\.venv/bin/python) .*)$", PAGE, re.MULTILINE)
PLANNED = ("dry-run", "launch", "try")


def write_files(folder: Path) -> set[str]:
    """The files whose text stands on the page."""
    lines = re.findall(r"`(\w+\.jsonl)`[^`\n]*:\n\n((?:    \{.*\n)+)", PAGE)
    code = re.findall(r"`(\w+\.\w+)`:\n\n```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL)
    for name, text in [*lines, *code]:
        (folder / name).write_text(text)
    return {name for name, _ in [*lines, *code]}


def words_of(command: str) -> list[str]:
    """The words that `make` starts for it."""
    shown = subprocess.run(
        ["make", "-n", *shlex.split(command, comments=True)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in shown.stdout.splitlines() if " -m controller.main " in line]
    return shlex.split(line)[3:]


def test_commands_of_the_page_are_accepted_with_the_files_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write_files(tmp_path) == {"sums.jsonl", "chat.jsonl", "sums.py", "mine.yaml"}
    monkeypatch.chdir(tmp_path)
    verbs = []
    for command in COMMANDS:
        if command.startswith("make "):
            verb, *words = words_of(command)
            verbs.append(verb)
            if verb in PLANNED:
                overrides = [word for word in words if "=" in word]
                if "--experiment" in words:
                    config = load_config(overrides, words[words.index("--experiment") + 1])
                    assert check_plan(config) == ["the model Qwen/Qwen2.5-0.5B-Instruct"]
                else:
                    assert check_plan(load_config(overrides)) == []
        else:
            program = shlex.split(command)[1:]
            subprocess.run([sys.executable, *program], check=True, timeout=60)
    assert verbs == [*["dry-run"] * 3, *("try", "launch", "status", "show", "dry-run", "launch")]
