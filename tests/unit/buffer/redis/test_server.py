"""The embedded server, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from redis import Redis

from buffer.redis.server import EmbeddedServer, ServerStartError
from configs.choices import AppendFsync
from configs.schema import BufferConfig
from processes.child import has_ended
from tests.support.buffer.blocked import until_written

HOST = "127.0.0.1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    started = _start(tmp_path)
    yield started
    started.stop(timeout_s=60)


def _start(folder: Path, **settings: object) -> EmbeddedServer:
    config = BufferConfig(**settings)  # type: ignore[arg-type]
    return EmbeddedServer.start(folder / "re dis", config, HOST, folder / "logs" / "redis.log")


def _client(url: str) -> Redis:
    return Redis.from_url(url, decode_responses=True)


def test_server_has_our_settings_and_shows_its_password_to_its_owner_alone(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    parts = urlsplit(server.url)
    with _client(server.url) as client:
        settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
    assert settings["bind"] == HOST
    assert settings["dir"] == str(tmp_path / "re dis")
    assert settings["requirepass"] == parts.password and len(parts.password) >= 24
    assert "Ready to accept connections" in (tmp_path / "logs" / "redis.log").read_text()
    assert parts.password not in Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    assert stat.S_IMODE((tmp_path / "re dis" / "server.conf").stat().st_mode) == 0o600
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert parts.port is not None
    assert parts.port < first_of_clients or first_of_clients < 16_000


def test_folder_in_use_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"a server is running in .*re dis: stop that run"):
        _start(tmp_path)
    assert server.wait(timeout_s=0) is None


def test_server_that_ended_can_be_replaced_by_another_object_with_its_data(tmp_path: Path) -> None:
    first = _start(tmp_path, appendfsync=AppendFsync.always)
    with _client(first.url) as client:
        client.set("kept", "yes")
    assert first.stop(timeout_s=60) == 0
    assert first.stop(timeout_s=60) == 0
    parts = urlsplit(first.url)
    second = EmbeddedServer.start(
        tmp_path / "re dis",
        BufferConfig(),
        HOST,
        tmp_path / "log",
        port=parts.port,
        password=parts.password,
    )
    assert second.url == first.url
    with _client(first.url) as client:
        assert client.get("kept") == "yes"
    second.stop(timeout_s=60)


def test_server_survives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(_start(tmp_path)))
    thread.start()
    thread.join()
    assert started[0].wait(timeout_s=0.3) is None
    started[0].stop(timeout_s=60)


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"{HOST}:{port} .*choose another port"):
            EmbeddedServer.start(tmp_path, BufferConfig(), HOST, tmp_path / "log", port=port)


def test_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "re dis").mkdir()
    (tmp_path / "re dis" / "appendonlydir").write_text("no folder")
    with pytest.raises(
        ServerStartError, match=r"ended with code 1 .*its log ends:\n(.|\n)*AOF|append"
    ):
        _start(tmp_path)


# Restart --------------------------------------------------------------------------------------


def test_killed_server_is_started_again_at_the_same_url_on_its_log_up_to_a_torn_end(
    tmp_path: Path,
) -> None:
    server = _start(tmp_path, appendfsync=AppendFsync.always)
    with _client(server.url) as client:
        for number in range(10):
            client.set(f"key-{number}", "value")
    url, pid = server.url, server.pid
    os.kill(pid, signal.SIGKILL)
    assert server.wait(timeout_s=60) == -signal.SIGKILL
    (log,) = (tmp_path / "re dis" / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 5)
    server.restart()
    assert server.url == url and server.pid != pid
    with _client(url) as client:
        assert sorted(client.keys()) == [f"key-{number}" for number in range(9)]
    with pytest.raises(ServerStartError, match="a server is running in"):
        server.restart()
    assert server.stop(timeout_s=60) == 0


def _fill(server: EmbeddedServer, num_keys: int) -> None:
    with _client(server.url) as client, client.pipeline(transaction=False) as pipe:
        for number in range(num_keys):
            pipe.set(f"key-{number}", "value")
        pipe.execute()
    until_written(server.url)


def test_server_that_was_killed_while_it_rewrote_its_log_is_started_again(tmp_path: Path) -> None:
    # The rewrite takes 10 s, and looks for its server after every 1024 keys only.
    server = EmbeddedServer.start(
        tmp_path, BufferConfig(), HOST, tmp_path / "log", extra={"rdb-key-save-delay": "10000"}
    )
    _fill(server, 1000)
    with _client(server.url) as client:
        client.bgrewriteaof()
    (rewriting,) = psutil.Process(server.pid).children()
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(timeout_s=60) == -signal.SIGKILL
    server.restart()
    assert has_ended(rewriting.pid, 0.0)
    with _client(server.url) as client:
        assert client.dbsize() == 1000
    assert server.stop(timeout_s=60) == 0


def test_server_is_waited_for_as_long_as_it_loads_its_data(tmp_path: Path) -> None:
    # It replies after every 1024 keys, so about every half second, and loads for 5 seconds.
    server = EmbeddedServer.start(
        tmp_path, BufferConfig(), HOST, tmp_path / "log", extra={"key-load-delay": "500"}
    )
    server._start_timeout_s = 3.0  # for the restart
    _fill(server, 10_000)
    os.kill(server.pid, signal.SIGKILL)
    server.wait(timeout_s=60)
    began = time.monotonic()
    server.restart()
    assert time.monotonic() - began > 3.5, "longer than buffer.start_timeout_s"
    with _client(server.url) as client:
        assert client.dbsize() == 10_000
    assert server.stop(timeout_s=60) == 0


def test_server_that_outlives_its_parent_is_adopted_and_one_that_did_not_starts_again(
    tmp_path: Path,
) -> None:
    config, log = BufferConfig(), tmp_path / "log"
    first = EmbeddedServer.start(tmp_path, config, HOST, log, outlives=True)
    _fill(first, 10)
    adopted = EmbeddedServer.adopt(tmp_path, config, log, first.url)
    assert (adopted.pid, adopted.url) == (first.pid, first.url)
    os.kill(first.pid, signal.SIGKILL)
    assert adopted.wait(timeout_s=60) is not None
    again = EmbeddedServer.adopt(tmp_path, config, log, first.url)
    assert (again.url, again.pid == first.pid) == (first.url, False)
    with _client(again.url) as client:
        assert client.dbsize() == 10
    adopted._start_timeout_s = 0.5  # so long it waits for the other one's end
    with pytest.raises(ServerStartError, match="a server is running"):
        adopted.restart()
    assert again.stop(timeout_s=60) == 0


def test_extra_config_lines_override_ours_and_bad_ones_are_reported(tmp_path: Path) -> None:
    server = EmbeddedServer.start(
        tmp_path, BufferConfig(), HOST, tmp_path / "log", extra={"maxmemory": "64mb"}
    )
    with _client(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
    server.stop(timeout_s=60)
    with pytest.raises(ServerStartError, match="no-such-setting"):
        EmbeddedServer.start(
            tmp_path, BufferConfig(), HOST, tmp_path / "log", extra={"no-such-setting": "1"}
        )
