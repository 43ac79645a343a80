"""`make buffer-dump` and `make buffer-load` between two real buffers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from configs.load import load_config
from controller.main import EXIT_BAD_INPUT, EXIT_FAILED
from controller.run_dir import RunDir
from tests.support.controller.buffers import Command, fill


def another_run(runs: Path, redis_url: str) -> RunDir:
    run_dir = RunDir.create(str(runs), f"other-{uuid4().hex[:8]}", "quickstart")
    run_dir.write_config(load_config([]))
    run_dir.write_redis_url(redis_url)
    asyncio.run(fill(redis_url, run_dir.name))
    return run_dir


def test_dump_of_one_run_is_loaded_into_another(
    live_run: RunDir, redis_url: str, tmp_path: Path, leash: Command
) -> None:
    asyncio.run(fill(redis_url, live_run.name, pushed=5, leased=2))
    other, file = another_run(live_run.path.parent, redis_url), str(tmp_path / "groups.dump")
    assert "3 groups ready, 2 leased to" in leash("buffer-dump", file, "--run", live_run.name)
    stored = f"5 groups stored, from {file} (a dump of {live_run.name})"
    assert stored in leash("buffer-load", file, "--run", other.name)
    assert "5 groups duplicate" in leash("buffer-load", file, "--run", other.name)
    assert "ready 5" in leash("depth", "--run", other.name)


def test_existing_file_is_not_overwritten(live_run: RunDir, tmp_path: Path, leash: Command) -> None:
    file = tmp_path / "precious"
    file.write_text("x")
    assert "exists already" in leash("buffer-dump", str(file), exit_code=EXIT_BAD_INPUT)
    assert file.read_text() == "x"


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_missing_file_or_one_that_is_not_a_dump_is_one_line(
    live_run: RunDir, tmp_path: Path, leash: Command, content: bytes | None
) -> None:
    file = tmp_path / "other"
    if content is not None:
        file.write_bytes(content)
    exit_code = EXIT_FAILED if content is None else EXIT_BAD_INPUT
    assert str(file) in leash("buffer-load", str(file), exit_code=exit_code)
