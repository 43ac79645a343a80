"""Runs and commands on them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from buffer.connect import Buffer
from buffer.run_state import RunState
from configs.load import load_config, to_yaml
from configs.schema import Config
from controller.buffer_access import BufferAddress, opened, opened_state
from controller.main import main
from controller.run_dir import RunDir
from tests.support.controller.records import record_all, step_record, write_checkpoint


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Commands make the files of a run private; those of later tests must not be."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _ray_variables() -> Iterator[None]:
    """Commands on a cluster set some for their process; a later test may start a Ray of its own."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith("RAY_"):
            del os.environ[name]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder that holds the runs of a test."""
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def quickstart_settings() -> str:
    """The config.yaml of a quickstart, composed once for all tests."""
    return to_yaml(load_config([]))


@pytest.fixture
def run_dir(runs: Path, run_name: str, quickstart_settings: str) -> RunDir:
    """A run of this very process that has recorded nothing yet and has no Redis."""
    run_dir = RunDir.create(str(runs), run_name, "quickstart")
    run_dir._write("config.yaml", quickstart_settings)
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


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Settings of a run of eight steps."""
    return load_config([f"run.dir={tmp_path}", "trainer.num_steps=8"])


@pytest.fixture
def ended_run(tmp_path: Path, config: Config) -> RunDir:
    """A run that ended after its sixth step."""
    run_dir = RunDir.create(str(tmp_path), "a", "quickstart")
    run_dir.write_config(config)
    write_checkpoint(run_dir, step=6, version=9)
    record_all(run_dir, [step_record(step, 1000.0 + step, 0.0) for step in range(7)])
    run_dir.end("stopped")
    return run_dir


@pytest_asyncio.fixture
async def open_run(
    redis_url: str, run_name: str, config: Config
) -> AsyncIterator[tuple[BufferAddress, Buffer, RunState]]:
    """The address, buffer and further state of a run in Redis."""
    address = BufferAddress(url=redis_url, run=run_name, settings=config.buffer)
    async with opened(address) as buffer, opened_state(address) as state:
        await buffer.open(config.buffer, config.trainer.groups_per_step)
        yield address, buffer, state
