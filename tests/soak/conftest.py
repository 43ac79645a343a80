"""Servers to be killed, a trainer that publishes weights, and a folder in memory."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.soak.crash.mortal_server import MortalServer
from tests.soak.crash.size import size
from tests.soak.weights.play import Play, play
from tests.soak.weights.scene import Scene


@pytest.fixture
def mortal_server(tmpfs_path: Path) -> Iterator[MortalServer]:
    """A server for this test alone, to be killed.

    Its log lies in memory: while a disk is slow to fsync, a server with `appendfsync everysec`
    answers before it has written, so that SIGKILL would lose what it answered.
    """
    server = MortalServer(Path(tempfile.mkdtemp(dir=tmpfs_path)))
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def the_play(
    request: pytest.FixtureRequest,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    tmpfs_path: Path,
) -> AsyncIterator[Play]:
    """Every test leaves it whole: all receivers show the newest version of a trainer that lives.

    COMMIT_S of the tests' file, if there is one, is its weight_sync.commit_timeout_s.
    """
    limit_s = getattr(request.module, "COMMIT_S", 20.0)
    folder = tmp_path_factory.mktemp("play")
    scene = Scene(url=redis_url, folder=folder, commit_timeout_s=limit_s)
    async with play(scene, tmpfs_path, size("SEED", random.randrange(1 << 30))) as each:
        yield each


@pytest.fixture(scope="module")
def tmpfs_path() -> Iterator[Path]:
    """A folder for the tests of a file, in memory if possible."""
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="leash-soak-", dir=shared if shared.is_dir() else None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
