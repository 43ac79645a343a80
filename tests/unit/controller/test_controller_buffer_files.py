"""`make buffer-dump` and `make buffer-load` between two real buffers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest
from controller_samples import fill

from configs.load import load_config, to_yaml
from controller.main import EXIT_BAD_INPUT, main
from controller.run_dir import RunDir


def another_run(runs: Path, redis_url: str) -> RunDir:
    run_dir = RunDir.create(str(runs), f"other-{uuid4().hex[:8]}", "quickstart")
    (run_dir.path / "config.yaml").write_text(to_yaml(load_config([])))
    run_dir.write_redis_url(redis_url)
    asyncio.run(fill(redis_url, run_dir.name))
    return run_dir


def test_dump_of_one_run_is_loaded_into_another(
    live_run: RunDir, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=5, leased=2))
    other, file = another_run(live_run.path.parent, redis_url), str(tmp_path / "groups.dump")
    here = ["--dir", str(live_run.path.parent)]
    assert main(["buffer-dump", file, *here, "--run", live_run.name]) == 0
    assert "3 groups ready, 2 leased to" in capsys.readouterr().out
    assert main(["buffer-load", file, *here, "--run", other.name]) == 0
    assert f"5 groups stored, from {file} (a dump of {live_run.name})" in capsys.readouterr().out
    assert main(["buffer-load", file, *here, "--run", other.name]) == 0
    assert "5 groups duplicate" in capsys.readouterr().out
    assert main(["depth", *here, "--run", other.name]) == 0
    assert "ready 5" in capsys.readouterr().out


def test_existing_file_is_not_overwritten(
    live_run: RunDir, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "precious"
    file.write_text("x")
    arguments = ["buffer-dump", str(file), "--dir", str(live_run.path.parent)]
    assert main(arguments) == EXIT_BAD_INPUT
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "x"


@pytest.mark.parametrize("content", [b"", b"something else", b"LEASH-DUMP 1 00000000 {}\n"])
def test_file_that_is_not_a_dump_is_one_line(
    live_run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    arguments = ["buffer-load", str(file), "--dir", str(live_run.path.parent)]
    assert main(arguments) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert str(file) in error and error.count("\n") == 1


def test_missing_file_is_one_line(
    live_run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "nowhere")
    assert main(["buffer-load", file, "--dir", str(live_run.path.parent)]) != 0
    error = capsys.readouterr().err
    assert file in error and error.count("\n") == 1
