"""Makes the parts in `crash/` importable, here and in the processes that the tests start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:  # multiprocessing hands sys.path on to the processes that it starts
    sys.path.insert(0, _HERE)

from crash.mortal_server import MortalServer  # noqa: E402


@pytest.fixture
def mortal_server(tmp_path: Path) -> Iterator[MortalServer]:
    """A server for this test alone, to be killed."""
    server = MortalServer(tmp_path / "server")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tmpfs_path() -> Iterator[Path]:
    """A folder for the tests of a file, in memory if possible."""
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="leash-soak-", dir=shared if shared.is_dir() else None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def benchmark_result(tmp_path: Path) -> Callable[[str, float], dict[str, float]]:
    """Runs a short form of a script in benchmarks/, and returns the figures in its last line."""
    folder = Path(__file__).parents[2] / "benchmarks"

    def run(script: str, timeout_s: float) -> dict[str, float]:
        run = subprocess.run(
            [sys.executable, str(folder / script), "--short"],
            cwd=tmp_path,  # it does not depend on where it is started
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        last = run.stdout.splitlines()[-1]
        assert last.startswith("RESULT ")
        result: dict[str, float] = json.loads(last.removeprefix("RESULT "))
        assert all(value >= 0 for value in result.values()), result
        return result

    return run
