"""Puts this folder on the path, so that tests share `controller_samples`; a run that goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.load import load_config, to_yaml
from controller.run_dir import RunDir

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder that holds the runs of a test."""
    return tmp_path / "runs"


@pytest.fixture
def live_run(runs: Path, run_name: str, redis_url: str) -> RunDir:
    """A run of this very process, whose buffer is in the server that all tests share."""
    run_dir = RunDir.create(str(runs), run_name, "quickstart")
    (run_dir.path / "config.yaml").write_text(to_yaml(load_config([])))
    run_dir.write_redis_url(redis_url)
    return run_dir
