"""Servers to be killed, and a folder in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.crash.mortal_server import MortalServer


@pytest.fixture
def mortal_server(tmpfs_path: Path) -> Iterator[MortalServer]:
    """A server for this test alone, to be killed.

    Its log lies in memory: while a disk is slow to fsync, a server with `appendfsync everysec`
    answers before it has written, so that SIGKILL would lose what it answered.
    """
    server = MortalServer(Path(tempfile.mkdtemp(dir=tmpfs_path)))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tmpfs_path() -> Iterator[Path]:
    """A folder for the tests of a file, in memory if possible."""
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="leash-soak-", dir=shared if shared.is_dir() else None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
