"""The client: what it checks at connect, what it waits for and what it says when that fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from hiredis import pack_command
from redis import Redis, exceptions

from buffer.redis.client import (
    TRY_FOR_S,
    BufferClosedError,
    BufferConnectionError,
    BufferRedis,
    DiskFullError,
    MemoryFullError,
)
from buffer.redis.cluster import key_of
from buffer.redis.connection import connect
from buffer.redis.payloads import fresh
from buffer.redis.replies import readable
from buffer.redis.server import EmbeddedServer
from configs.schema import BufferConfig
from tests.support.buffer.blocked import until_blocked

HOST = "127.0.0.1"
WRITE = "return redis.call('SET', KEYS[1], ARGV[1])"


Start = Callable[..., EmbeddedServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(key_load_delay="500")`: a server with such lines in its config."""
    started: list[EmbeddedServer] = []

    def make(**extra: str) -> EmbeddedServer:
        lines = {name.replace("_", "-"): value for name, value in extra.items()}
        server = EmbeddedServer.start(
            tmp_path / "redis", BufferConfig(), HOST, tmp_path / "log", extra=lines
        )
        started.append(server)
        return server

    yield make
    for server in started:
        server.stop(timeout_s=60)


@pytest.fixture
def server(start: Start) -> EmbeddedServer:
    return start()


def _client(url: str) -> Redis:
    return Redis.from_url(url, decode_responses=True)


# Connecting -----------------------------------------------------------------------------------


async def test_connect_reaches_a_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = start(unixsocket=str(path))
    password = urlsplit(server.url).password
    client = await connect(f"unix://{path}?password={password}&db=0")
    await client.set("key", "value")
    assert await client.receive(["key"], fresh) == [b"value"]
    await client.aclose()


async def _address_at_server(client: BufferRedis) -> set[str]:
    """Where the server is reached by commands and by payloads."""
    reply = await client.execute_command("CLIENT", "INFO")
    command = pack_command(("CLIENT", "INFO"))
    (payload,) = await client.exchange([command], 1, "key")
    return {re.findall(r" laddr=\[?([^ \]]*)", line)[0] for line in (readable(reply), payload)}


async def test_server_on_this_machine_is_reached_by_its_socket(start: Start) -> None:
    server = start()
    place, path = (
        urlsplit(server.url),
        Path(_client(server.url).config_get("unixsocket")["unixsocket"]),
    )
    if "listener0" not in _client(server.url).info("server"):
        pytest.skip("a Redis before 7.2 does not say which sockets it has")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    client = await connect(server.url)
    try:
        assert await _address_at_server(client) == {f"{path}:0"}
        await client.set("large", os.urandom(5_000_000))
        (value,) = await client.receive(["large"], fresh)
        assert isinstance(value, memoryview) and len(value) == 5_000_000
        os.kill(server.pid, signal.SIGKILL)  # the path stays behind
        assert server.wait(60) is not None
        server.restart()
        assert await _address_at_server(client) == {f"{path}:0"}
        path.unlink()
        await client.connection_pool.disconnect()
        await client.payload_connections.aclose()
        assert await _address_at_server(client) == {f"{place.hostname}:{place.port}"}
    finally:
        await client.aclose()


async def _reached_at(url: str) -> set[str]:
    client = await connect(url)
    try:
        return await _address_at_server(client)
    finally:
        await client.aclose()


async def test_socket_of_another_server_is_not_used(start: Start, tmp_path: Path) -> None:
    server = start()
    place = urlsplit(server.url)
    other = EmbeddedServer.start(
        tmp_path / "other", BufferConfig(), HOST, tmp_path / "log2", password=place.password
    )
    try:
        (tmp_path / "other" / "server.sock").rename(tmp_path / "redis" / "server.sock")
        assert await _reached_at(server.url) == {f"{HOST}:{place.port}"}
    finally:
        other.stop(timeout_s=60)


async def test_forwarded_port_and_another_address_are_not_left_for_a_socket(
    tmp_path: Path,
) -> None:
    host = "127.0.0.2"  # this machine calls itself 127.0.0.1 there, as it would to a real host
    server = EmbeddedServer.start(tmp_path / "redis", BufferConfig(), host, tmp_path / "log")
    place = urlsplit(server.url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, place.port)
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    try:
        assert await _reached_at(server.url) == {f"{host}:{place.port}"}
        async with await asyncio.start_server(forward, HOST, 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            url = f"redis://:{place.password}@{HOST}:{port}/0"
            assert await _reached_at(url) == {f"{host}:{place.port}"}
    finally:
        server.stop(timeout_s=60)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_server_whose_path_is_too_long_for_a_socket_is_reached_by_its_port(
    tmp_path: Path,
) -> None:
    folder = tmp_path / ("x" * 110)
    server = EmbeddedServer.start(folder, BufferConfig(), HOST, tmp_path / "log")
    try:
        assert await _reached_at(server.url) == {f"{HOST}:{urlsplit(server.url).port}"}
    finally:
        server.stop(timeout_s=60)


async def test_unreachable_server_is_named_with_the_fix() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(BufferConnectionError, match=f"{HOST}:{port}.*start it, or correct") as info:
        await connect(f"redis://:hunter2@{HOST}:{port}/0")
    assert "hunter2" not in str(info.value)


@pytest.mark.parametrize(
    ("user", "message"), [(":hunter2@", "refuses the user or password"), ("", "wants a password")]
)
async def test_wrong_password_is_named_and_never_shown(
    redis_url: str, user: str, message: str
) -> None:
    port = urlsplit(redis_url).port
    with pytest.raises(BufferConnectionError, match=f"{HOST}:{port}.*{message}") as info:
        await connect(f"redis://{user}{HOST}:{port}/0")
    assert "hunter2" not in str(info.value)


@pytest.mark.parametrize(
    "url",
    ["http://x", "redis://host:port/0", "redis://h/?socket_timeout=x", "redis://h/?no_such=1"],
)
async def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BufferConnectionError, match=r"not a valid Redis URL"):
        await connect(url)


@pytest.mark.parametrize("rest", ["me:hunter2", "me:1:hunter2", ":hunter2/x@host:6379/0"])
async def test_password_of_a_url_that_is_cut_off_or_not_quoted_is_not_shown(rest: str) -> None:
    with pytest.raises(BufferConnectionError, match="Port could not be cast") as info:
        await connect(f"redis://{rest}")
    assert "hunter2" not in str(info.value)


async def test_server_that_evicts_is_refused_with_the_fix(server: EmbeddedServer) -> None:
    with _client(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(BufferConnectionError, match="CONFIG SET maxmemory-policy noeviction"):
        await connect(server.url)


# A server that is away ------------------------------------------------------------------------


async def test_commands_and_pipelines_wait_for_a_server_that_is_restarted(
    server: EmbeddedServer,
) -> None:
    client = await connect(server.url)
    await client.set("before", "1")
    os.kill(server.pid, signal.SIGKILL)
    server.wait(timeout_s=60)

    async def pipelined() -> list[bytes | None]:
        async with client.pipeline(transaction=False) as pipe:
            pipe.set("piped", "2")
            pipe.get("piped")
            replies: list[bytes | None] = await pipe.execute()
            return replies

    single = asyncio.create_task(client.set("single", "3"))
    piped = asyncio.create_task(pipelined())
    blocked = asyncio.create_task(client.xread({"stream": "0-0"}, 1, 60_000))
    await asyncio.sleep(0.3)
    assert not single.done() and not piped.done() and not blocked.done()
    await asyncio.to_thread(server.restart)
    assert await single
    assert await piped == [True, b"2"]
    await client.xadd("stream", {"field": "value"})
    assert await blocked
    await client.aclose()


async def test_server_that_stays_away_is_named_with_the_fix(server: EmbeddedServer) -> None:
    client = await connect(server.url, try_for_s=0.3)
    await client.set("before", "1")
    server.stop(timeout_s=60)
    began = time.monotonic()
    where = f"{HOST}:{urlsplit(server.url).port}"
    with pytest.raises(
        BufferConnectionError, match=f"Redis at {where} has been down.*start it again"
    ):
        await client.get("before")
    async with client.pipeline(transaction=False) as pipe:
        pipe.get("before")
        with pytest.raises(BufferConnectionError, match="has been down"):
            await pipe.execute()
    assert time.monotonic() - began < TRY_FOR_S
    await client.aclose()


async def test_process_of_a_run_connects_once_its_server_is_back(server: EmbeddedServer) -> None:
    url = server.url
    os.kill(server.pid, signal.SIGKILL)
    server.wait(timeout_s=60)
    with pytest.raises(BufferConnectionError, match="cannot reach Redis"):
        await connect(url, try_for_s=60)  # a launch: the address is wrong, probably
    with pytest.raises(BufferConnectionError, match="cannot reach Redis"):
        await connect(url, try_for_s=0.3, waits=True)
    connecting = asyncio.create_task(connect(url, try_for_s=60, waits=True))
    await asyncio.sleep(0.3)
    assert not connecting.done()
    await asyncio.to_thread(server.restart)
    client = await asyncio.wait_for(connecting, 60)
    assert await client.set("a", "1")
    await client.aclose()


async def test_server_that_loads_its_data_is_waited_for(start: Start) -> None:
    # 500 keys at 10 ms each, five times the client's patience with a server that does not reply;
    # the first part of the log is a snapshot.
    server = start(key_load_delay="10000", loading_process_events_interval_bytes="1024")
    client = await connect(server.url, try_for_s=1.0)
    await client.mset({f"key-{number}": "value" for number in range(500)})
    await client.bgrewriteaof()
    while (await client.info("persistence"))["aof_rewrite_in_progress"]:
        await asyncio.sleep(0.05)
    os.kill(server.pid, signal.SIGKILL)
    server.wait(timeout_s=60)
    restarting = asyncio.create_task(asyncio.to_thread(server.restart))
    while not _is_loading(server.url):
        assert not restarting.done(), "it had loaded before anyone asked"
        await asyncio.sleep(0.01)
    assert await client.get("key-499") == b"value"
    await restarting
    await client.aclose()


def _is_loading(url: str) -> bool:
    try:
        with _client(url) as probe:
            return bool(probe.info("persistence")["loading"])
    except exceptions.ConnectionError:
        return False


async def test_blocked_read_may_last_longer_than_a_reply(redis_url: str, run_name: str) -> None:
    client = await connect(f"{redis_url}?socket_timeout=2")
    assert not await client.xread({run_name: "0-0"}, 1, 2500)
    with _client(redis_url) as probe:
        before = probe.info("stats")["total_connections_received"]
    assert await client.get(run_name) is None
    with _client(redis_url) as probe:  # its own is one more; ours lives
        assert probe.info("stats")["total_connections_received"] == before + 1
    await client.aclose()


async def test_wait_ends_at_whatever_turn_of_the_loop_it_is_cancelled(
    redis_url: str,
    run_name: str,
) -> None:
    client = await connect(redis_url)
    for turns in range(200):
        waiting = asyncio.create_task(client.xread({run_name: "0-0"}, 1, 60_000))
        for _ in range(1 + turns % 40):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=60)
        assert waiting.cancelled()
    assert await client.get(run_name) is None  # no reply of another command is left over
    await client.aclose()


async def test_wait_outlasts_several_crashes_that_are_shorter_than_its_patience(
    advance_clock: Callable[[float], None], server: EmbeddedServer
) -> None:
    client = await connect(server.url, try_for_s=60.0)
    waiting = asyncio.create_task(client.xread({"stream": "0-0"}, 1, 600_000))
    for _ in range(3):
        await _until_it_waits_at(server)
        advance_clock(40.0)
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(server.wait, 60)
        await asyncio.to_thread(server.restart)
    await _until_it_waits_at(server)
    await client.xadd("stream", {"field": "value"})
    assert await waiting
    await client.aclose()


async def _until_it_waits_at(server: EmbeddedServer) -> None:
    probe = await connect(server.url)
    await until_blocked(probe, 1)
    await probe.aclose()


# Closing --------------------------------------------------------------------------------------


def _start_reads(client: BufferRedis) -> list[asyncio.Task[Any]]:
    """One of each way to send something: a command, a pipeline, a payload."""

    async def pipelined() -> list[Any]:
        async with client.pipeline() as pipe:
            pipe.get("key")
            return await pipe.execute()

    reads = (client.get("key"), pipelined(), client.receive(["key"], fresh))
    return [asyncio.create_task(read) for read in reads]


async def _ends(reads: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 60)


async def _until_it_has_no_client(server: EmbeddedServer) -> None:
    with _client(server.url) as probe:
        async with asyncio.timeout(60):
            while probe.info("clients")["connected_clients"] > 1:
                await asyncio.sleep(0.01)


async def test_close_ends_commands_that_are_retried(server: EmbeddedServer) -> None:
    client = await connect(server.url)
    server.stop(timeout_s=60)
    reads = _start_reads(client)
    done, _ = await asyncio.wait(reads, timeout=0.1)
    assert not done
    await client.aclose()
    server.restart()
    assert [type(end) for end in await _ends(reads)] == [BufferClosedError] * 3
    await _until_it_has_no_client(server)


async def test_close_leaves_no_connection_at_whatever_turn_of_the_loop_it_comes(
    server: EmbeddedServer,
) -> None:
    for turns in range(40):
        client = await connect(server.url)
        reads = _start_reads(client)
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.aclose()
        for end in await _ends(reads):
            assert isinstance(end, BufferClosedError) or end in (None, [None])
    await _until_it_has_no_client(server)


# A server without room ------------------------------------------------------------------------


async def test_server_without_memory_says_so_and_is_waited_for(server: EmbeddedServer) -> None:
    client, patient = await connect(server.url, try_for_s=0.3), await connect(server.url)
    await client.set("key", b"x" * 5_000_000)
    with _client(server.url) as admin:
        admin.config_set("maxmemory", "4mb")
    where = f"{HOST}:{urlsplit(server.url).port}"
    with pytest.raises(MemoryFullError, match=f"{where} has no memory left.*capacity_bytes"):
        await client.set("more", "value")
    digest = await client.script_load(WRITE)
    with pytest.raises(MemoryFullError, match="nothing was lost"):
        await client.evalsha(digest, 1, "more", "value")
    async with client.pipeline(transaction=False) as pipe:
        pipe.set("more", "value")
        pipe.evalsha(digest, 1, "more", "value")
        with pytest.raises(MemoryFullError, match="nothing was lost"):
            await pipe.execute()
    async with asyncio.TaskGroup() as waiting:
        writing = waiting.create_task(patient.evalsha(digest, 1, "scripted", "value"))
        done, _ = await asyncio.wait([writing], timeout=0.5)
        assert not done, "a client waits for memory as it waits for a server that is down"
        with _client(server.url) as admin:
            admin.config_set("maxmemory", "0")
    assert await client.get("scripted") == b"value"
    await patient.aclose()
    await client.aclose()


async def test_server_without_disk_says_so_and_recovers_by_itself(start: Start) -> None:
    server = start()
    client = await connect(server.url, try_for_s=0.3)
    patient = await connect(server.url)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    await client.set("large", b"x" * 200_000)  # acknowledged; it is written behind
    digest = await client.script_load(WRITE)
    error = await _first_refusal(client)
    assert "cannot write its append-only file" in str(error) and "Free disk space" in str(error)
    with pytest.raises(DiskFullError, match="nothing that it acknowledged was lost"):
        await client.evalsha(digest, 1, "more", "value")
    async with asyncio.TaskGroup() as waiting:
        pipe = patient.pipeline(transaction=False)
        pipe.evalsha(digest, 1, "piped", "value")
        begun = [
            waiting.create_task(patient.evalsha(digest, 1, "scripted", "value")),
            waiting.create_task(pipe.execute()),
        ]
        done, _ = await asyncio.wait(begun, timeout=0.5)
        assert not done, "a client waits for disk space as it waits for a server that is down"
        late = await connect(server.url, try_for_s=0.3)
        assert await late.get("large"), "one that comes now can read"
        await late.aclose()
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert await patient.mget("scripted", "piped") == [b"value", b"value"]
    await patient.aclose()
    await client.aclose()


async def _first_refusal(client: Redis) -> DiskFullError:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            await client.set("more", b"x" * 1000)  # type: ignore[misc]
        except DiskFullError as error:
            return error
        await asyncio.sleep(0.05)
    raise AssertionError("the server took every write")


# TLS ------------------------------------------------------------------------------------------


def _make_certificate(folder: Path) -> None:
    """cert.pem and key.pem: of the server and of the client, signed by itself."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test"),
            *("-addext", f"subjectAltName=IP:{HOST}", "-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.fixture
async def tls_url(redis_url: str, tmp_path: Path) -> AsyncIterator[str]:
    """Where TLS is taken off for the server, for clients that show a certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make a certificate with")
    _make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "cert.pem")
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    parts = urlsplit(redis_url)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(HOST, parts.port)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    async with await asyncio.start_server(forward, HOST, 0, ssl=context) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        yield f"rediss://:{parts.password}@{HOST}:{port}/0"


async def test_tls_server_is_checked_and_shown_our_certificate(
    tls_url: str, run_name: str, tmp_path: Path
) -> None:
    ours = f"?ssl_certfile={tmp_path}/cert.pem&ssl_keyfile={tmp_path}/key.pem"
    client = await connect(tls_url + ours, tls_ca_file=str(tmp_path / "cert.pem"))
    value = os.urandom(3_000_000)
    head = f"*3\r\n$3\r\nSET\r\n${len(run_name)}\r\n{run_name}\r\n${len(value)}\r\n"
    command = [head.encode(), memoryview(value), b"\r\n"]
    assert await client.exchange(command, 1, run_name) == ["OK"]
    assert await client.get(run_name) == value
    assert await client.receive([run_name] * 3, fresh) == [value] * 3
    await client.aclose()
    with pytest.raises(BufferConnectionError, match=r"untrusted.*buffer\.tls_ca_file"):
        await connect(tls_url + ours)
    with pytest.raises(BufferConnectionError, match="cannot reach Redis"):
        await connect(tls_url, tls_ca_file=str(tmp_path / "cert.pem"))


async def test_ca_file_that_is_not_there_or_of_no_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BufferConnectionError, match=r"tls_ca_file=.*no such file"):
        await connect(f"rediss://{HOST}:1/0", tls_ca_file=str(tmp_path / "missing.crt"))
    with pytest.raises(BufferConnectionError, match=r"does not begin with rediss://"):
        await connect(f"redis://{HOST}:1/0", tls_ca_file=str(tmp_path / "missing.crt"))


# A cluster (see also tests/integration/test_conformance.py) -----------------------------------


def test_commands_key_says_to_which_node_it_goes() -> None:
    assert key_of(("GET", "{a}:x")) == "{a}:x"
    assert key_of(("EVALSHA", "digest", 1, "{a}", "argument")) == "{a}"
    assert key_of(("XREAD", b"BLOCK", "10", b"COUNT", "1", b"STREAMS", "{a}:s", "0-0")) == "{a}:s"
    assert key_of(("INFO", "server")) is None
    with pytest.raises(ValueError, match="SCAN sees the keys of one node only"):
        key_of(("SCAN", "0"))


async def test_node_of_a_cluster_without_slots_is_refused_with_the_fix(start: Start) -> None:
    server = start(cluster_enabled="yes")
    with pytest.raises(BufferConnectionError, match=r"no node holds a slot: .*--cluster create"):
        await connect(server.url)


@pytest.mark.parametrize("turns", [0, 1, 10])
def test_write_to_a_closed_connection_is_a_lost_one_under_uvloop(
    redis_url: str, run_name: str, turns: int
) -> None:
    """Ray's actors run uvloop, which raises a plain RuntimeError where asyncio has an OSError."""
    ping = b"*1\r\n$4\r\nPING\r\n"

    async def write_after_close() -> None:
        client = await connect(redis_url)
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        for _ in range(10):  # turns of the loop, in which it closes the handle
            await asyncio.sleep(0)
        with pytest.raises(exceptions.ConnectionError):
            await connection.send_packed_command([ping], check_health=False)
        await client.connection_pool.release(connection)
        with pytest.raises(exceptions.ConnectionError):
            async with client.payload_connections.one() as ours:
                assert await ours.exchange([ping], 1) == ["PONG"]
                ours.abort()
                for _ in range(turns):
                    await asyncio.sleep(0)
                await ours.exchange([ping], 1)
        assert await client.ping()
        assert await client.exchange([ping], 1, run_name) == ["PONG"]
        await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write_after_close())
