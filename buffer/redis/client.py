"""A Redis client that retries while the server is down, and that can be cancelled."""

from __future__ import annotations

import random
import re
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import ConnectionPool

from buffer.redis.payloads import Allocate, PayloadConnection, PayloadConnections

T = TypeVar("T")

SOCKET_TIMEOUT_S = 20.0
"""Longest time for a reply, in addition to the time that a command blocks at the server."""
TRY_FOR_S = 60.0
"""How long a command is retried while the server does not reply."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,  # was just demoted to a replica
    # The same in a cluster. A slot that is being moved replies ASK or TRYAGAIN: following it would
    # run a script on half of a run's keys, so wait until it has moved.
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.AskError,
)


class BufferClosedError(RuntimeError):
    """The buffer was closed before or during a call."""


class BufferConnectionError(ConnectionError):
    """The Redis server cannot be used; the message names its address, the reason and the fix."""


class MemoryFullError(exceptions.OutOfMemoryError, RuntimeError):
    """The server is out of memory and refused a write. Nothing was changed or lost."""


class DiskFullError(exceptions.ResponseError, RuntimeError):
    """The server cannot write its log and refused a write. Nothing was changed or lost."""


class NotAllowedError(exceptions.NoPermissionError, RuntimeError):
    """The user in buffer.url may not run a command or use a key."""


class DamagedRunError(exceptions.ResponseError, RuntimeError):
    """The run's data in Redis was changed by something other than Leash."""


EXPLAINED = (MemoryFullError, DiskFullError, NotAllowedError, DamagedRunError)
"""Refusals of a server that responds; each names the fix."""
_DISK_FULL = "MISCONF"
_DAMAGED = ("WRONGTYPE", "DAMAGED")
_CODE_WORD = re.compile(r"(?!ERR )[A-Z]{3,} ")
_ACL_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")


class BufferRedis(Redis):
    """A client of one server.

    A command or pipeline is retried for `try_for_s` while the server is down or its reply is lost,
    so it must be idempotent; then it raises BufferConnectionError. So is a write that the server
    refuses because its disk or memory is full; then DiskFullError or MemoryFullError. The timeout
    of a blocking command is extended by the time it blocks. `aclose` ends commands under way with
    BufferClosedError.
    """

    where = ""
    """Host and port, for messages."""
    try_for_s = TRY_FOR_S
    """How long a command is retried while the server is down."""
    reached_at = float("-inf")
    """Monotonic time at which the server last responded."""
    _is_closed = False

    @classmethod
    def of(cls, connection_options: dict[str, Any], where: str, try_for_s: float) -> BufferRedis:
        """A client with these arguments for its connection pool."""
        client = cls(connection_pool=ConnectionPool(**connection_options))
        client.auto_close_connection_pool = True  # the pool is this client's own
        client.where, client.try_for_s = where, try_for_s
        return client

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        blocked_s = _blocks_for_s(args)
        if blocked_s:
            options["blocked_s"] = blocked_s

        async def attempt() -> Any:
            return await Redis.execute_command(self.node_for(args), *args, **options)  # type: ignore[no-untyped-call]

        try:
            return await self.patiently(attempt, args)
        except exceptions.ResponseError as error:
            raise explained(error, self.where) from error

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """A pipeline for keys of one slot."""
        return _PatientPipeline(self, transaction)

    async def exchange(
        self, parts: Sequence[bytes | memoryview], num_replies: int, key: str
    ) -> list[Any]:
        """Sends packed commands to the slot of `key` in one round trip.

        Returns the replies, including error replies.
        """
        replies = await self._use_connection(key, lambda one: one.exchange(parts, num_replies))
        return [
            explained(reply, self.where) if isinstance(reply, exceptions.ResponseError) else reply
            for reply in replies
        ]

    async def receive(self, keys: Sequence[str], allocate: Allocate) -> list[memoryview | None]:
        """The values of keys of one slot, in memory of `allocate`; None where there is no key."""
        replies = await self._use_connection(keys[0], lambda one: one.receive(keys, allocate))
        for reply in replies:
            if isinstance(reply, exceptions.ResponseError):
                raise explained(reply, self.where)
        return replies

    async def _use_connection(
        self, key: str, call: Callable[[PayloadConnection], Awaitable[list[Any]]]
    ) -> list[Any]:
        """Calls a payload connection to the server that holds the key."""
        routed = ("GET", key)

        async def attempt() -> list[Any]:
            node = self.node_for(routed)
            async with node.payload_connections.one() as connection:
                replies = await call(connection)
            node.reached_at = time.monotonic()
            for reply in replies:
                if _passes(reply):
                    raise reply
            return replies

        return await self.patiently(attempt, routed)

    @cached_property
    def payload_connections(self) -> PayloadConnections:
        return PayloadConnections(self.connection_pool)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self._is_closed = True
        await self.payload_connections.aclose()
        await super().aclose(close_connection_pool)

    def node_for(self, command: tuple[Any, ...]) -> BufferRedis:
        """The client of the server that holds the command's key."""
        return self

    async def recover(self, error: Exception) -> None:
        """Called before a command is retried."""

    async def patiently(self, attempt: Callable[[], Awaitable[T]], command: tuple[Any, ...]) -> T:
        """Retries `attempt`, which sends `command`, while the server is down or full."""
        try:
            return await self._retried(attempt, command)
        finally:
            if self._is_closed:
                await self.aclose()  # of the connection that was being made while it ran

    async def _retried(self, attempt: Callable[[], Awaitable[T]], command: tuple[Any, ...]) -> T:
        failed_at: float | None = None
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            try:
                return await attempt()
            except exceptions.AuthenticationError:
                raise  # redis-py derives it from ConnectionError; retrying would never end
            except exceptions.RedisError as error:
                if not _passes(error):
                    raise
                now = time.monotonic()
                failed_at = now if failed_at is None else failed_at
                # A blocking command that is interrupted by several crashes had a server in between.
                away_s = now - max(failed_at, self._reached_at(command))
                if isinstance(error, exceptions.BusyLoadingError):
                    # It replies only between two parts of its data, so it advances: no limit.
                    failed_at, away_s = now, 0.0
                if isinstance(error, exceptions.ResponseError) and is_full(error):
                    away_s = now - failed_at  # it answers, and refuses again
                    if away_s > self.try_for_s:
                        raise explained(error, self.where) from error
                elif away_s > self.try_for_s:
                    raise BufferConnectionError(
                        f"Redis at {self.where} has been down for {away_s:.0f} s "
                        f"({error}): start it again on its data, or correct buffer.url"
                    ) from error
                # Jitter, so that not all clients reconnect to a restarted server at once.
                await sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                await self.recover(error)
        raise BufferClosedError("the buffer was closed before or during this call")

    def _reached_at(self, command: tuple[Any, ...]) -> float:
        try:
            return self.node_for(command).reached_at
        except exceptions.ClusterDownError:
            return float("-inf")

    async def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        blocked_s = options.pop("blocked_s", 0.0)
        self.reached_at = time.monotonic()  # the command was sent, so the server is up
        usual = connection.socket_timeout
        connection.socket_timeout = usual + blocked_s  # no one else uses it until the reply
        try:
            return await super().parse_response(connection, command_name, **options)
        finally:
            connection.socket_timeout = usual


class _PatientPipeline(Pipeline):
    """A pipeline that is retried as a whole."""

    def __init__(self, client: BufferRedis, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """The replies. Raises the first error among them unless `raise_on_error` is False."""
        commands = self.command_stack
        if not commands:
            return []
        where = self._client.where
        try:
            replies = await self._client.patiently(lambda: self._once(commands), commands[0][0])
        except exceptions.ResponseError as error:  # the whole transaction was refused
            raise explained(error, where) from error
        finally:
            self.command_stack = []
        replies = [
            explained(reply, where) if isinstance(reply, exceptions.ResponseError) else reply
            for reply in replies
        ]
        for reply in replies if raise_on_error else ():
            if isinstance(reply, exceptions.ResponseError):
                raise reply
        return replies

    async def _once(self, commands: list[Any]) -> list[Any]:
        node = self._client.node_for(commands[0][0])
        self.connection_pool = node.connection_pool
        self.command_stack = list(commands)
        replies: list[Any] = await super().execute(raise_on_error=False)
        node.reached_at = time.monotonic()
        for reply in replies:
            if _passes(reply):
                raise reply
        return replies


def _passes(reply: Any) -> bool:
    """Returns whether a reply is an error that goes by itself.

    Nothing was changed where disk or memory is full: a script is refused at its first write, or as
    a whole.
    """
    return isinstance(reply, _AWAY) or is_full(reply)


def is_full(reply: Any) -> bool:
    """Returns whether a server refuses writes for lack of disk or memory."""
    has_no_disk = isinstance(reply, exceptions.ResponseError) and str(reply).startswith(_DISK_FULL)
    return has_no_disk or isinstance(reply, exceptions.OutOfMemoryError)


def explained(error: exceptions.ResponseError, where: str) -> exceptions.ResponseError:
    """The error, or one that names the fix if that is known."""
    if isinstance(error, EXPLAINED):
        return error
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError):
        return MemoryFullError(
            f"Redis at {where} has no memory left and refused the write; nothing was lost. Raise "
            "its maxmemory, set buffer.capacity_bytes below it (pushes then wait for room), or "
            f"lower buffer.max_staleness ({text})"
        )
    if text.startswith(_DISK_FULL):
        return DiskFullError(
            f"Redis at {where} cannot write its append-only file and refused the write; nothing "
            "that it acknowledged was lost. Free disk space; it then accepts writes again "
            f"by itself ({text})"
        )
    if isinstance(error, exceptions.NoPermissionError) or text.startswith(_ACL_IN_SCRIPT):
        return NotAllowedError(
            f"Redis at {where} does not allow a command to the user in buffer.url ({text}): see "
            "deploy/redis/ for what each role needs"
        )
    # Errors raised by a script have no code word in front, unlike the server's (NOREPLICAS, ...).
    if text.startswith(_DAMAGED) or ("@user_script" in text and not _CODE_WORD.match(text)):
        return DamagedRunError(
            f"the run's data in Redis at {where} was changed by something other than Leash "
            f"({text}): launch the run under another run.name, and restrict access to its keys "
            "(deploy/redis/README.md)"
        )
    return error


def _blocks_for_s(command: tuple[Any, ...]) -> float:
    """How long a command may block at the server."""
    if command[0] != "XREAD" or b"BLOCK" not in command:
        return 0.0
    return float(command[command.index(b"BLOCK") + 1]) / 1000
