"""Connects to Redis and rejects a server on which groups could get lost.

redis-py sends with `asyncio.wait_for`, which in Python 3.11 drops a cancellation that arrives in
the same turn of the loop in which the bytes are written: the command continues, and a worker that
should stop blocks for ever. Our connections send without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from buffer.redis.address import PASSWORD_VARIABLE, address
from buffer.redis.client import (
    SOCKET_TIMEOUT_S,
    TRY_FOR_S,
    BufferConnectionError,
    BufferRedis,
    is_full,
)
from buffer.redis.cluster import ClusterRedis
from buffer.redis.payloads import enlarge
from configs.schema import BufferConfig

MIN_VERSION = (7, 0)


class _CancellableSend:
    """For a connection of redis-py."""

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        limit_s, self.socket_timeout = self.socket_timeout, None  # None: it sends without wait_for
        try:
            async with asyncio.timeout(limit_s):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except TimeoutError:  # the cancellation has closed the connection already
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except RuntimeError as error:  # uvloop's, where the kernel has closed the connection
            raise exceptions.ConnectionError(f"lost the connection to Redis: {error}") from None
        finally:
            self.socket_timeout = limit_s


class _TcpConnection(_CancellableSend, Connection):
    """redis://"""


class _LocalConnection(_TcpConnection):
    """redis:// of a server on this machine, by its Unix socket; by TCP while that is gone."""

    def __init__(self, *, local_path: str, **options: Any) -> None:
        super().__init__(**options)
        self.local_path = local_path

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                streams = await asyncio.open_unix_connection(self.local_path)
            self._reader, self._writer = streams
            enlarge(streams[1].transport)
        except OSError:
            await super()._connect()  # type: ignore[no-untyped-call]


class _TlsConnection(_CancellableSend, SSLConnection):
    """rediss://"""


class _UnixConnection(_CancellableSend, UnixDomainSocketConnection):
    """unix://"""


_CONNECTIONS = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _UnixConnection,
}
_UNREACHABLE = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_OF_THE_POOL = ("connection_class", "max_connections")
_CONNECT_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.5
_READ_BYTES = 1 << 20  # payloads are large; redis-py's default of 32 KiB halves the rate of GET

# A host that vanished is noticed after 20 + 3 * 10 seconds, also during a blocking command.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


async def connect_as(url: str, settings: BufferConfig, *, waits: bool = False) -> BufferRedis:
    """`connect` with a run's certificates and patience."""
    return await connect(
        url, tls_ca_file=settings.tls_ca_file, try_for_s=settings.outage_timeout_s, waits=waits
    )


async def connect(
    url: str,
    *,
    tls_ca_file: str | None = None,
    try_for_s: float = TRY_FOR_S,
    waits: bool = False,
) -> BufferRedis:
    """A client of the server at `url`, or of the whole cluster if that is a node of one.

    Commands are retried for `try_for_s` while the server is down, so they must be idempotent: after
    a lost reply a command is applied twice. `tls_ca_file` holds the CA certificates for a rediss://
    server; None means the system's. A client certificate is named in the URL:
    rediss://...?ssl_certfile=FILE&ssl_keyfile=FILE. `waits`: also for a server that is down now, as
    the process of a run does, whose server was there before.

    Raises BufferConnectionError if a server cannot be reached, rejects the password, is too old, or
    may evict keys.
    """
    where = address(url)
    options = _options(url, where, tls_ca_file)
    deadline = time.monotonic() + (try_for_s if waits else 0.0)
    while True:
        try:
            info = await _check(options, where)
            break
        except BufferConnectionError as error:
            if not isinstance(error.__cause__, _UNREACHABLE) or time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_LOOK_AGAIN_S)
    if info.get("cluster_enabled", 0):
        return await _connect_cluster(options, where, try_for_s)
    return BufferRedis.of(await _nearest(options, where, info), where, try_for_s)


async def _nearest(options: dict[str, Any], where: str, info: dict[str, Any]) -> dict[str, Any]:
    """The options with the server's Unix socket, if that is on this machine and this user's.

    The same calls cost less CPU time there than over TCP.
    """
    # Behind a proxy or a forwarded port the server names another port than ours.
    host, port = options.get("host", "localhost"), options.get("port", 6379)
    if options["connection_class"] is not _TcpConnection or info.get("tcp_port") != port:
        return options
    for name, entry in info.items():  # from Redis 7.2 on
        if name.startswith("listener") and isinstance(entry, dict) and entry.get("name") == "unix":
            path = str(entry.get("bind"))
            if not _is_our_socket(path) or not _is_here(host, port):
                continue
            local = {**options, "connection_class": _LocalConnection, "local_path": path}
            with contextlib.suppress(BufferConnectionError):
                found = await _check({**local, "host": "", "port": 0}, where)  # not over TCP
                if found.get("run_id") == info.get("run_id"):
                    return local
    return options


def _is_our_socket(path: str) -> bool:
    """Only then may it be sent the password: another user may have made the file."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()


def _is_here(host: str, port: int) -> bool:
    """Returns whether the server has the address that this machine has towards it."""
    try:
        with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as probe:
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError:
        return False


async def _connect_cluster(options: dict[str, Any], where: str, try_for_s: float) -> ClusterRedis:
    if options.pop("db", 0) != 0:
        raise BufferConnectionError(
            f"Redis at {where} is a cluster, which has database 0 only: end buffer.url with /0"
        )
    seed = (options.pop("host", "localhost"), options.pop("port", 6379))
    cluster = ClusterRedis(seed, options, try_for_s)
    try:
        ranges = await cluster.resolve()
        primaries = {slots.nodes[0] for slots in ranges}
        if not ranges:
            raise BufferConnectionError(
                f"Redis at {where} is a cluster in which no node holds a slot: redis-cli "
                "--cluster create"
            )
        for host, port in sorted({node for slots in ranges for node in slots.nodes}):
            try:
                await _check({**options, "host": host, "port": port}, f"{host}:{port}")
            except BufferConnectionError as error:
                is_down = isinstance(error.__cause__, _UNREACHABLE)
                if is_down and (host, port) not in primaries:
                    continue  # a replica may be down
                raise
    except BaseException:
        await cluster.aclose()
        raise
    return cluster


def _options(url: str, where: str, tls_ca_file: str | None) -> dict[str, Any]:
    """Arguments for a connection pool."""
    try:
        options: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": _CONNECT_TIMEOUT_S,
            "socket_read_size": _READ_BYTES,
            "max_connections": 4096,  # more than all tasks of a process ever need
            "retry": Retry(NoBackoff(), 0),  # BufferRedis retries
            "driver_info": None,  # else each connection reads the installed version of redis-py
            **parse_url(url),
        }
        options["connection_class"] = _CONNECTIONS[options.get("connection_class", Connection)]
        options["connection_class"](  # else unknown arguments would raise only later
            **{name: value for name, value in options.items() if name not in _OF_THE_POOL}
        )
    except (ValueError, TypeError) as error:
        why = f"{error}".partition(" as ")[0]  # a bad port follows, which may be a password
        raise BufferConnectionError(
            f"buffer.url at {where} is not a valid Redis URL: {why}; write it as "
            "redis://user@host:port/0"
        ) from None
    if "path" not in options:
        options["socket_keepalive"] = True
        options["socket_keepalive_options"] = {
            getattr(socket, name): value  # macOS has only some of them
            for name, value in _KEEPALIVE.items()
            if hasattr(socket, name)
        }
    if tls_ca_file is not None:
        if options["connection_class"] is not _TlsConnection:
            raise BufferConnectionError(
                f"buffer.tls_ca_file is set but buffer.url at {where} does not begin with "
                "rediss://: correct one of them"
            )
        if not Path(tls_ca_file).is_file():
            raise BufferConnectionError(
                f"buffer.tls_ca_file={tls_ca_file}: no such file on this machine; copy it there"
            )
        options["ssl_ca_certs"] = tls_ca_file
    return options


async def _check(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The server's INFO. Raises BufferConnectionError if it is unsuitable."""
    patient = Retry(
        ExponentialWithJitterBackoff(base=0.05, cap=1.0), 30, (exceptions.BusyLoadingError,)
    )
    probe = Redis.from_pool(
        ConnectionPool(**{**options, "socket_timeout": _CONNECT_TIMEOUT_S, "retry": patient})
    )
    try:
        try:
            await probe.execute_command("PING")  # type: ignore[no-untyped-call]
        except exceptions.ResponseError as error:
            # Without disk it refuses even this, and can be read all the same.
            if not is_full(error):
                raise
        info: dict[str, Any] = await probe.info("server", "memory", "cluster")
    except (exceptions.AuthenticationError, exceptions.ResponseError) as error:
        raise BufferConnectionError(_refusal(where, error)) from None
    except (exceptions.RedisError, OSError) as error:
        raise BufferConnectionError(_unreachable(where, error)) from error
    finally:
        await probe.aclose()
    version = str(info.get("redis_version", ""))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_VERSION:
        raise BufferConnectionError(
            f"Redis at {where} has version {version or 'unknown'}: use 7.0 or later, or Valkey"
        )
    policy = str(info.get("maxmemory_policy", ""))
    if policy != "noeviction":
        raise BufferConnectionError(
            f"Redis at {where} has maxmemory-policy={policy or 'unknown'}, which deletes groups "
            "silently when memory is full: CONFIG SET maxmemory-policy noeviction"
        )
    return info


def _unreachable(where: str, error: Exception) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"Redis at {where} has an untrusted certificate ({error}): name its authority in "
            "buffer.tls_ca_file"
        )
    return f"cannot reach Redis at {where} ({error}): start it, or correct buffer.url"


def _refusal(where: str, error: exceptions.RedisError) -> str:
    text = str(error).lower()
    if "authentication required" in text:
        return (
            f"Redis at {where} wants a password: set {PASSWORD_VARIABLE} in the environment, or "
            "name a file that holds it in buffer.password_file"
        )
    if isinstance(error, exceptions.AuthenticationError) or "without any password" in text:
        return (
            f"Redis at {where} refuses the user or password: correct the user in buffer.url, the "
            f"password in {PASSWORD_VARIABLE} or buffer.password_file"
        )
    if isinstance(error, exceptions.NoPermissionError):
        return f"Redis at {where}: the user in buffer.url may not run PING and INFO: allow them"
    return f"Redis at {where} replied with an error: {error}"
