"""A group that a server lost at the end of its log is running again, so its prompt runs again."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from buffer.connect import Buffer, connect_buffer
from buffer.redis.connection import connect
from buffer.redis.server import EmbeddedServer
from buffer.results import PushResult
from buffer.types import PromptRef
from configs.schema import BufferConfig
from tests.support.buffer.blocked import until_written
from tests.support.buffer.groups import make_group, next_retry
from tests.support.invariants import find_violations

HOST = "127.0.0.1"
PROMPT = PromptRef(task="sums", index=7)


def _start(folder: Path, **extra: str) -> EmbeddedServer:
    lines = {name.replace("_", "-"): value for name, value in extra.items()}
    return EmbeddedServer.start(folder / "redis", BufferConfig(), HOST, folder / "log", extra=lines)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    started = _start(tmp_path)
    yield started
    started.stop(timeout_s=60)


@asynccontextmanager
async def _opened(server: EmbeddedServer, **settings: Any) -> AsyncIterator[Buffer]:
    config = BufferConfig(**settings)
    buffer = await connect_buffer(server.url, "run", config)
    await buffer.open(config, 4)
    try:
        yield buffer
    finally:
        await buffer.close()


def _kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(60) == -signal.SIGKILL


def _kill_and_lose_all_since(server: EmbeddedServer, log: Path, saved: Path) -> None:
    _kill(server)
    shutil.rmtree(log)
    shutil.copytree(saved, log)
    server.restart()


async def _begun(buffer: Buffer, name: str) -> str:
    group_id, prompt, _ = await buffer.admit(name, 60)
    prompt = prompt or await next_retry(buffer) or PROMPT  # another shard may have it
    assert await buffer.begin(group_id, prompt, 0, 1)
    return group_id


@pytest.mark.parametrize(("shards", "ends"), [(1, "expires"), (2, "reclaimed")])
async def test_prompt_of_a_push_lost_by_the_server_runs_again_without_a_penalty(
    server: EmbeddedServer, tmp_path: Path, shards: int, ends: str
) -> None:
    async with _opened(server, shards=shards, lease_timeout_s=0.2) as buffer:
        for life in range(3):  # two deaths of workers would have put the prompt aside
            group_id = await _begun(buffer, f"0-{life}-a")
            await buffer.push(make_group(f"kept-{life}"))
            assert await buffer.flush(60)
            log, saved = next((tmp_path / "redis").glob("appendonly*")), tmp_path / f"saved-{life}"
            shutil.copytree(log, saved)
            assert await buffer.push(make_group(group_id)) is PushResult.stored
            await asyncio.to_thread(_kill_and_lose_all_since, server, log, saved)
            assert not await buffer.flush(60)  # the server may have lost some, and did
            stats = await buffer.stats()
            assert (stats.running, stats.ready) == (1, life + 1) and stats.is_conserved
            if ends == "reclaimed":
                assert await buffer.reclaim(0) == 1
            else:
                num_ended = await buffer.sweep()
                await asyncio.sleep(0.25)
                assert num_ended + await buffer.sweep() == 1
            assert await buffer.push(make_group(group_id)) is PushResult.duplicate
            stats = await buffer.stats()
            assert (stats.retries_waiting, stats.prompts_quarantined) == (1, 0)
        assert await next_retry(buffer) == PROMPT
        assert await find_violations(buffer) == []


async def test_worker_death_after_a_server_restart_counts_against_the_prompt(
    server: EmbeddedServer,
) -> None:
    async with _opened(server) as buffer:
        group_id = await _begun(buffer, "0-0-a")
        await asyncio.to_thread(until_written, server.url)
        await asyncio.to_thread(_kill, server)
        await asyncio.to_thread(server.restart)
        await buffer.sweep()  # sees the restart
        await asyncio.sleep(0.05)
        assert await buffer.renew_credits([group_id]) == 1
        assert await buffer.reclaim(0) == 1
        prompt = await next_retry(buffer)
        assert prompt is not None and prompt.reruns == 1


async def test_killed_server_that_kept_its_log_lost_no_push(server: EmbeddedServer) -> None:
    async with _opened(server) as buffer:
        assert await buffer.flush(0)  # nothing was pushed
        group_id = await _begun(buffer, "0-0-a")
        await asyncio.sleep(1.2)
        await buffer.push(make_group(group_id))
        pushes = [buffer.push(make_group(f"g{number}")) for number in range(50)]
        assert await asyncio.gather(*pushes) == [PushResult.stored] * 50
        await asyncio.to_thread(until_written, server.url)
        await asyncio.to_thread(_kill, server)
        await asyncio.to_thread(server.restart)
        assert not await buffer.flush(60)  # another server: it cannot say so
        stats = await buffer.stats()
        assert (stats.ready, stats.running) == (51, 0)
        assert await buffer.flush(60)


async def test_lease_is_renewed_again_when_the_server_has_memory_again(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        _opened(server, lease_timeout_s=0.15, outage_timeout_s=0.2) as buffer,
        asyncio.timeout(60),
        Redis.from_url(server.url) as admin,
    ):
        await buffer.push(make_group("g"))
        lease = await buffer.lease(
            step=1, version=0, num_groups=1, share=0, num_shares=1, timeout_s=60
        )
        renewing = asyncio.create_task(buffer.keep_renewed(lease))
        await admin.config_set("maxmemory", 1)
        while caplog.text.count("the lease of step 1 is not renewed: Redis at") < 2:
            assert not renewing.done()
            await asyncio.sleep(0.01)
        assert "has no memory left" in caplog.text
        await admin.config_set("maxmemory", 0)
        before = await admin.zscore(buffer.keys("leased"), "g")
        while await admin.zscore(buffer.keys("leased"), "g") == before:
            await asyncio.sleep(0.01)
        renewing.cancel()


async def test_flush_waits_as_long_as_it_may_for_the_disk(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.redis.durability._SETTLE_S", 60.0)
    async with _opened(server) as buffer:
        await buffer.push(make_group("a"))
        buffer._durability._can_wait_aof = False  # type: ignore[union-attr]  # as with Redis 7.0
        assert not await buffer.flush(0.2)
        monkeypatch.setattr("buffer.redis.durability._SETTLE_S", 0.5)
        assert await buffer.flush(60)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert not await buffer.flush(0.2)
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_close_ends_a_flush(server: EmbeddedServer) -> None:
    async with _opened(server) as buffer:
        await buffer.push(make_group("a"))
        os.kill(server.pid, signal.SIGSTOP)
        flushing = asyncio.create_task(buffer.flush(300))
        await asyncio.sleep(0.1)
        os.kill(server.pid, signal.SIGCONT)
        await buffer.close()
        async with asyncio.timeout(60):
            await asyncio.gather(flushing, return_exceptions=True)


async def test_server_without_a_log_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = _start(tmp_path, appendonly="no")
    caplog.set_level(logging.WARNING)
    async with _opened(server) as buffer:
        for name in "ab":
            await buffer.push(make_group(name))
            assert await buffer.flush(60)
    assert [r.message for r in caplog.records if "append-only" in r.message] == [
        "Redis has no append-only file, so a crash loses pushed groups: set appendonly yes"
    ]
    server.stop(timeout_s=60)


async def test_flush_waits_for_the_replica_where_there_is_one(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    url = urlsplit(server.url)
    redis = await connect(server.url)
    await redis.config_set("repl-diskless-sync-delay", "0")
    (tmp_path / "replica").mkdir()
    replica = _start(
        tmp_path / "replica", replicaof=f"{HOST} {url.port}", masterauth=str(url.password)
    )
    while (await redis.info("replication")).get("slave0", {}).get("state") != "online":
        await asyncio.sleep(0.05)
    async with _opened(server) as buffer:
        await buffer.push(make_group("before"))
        assert await buffer.flush(60)
        os.kill(replica.pid, signal.SIGSTOP)
        await buffer.push(make_group("meanwhile"))
        assert not await buffer.flush(0.5)
        os.kill(replica.pid, signal.SIGCONT)
        assert await buffer.flush(60)
    await redis.aclose()
    replica.stop(timeout_s=60)
