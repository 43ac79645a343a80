"""Runs and commands on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.load import load_config, to_yaml
from controller.main import main
from controller.run_dir import RunDir


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Commands make the files of a run private; those of later tests must not be."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder that holds the runs of a test."""
    return tmp_path / "runs"


@pytest.fixture
def run_dir(runs: Path, run_name: str) -> RunDir:
    """A run of this very process that has recorded nothing yet and has no Redis."""
    run_dir = RunDir.create(str(runs), run_name, "quickstart")
    (run_dir.path / "config.yaml").write_text(to_yaml(load_config([])))
    return run_dir


@pytest.fixture
def live_run(run_dir: RunDir, redis_url: str) -> RunDir:
    """The same with its buffer in the server that all tests share."""
    run_dir.write_redis_url(redis_url)
    return run_dir


@pytest.fixture
def leash(runs: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command on a run of this test: `leash("depth", "--watch")` returns what it prints.

    With `exit_code` it must fail, and returns the one line of its error.
    """

    def run(*arguments: str, exit_code: int = 0) -> str:
        assert main([*arguments, "--dir", str(runs)]) == exit_code
        printed = capsys.readouterr()
        if exit_code:
            assert printed.err.startswith("leash: ") and printed.err.count("\n") == 1
        return printed.err if exit_code else printed.out

    return run
