"""Makes the parts in `crash/` importable, here and in the processes that the tests start."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
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
