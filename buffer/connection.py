"""Connects to Redis and refuses a server on which groups could get lost."""

from __future__ import annotations

from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

from buffer.cancellation import CancellableRedis

SOCKET_TIMEOUT_S = 20.0
MAX_BLOCK_S = SOCKET_TIMEOUT_S / 2
"""Longest that one blocking command waits at the server, well before the socket times out."""
MIN_VERSION = (7, 0)

_READ_BYTES = 1 << 20  # payloads are large; redis-py's default of 32 KiB halves the rate of GET
_NUM_RETRIES = 30  # with at most a second between two: outlives a restart of the server
_RETRIED = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.BusyLoadingError)


class BufferConnectionError(ConnectionError):
    """The Redis server cannot be used; the message says where it is, why, and what to do."""


def address(url: str) -> str:
    """Where a URL points, without user name or password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    place = parts.netloc.rpartition("@")[2] or "localhost"
    return place if ":" in place else f"{place}:6379"


async def connect(url: str) -> Redis:
    """A client whose commands are retried for about half a minute when the server is away.

    Only idempotent commands may be sent through it, for a retry may apply one twice. Raises
    BufferConnectionError if the server cannot be reached, refuses the password, is too old, or
    may evict keys.
    """
    await _check(url)
    return CancellableRedis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5.0,
        socket_keepalive=True,
        socket_read_size=_READ_BYTES,
        max_connections=4096,  # one for every group that is being pushed at the moment
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), _NUM_RETRIES, _RETRIED),
    )


async def _check(url: str) -> None:
    where = address(url)
    patient = Retry(
        ExponentialWithJitterBackoff(base=0.05, cap=1.0), 30, (exceptions.BusyLoadingError,)
    )
    try:
        probe = Redis.from_url(
            url, protocol=2, socket_timeout=5.0, socket_connect_timeout=5.0, retry=patient
        )
    except ValueError as error:
        raise BufferConnectionError(
            f"buffer.url at {where} is no valid Redis URL: {error}"
        ) from None
    try:
        await probe.execute_command("PING")  # type: ignore[no-untyped-call]
        server = await probe.info("server")
        memory = await probe.info("memory")
    except (exceptions.AuthenticationError, exceptions.ResponseError) as error:
        raise BufferConnectionError(_refusal(where, error)) from None
    except (exceptions.RedisError, OSError) as error:
        raise BufferConnectionError(
            f"cannot reach Redis at {where} ({error}): start it, or correct buffer.url"
        ) from None
    finally:
        await probe.aclose()
    _check_version(where, str(server.get("redis_version", "")))
    _check_policy(where, str(memory.get("maxmemory_policy", "")))


def _refusal(where: str, error: exceptions.RedisError) -> str:
    text = str(error).lower()
    if "authentication required" in text:
        return (
            f"Redis at {where} wants a password: put it in buffer.url (redis://:PASSWORD@{where})"
        )
    if isinstance(error, exceptions.AuthenticationError) or "without any password" in text:
        return f"Redis at {where} refuses the user or password in buffer.url: correct them"
    if isinstance(error, exceptions.NoPermissionError):
        return f"Redis at {where}: the user in buffer.url may not run PING and INFO: allow them"
    return f"Redis at {where} answered an error: {error}"


def _check_version(where: str, version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_VERSION:
        raise BufferConnectionError(
            f"Redis at {where} has version {version or 'unknown'}: use 7.0 or later, or Valkey"
        )


def _check_policy(where: str, policy: str) -> None:
    if policy != "noeviction":
        raise BufferConnectionError(
            f"Redis at {where} has maxmemory-policy={policy or 'unknown'}, which deletes groups "
            "silently when memory is full: CONFIG SET maxmemory-policy noeviction"
        )
