"""The embedded server, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis

from buffer.redis.server import EmbeddedServer, ServerStartError, find_binary
from configs.choices import AppendFsync
from configs.schema import BufferConfig

HOST = "127.0.0.1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    started = _start(tmp_path)
    yield started
    started.stop(timeout_s=5)


def _start(folder: Path, **settings: object) -> EmbeddedServer:
    config = BufferConfig(**settings)  # type: ignore[arg-type]
    return EmbeddedServer.start(folder / "re dis", config, HOST, folder / "logs" / "redis.log")


def _client(url: str) -> Redis:
    return Redis.from_url(url, decode_responses=True)


def _password(url: str) -> str:
    return urlsplit(url).password or ""


def test_it_has_our_settings_and_listens_where_it_must(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    with _client(server.url) as client:
        settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
    assert settings["bind"] == HOST
    assert settings["dir"] == str(tmp_path / "re dis")
    assert len(settings["requirepass"]) >= 24
    assert "Ready to accept connections" in (tmp_path / "logs" / "redis.log").read_text()


def test_its_password_is_in_no_command_line_and_in_no_file_for_others(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    assert _password(server.url) not in command
    config = tmp_path / "re dis" / "server.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_data_survives_a_restart_in_the_same_folder(tmp_path: Path) -> None:
    first = _start(tmp_path, appendfsync=AppendFsync.always)
    with _client(first.url) as client:
        client.set("kept", "yes")
    assert first.stop(timeout_s=5) == 0
    assert first.stop(timeout_s=5) == 0
    second = _start(tmp_path)
    with _client(second.url) as client:
        assert client.get("kept") == "yes"
    second.stop(timeout_s=5)


def test_stop_ends_the_process_and_wait_tells(server: EmbeddedServer) -> None:
    assert server.wait(timeout_s=0) is None
    waited: list[int | None] = []
    waiter = threading.Thread(target=lambda: waited.append(server.wait(timeout_s=10)))
    waiter.start()
    assert server.stop(timeout_s=5) == 0
    waiter.join(timeout=5)
    assert waited == [0]
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_server_that_hangs_is_ended_by_force(server: EmbeddedServer) -> None:
    os.kill(server.pid, 19)  # SIGSTOP
    assert server.stop(timeout_s=0.2) == -9


def test_it_survives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(_start(tmp_path)))
    thread.start()
    thread.join()
    assert started[0].wait(timeout_s=0.3) is None
    started[0].stop(timeout_s=5)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from buffer.redis.server import EmbeddedServer\n"
        "from configs.schema import BufferConfig\n"
        "folder = Path(sys.argv[1])\n"
        f"server = EmbeddedServer.start(folder, BufferConfig(), '{HOST}', folder / 'log')\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_folder_in_use_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"a server is running in .*re dis: stop that run"):
        _start(tmp_path)
    assert server.wait(timeout_s=0) is None


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"{HOST}:{port} .*choose another port"):
            EmbeddedServer.start(tmp_path, BufferConfig(), HOST, tmp_path / "log", port=port)


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "re dis").mkdir()
    (tmp_path / "re dis" / "appendonlydir").write_text("no folder")
    with pytest.raises(
        ServerStartError, match=r"ended with code 1 .*its log ends:\n(.|\n)*AOF|append"
    ):
        _start(tmp_path)


def test_a_server_program_is_found() -> None:
    assert os.access(find_binary(), os.X_OK)


# Restart --------------------------------------------------------------------------------------


def test_a_killed_server_is_started_again_on_its_log_at_the_same_url(tmp_path: Path) -> None:
    server = _start(tmp_path, appendfsync=AppendFsync.always)
    with _client(server.url) as client:
        client.set("kept", "yes")
    url, pid = server.url, server.pid
    os.kill(pid, signal.SIGKILL)
    assert server.wait(timeout_s=5) == -signal.SIGKILL
    server.restart()
    assert server.url == url and server.pid != pid
    with _client(url) as client:
        assert client.get("kept") == "yes"
    with pytest.raises(ServerStartError, match="a server is running in"):
        server.restart()
    assert server.stop(timeout_s=5) == 0


def test_another_object_can_take_the_place_of_a_server_that_ended(tmp_path: Path) -> None:
    first = _start(tmp_path)
    parts = urlsplit(first.url)
    first.stop(timeout_s=5)
    folder = tmp_path / "re dis"
    second = EmbeddedServer.start(
        folder, BufferConfig(), HOST, tmp_path / "log", port=parts.port, password=parts.password
    )
    assert second.url == first.url
    second.stop(timeout_s=5)


def test_a_log_whose_end_is_torn_is_loaded_up_to_there(tmp_path: Path) -> None:
    server = _start(tmp_path, appendfsync=AppendFsync.always)
    with _client(server.url) as client:
        for number in range(10):
            client.set(f"key-{number}", "value")
    os.kill(server.pid, signal.SIGKILL)
    server.wait(timeout_s=5)
    (log,) = (tmp_path / "re dis" / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 5)
    server.restart()
    with _client(server.url) as client:
        assert sorted(client.keys()) == [f"key-{number}" for number in range(9)]
    server.stop(timeout_s=5)


def test_extra_lines_of_config_win_over_ours_and_a_bad_one_is_told(tmp_path: Path) -> None:
    server = EmbeddedServer.start(
        tmp_path, BufferConfig(), HOST, tmp_path / "log", extra={"maxmemory": "64mb"}
    )
    with _client(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
    server.stop(timeout_s=5)
    with pytest.raises(ServerStartError, match="no-such-setting"):
        EmbeddedServer.start(
            tmp_path, BufferConfig(), HOST, tmp_path / "log", extra={"no-such-setting": "1"}
        )


def test_its_port_is_none_that_a_client_could_be_given(server: EmbeddedServer) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = urlsplit(server.url).port
    assert port is not None and (port < first or first < 16_000)
