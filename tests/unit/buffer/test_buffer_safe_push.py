"""A pushed group survives a server that lost the end of its log."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.redis.server import EmbeddedServer
from buffer.replay_buffer import ReplayBuffer
from buffer.results import PushResult
from configs.schema import BufferConfig
from tests.support.invariants import find_violations


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start(
        tmp_path / "redis", BufferConfig(), "127.0.0.1", tmp_path / "log"
    )
    yield started
    started.stop(timeout_s=5)


def _lose_all_since(server: EmbeddedServer, log: Path, saved: Path) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)
    shutil.rmtree(log)
    shutil.copytree(saved, log)
    server.restart()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
async def test_what_a_crash_took_from_the_server_is_pushed_again(
    server: EmbeddedServer, tmp_path: Path, make_group: Any, shards: int
) -> None:
    settings = BufferConfig(shards=shards, capacity_groups=8)
    buffer = await ReplayBuffer.connect(server.url, "run", settings)
    await buffer.open(settings, 2)
    await buffer.push(make_group("on-disk"))
    assert await buffer.flush(10)
    log = next((tmp_path / "redis").glob("appendonly*"))
    shutil.copytree(log, tmp_path / "saved")
    for name in "abc":
        assert await buffer.push(make_group(name)) is PushResult.stored
    await asyncio.to_thread(_lose_all_since, server, log, tmp_path / "saved")
    assert await buffer.flush(20)
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready) == (4, 4) and stats.is_conserved
    lease = await buffer.lease(step=0, version=0, num_groups=4, share=0, num_shares=1, timeout_s=0)
    assert len(lease.groups) == 4
    assert await find_violations(buffer) == []
    await buffer.close()
