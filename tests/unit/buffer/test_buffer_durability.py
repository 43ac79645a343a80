"""What was pushed survives the server that acknowledged it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from buffer.durability import PushKeeper
from buffer.redis.connection import connect
from buffer.redis.server import EmbeddedServer, ServerStartError
from buffer.redis.wakeups import BufferClosedError
from configs.choices import AppendFsync
from configs.schema import BufferConfig

HOST = "127.0.0.1"
MARKER = "{test}:durable"


def _start(
    folder: Path, appendfsync: AppendFsync = AppendFsync.everysec, **extra: str
) -> EmbeddedServer:
    config = BufferConfig(appendfsync=appendfsync)
    lines = {name.replace("_", "-"): value for name, value in extra.items()}
    return EmbeddedServer.start(folder / "redis", config, HOST, folder / "log", extra=lines)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    started = _start(tmp_path)
    yield started
    started.stop(timeout_s=5)


@pytest.fixture
async def redis(server: EmbeddedServer) -> AsyncIterator[Redis]:
    client = await connect(server.url)
    yield client
    await client.aclose()


class Producer:
    """Pushes keys, and keeps them as the buffer keeps groups."""

    def __init__(self, redis: Redis, max_bytes: int = 1 << 20) -> None:
        self.redis = redis
        self.keeper = PushKeeper(redis, MARKER, max_bytes=max_bytes)
        self.pushed: list[str] = []
        """Each push that reached the server, in order."""

    async def push(self, name: str, num_bytes: int = 10, timeout_s: float = 5) -> None:
        ticket = await self.keeper.room(num_bytes, timeout_s)
        await self._send(name)
        self.keeper.keep(ticket, num_bytes, lambda: self._send(name))

    async def _send(self, name: str) -> None:
        await self.redis.set(f"{{test}}:{name}", "x", nx=True)
        self.pushed.append(name)

    async def stored(self) -> set[str]:
        names = await self.redis.keys("*")
        return {name.decode().removeprefix("{test}:") for name in names} - {"durable"}


def _kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(timeout_s=5) == -signal.SIGKILL


async def test_what_is_on_disk_is_forgotten_and_then_nothing_is_sent(redis: Redis) -> None:
    producer = Producer(redis)
    for number in range(10):
        await producer.push(f"group-{number}")
    assert producer.keeper.num_kept == 10
    assert await producer.keeper.flush(timeout_s=5)
    assert producer.keeper.num_kept == 0
    before = await redis.info("stats")
    await asyncio.sleep(0.6)
    after = await redis.info("stats")
    assert after["total_commands_processed"] - before["total_commands_processed"] == 1  # the INFO
    assert producer.pushed == [f"group-{number}" for number in range(10)]
    await producer.keeper.close()


async def test_a_server_that_comes_back_empty_gets_all_of_the_window_again(
    server: EmbeddedServer, redis: Redis, tmp_path: Path
) -> None:
    producer = Producer(redis)
    await producer.push("long-ago")
    assert await producer.keeper.flush(timeout_s=5)
    names = [f"group-{number}" for number in range(50)]
    for name in names:
        await producer.push(name)
    _kill(server)
    shutil.rmtree(tmp_path / "redis" / "appendonlydir")
    server.restart()
    assert await producer.keeper.flush(timeout_s=10)
    assert await producer.stored() == set(names)
    assert producer.pushed == ["long-ago", *names, *names]
    assert producer.keeper.num_repushed == 50
    await producer.keeper.close()


async def test_a_server_that_comes_back_with_its_log_gets_them_twice_and_keeps_one(
    tmp_path: Path,
) -> None:
    server = _start(tmp_path, appendfsync=AppendFsync.always)
    redis = await connect(server.url)
    producer = Producer(redis)
    for number in range(5):
        await producer.push(f"group-{number}")
    _kill(server)
    server.restart()
    assert await producer.keeper.flush(timeout_s=10)
    assert producer.keeper.num_repushed == 5
    assert await producer.stored() == {f"group-{number}" for number in range(5)}
    await producer.keeper.close()
    await redis.aclose()
    server.stop(timeout_s=5)


async def test_pushes_go_on_while_the_server_dies_again_and_again(
    server: EmbeddedServer, redis: Redis, tmp_path: Path
) -> None:
    producers = [Producer(redis) for _ in range(4)]

    async def produce(number: int) -> None:
        for index in range(150):
            await producers[number].push(f"group-{number}-{index}")
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(produce(number)) for number in range(4)]
    for _ in range(3):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(_kill, server)
        await asyncio.to_thread(server.restart)  # the log ends where the last write was: truncated
    await asyncio.gather(*tasks)
    for producer in producers:
        assert await producer.keeper.flush(timeout_s=10)
        await producer.keeper.close()
    wanted = {f"group-{number}-{index}" for number in range(4) for index in range(150)}
    assert await producers[0].stored() == wanted


async def test_a_push_waits_until_there_is_room_to_keep_it(redis: Redis) -> None:
    producer = Producer(redis, max_bytes=100)
    await producer.push("first", num_bytes=60)
    await producer.push("second", num_bytes=60)  # waited for the first one's fsync
    with pytest.raises(TimeoutError, match=r"1 pushed groups \(60 bytes\) are not on the disk"):
        await producer.push("third", num_bytes=60, timeout_s=0.01)
    await producer.push("larger than all room", num_bytes=1000)
    assert await producer.keeper.flush(timeout_s=5)
    await producer.keeper.close()


async def test_flush_says_when_the_disk_is_too_slow_and_close_ends_the_task(redis: Redis) -> None:
    producer = Producer(redis)
    await producer.push("group")
    assert not await producer.keeper.flush(timeout_s=0.01)
    await producer.keeper.close()
    assert producer.keeper.num_kept == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "push-keeper"]


async def test_without_a_log_nothing_is_kept_and_one_warning_says_so(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await redis.config_set("appendonly", "no")
    producer = Producer(redis)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            await producer.push(f"group-{number}")
            assert await producer.keeper.flush(timeout_s=5)
    assert [record.message for record in caplog.records] == [
        "Redis keeps no append-only file: a crash of it loses pushed groups; set appendonly yes"
    ]
    await producer.keeper.close()


async def test_without_waitaof_as_in_redis_7_0_a_push_is_kept_until_fsync_must_have_been(
    tmp_path: Path,
) -> None:
    try:
        server = _start(tmp_path, rename_command='WAITAOF ""')
    except ServerStartError:  # this server is such a one: it has no command of that name
        server = _start(tmp_path)
    redis = await connect(server.url)
    producer = Producer(redis)
    await producer.push("first")
    assert not await producer.keeper.flush(timeout_s=1.5)
    _kill(server)
    shutil.rmtree(tmp_path / "redis" / "appendonlydir")
    server.restart()
    assert await producer.keeper.flush(timeout_s=10)
    assert (producer.pushed, producer.keeper.num_repushed) == (["first", "first"], 1)
    await producer.keeper.close()
    await redis.aclose()
    server.stop(timeout_s=5)


async def test_where_there_is_a_replica_a_push_is_kept_until_it_has_it(
    server: EmbeddedServer, redis: Redis, tmp_path: Path
) -> None:
    port, password = urlsplit(server.url).port, urlsplit(server.url).password
    await redis.config_set("repl-diskless-sync-delay", "0")
    (tmp_path / "replica").mkdir()
    replica = _start(tmp_path / "replica", replicaof=f"{HOST} {port}", masterauth=str(password))
    while (await redis.info("replication")).get("slave0", {}).get("state") != "online":
        await asyncio.sleep(0.05)
    producer = Producer(redis)
    await producer.push("before")
    assert await producer.keeper.flush(timeout_s=5)
    os.kill(replica.pid, signal.SIGSTOP)
    await producer.push("meanwhile")
    assert not await producer.keeper.flush(timeout_s=2.5)
    os.kill(replica.pid, signal.SIGCONT)
    assert await producer.keeper.flush(timeout_s=10)
    await producer.keeper.close()
    replica.stop(timeout_s=5)


async def test_an_error_of_a_repeated_push_is_told_to_the_next_one(
    server: EmbeddedServer, redis: Redis
) -> None:
    keeper = PushKeeper(redis, MARKER)

    async def again() -> None:
        raise RuntimeError("the run is gone")

    keeper.keep(await keeper.room(1, timeout_s=1), 1, again)
    _kill(server)
    server.restart()
    with pytest.raises(RuntimeError, match="the run is gone"):
        await keeper.flush(timeout_s=10)
    await keeper.close()


async def test_close_ends_the_waits_for_room_and_for_the_disk(redis: Redis) -> None:
    await redis.config_set("appendfsync", "no")  # what is pushed stays kept
    producer = Producer(redis, max_bytes=100)
    await producer.push("group", num_bytes=100)
    waits = [
        asyncio.create_task(producer.push("no room", num_bytes=100, timeout_s=30)),
        asyncio.create_task(producer.keeper.flush(timeout_s=30)),
    ]
    await asyncio.sleep(0.05)
    await producer.keeper.close()
    async with asyncio.timeout(2):
        errors = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(error) for error in errors] == [BufferClosedError] * 2
    with pytest.raises(BufferClosedError):
        await producer.push("after")
    with pytest.raises(BufferClosedError):
        await producer.keeper.flush(timeout_s=0)
    assert (producer.pushed, producer.keeper.num_kept) == (["group"], 0)


class Group:
    """A kept push whose repetition fails as long as there is an error, and waits for `may_go`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_calls = 0
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def again(self) -> None:
        self.num_calls += 1
        await self.may_go.wait()
        if self.error is not None:
            raise self.error


async def _keep(keeper: PushKeeper, group: Group) -> None:
    keeper.keep(await keeper.room(1, timeout_s=5), 1, group.again)


async def _until_kept(keeper: PushKeeper, number: int) -> None:
    async with asyncio.timeout(10):
        while keeper.num_kept != number:
            await asyncio.sleep(0.02)


async def test_a_group_that_cannot_be_pushed_again_is_told_once_and_holds_up_no_other(
    server: EmbeddedServer, redis: Redis
) -> None:
    keeper = PushKeeper(redis, MARKER, max_bytes=3)
    gone, behind = Group(RuntimeError("the run is gone")), Group()
    await _keep(keeper, gone)
    await _keep(keeper, behind)
    _kill(server)
    server.restart()
    with pytest.raises(RuntimeError, match="the run is gone"):
        await keeper.flush(timeout_s=10)
    await _until_kept(keeper, 1)
    assert (behind.num_calls, keeper.num_repushed) == (1, 1)
    assert not await keeper.flush(timeout_s=0.5)  # the error was told, the group is not on disk
    with pytest.raises(TimeoutError, match=r"1 of them it lost .* yet: the run is gone"):
        await keeper.room(3, timeout_s=0.01)
    gone.error = None
    assert await keeper.flush(timeout_s=10)
    assert gone.num_calls > 1
    await keeper.close()


async def test_two_who_wait_for_the_disk_share_an_error_and_the_other_goes_on_waiting(
    server: EmbeddedServer, redis: Redis
) -> None:
    keeper = PushKeeper(redis, MARKER)
    gone = Group(RuntimeError("the run is gone"))
    await _keep(keeper, gone)
    waits = [asyncio.create_task(keeper.flush(timeout_s=20)) for _ in range(2)]
    _kill(server)
    server.restart()
    done, (other,) = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert [str(task.exception()) for task in done] == ["the run is gone"]
    gone.error = None
    assert await other
    await keeper.close()


async def test_a_push_again_that_finds_no_room_holds_up_nothing_and_is_logged_as_that(
    server: EmbeddedServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = PushKeeper(redis, MARKER)
    large, small, fresh = Group(TimeoutError("no room for group large")), Group(), Group()
    large.may_go.clear()
    await _keep(keeper, large)
    await _keep(keeper, small)
    _kill(server)
    server.restart()
    async with asyncio.timeout(10):
        while not large.num_calls:
            await asyncio.sleep(0.02)
    await _keep(keeper, fresh)
    await _until_kept(keeper, 2)  # fresh is on disk though large still waits for room
    assert (large.num_calls, small.num_calls, fresh.num_calls) == (1, 0, 0)
    caplog.clear()
    large.may_go.set()
    await _until_kept(keeper, 1)
    assert small.num_calls == 1
    large.error = None
    assert await keeper.flush(timeout_s=10)  # no error: room comes by itself
    assert [record.message for record in caplog.records] == [
        "Redis lost a pushed group and did not take it again yet: no room for group large"
    ]
    await keeper.close()


async def test_close_ends_a_push_again_that_waits(server: EmbeddedServer, redis: Redis) -> None:
    keeper = PushKeeper(redis, MARKER)
    group = Group()
    group.may_go.clear()
    await _keep(keeper, group)
    _kill(server)
    server.restart()
    async with asyncio.timeout(10):
        while not group.num_calls:
            await asyncio.sleep(0.02)
    await keeper.close()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not names & {"push-keeper", "push-again"}
