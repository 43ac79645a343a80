"""A Redis client that waits for a server that is away, and that can be cancelled."""

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

from buffer.redis.payloads import Allocate, PayloadConnection, PayloadConnections, Value

T = TypeVar("T")

SOCKET_TIMEOUT_S = 20.0
"""Longest that a server may take for a reply, besides the time for which it was told to block."""
TRY_FOR_S = 60.0
"""Longest that a command waits for a server that is away."""
LOADING_S = 600.0
"""Longest that a command waits for a server that is there and still loads its data."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,  # was demoted to a replica this moment
    # The same in a cluster. A slot that is just being moved answers ASK or TRYAGAIN; to follow it
    # would run a script on one half of a run's keys, so it is waited for.
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.AskError,
)


class BufferConnectionError(ConnectionError):
    """The Redis server cannot be used; the message says where it is, why, and what to do."""


class MemoryFullError(exceptions.OutOfMemoryError, RuntimeError):
    """The server refused a write for it has no memory left. Nothing was changed or lost."""


class DiskFullError(exceptions.ResponseError, RuntimeError):
    """The server refused a write for it cannot write its log. Nothing was changed or lost."""


class NotAllowedError(exceptions.NoPermissionError, RuntimeError):
    """The user in buffer.url may not run a command or use a key."""


class DamagedRunError(exceptions.ResponseError, RuntimeError):
    """What a run keeps in Redis is not what Leash wrote there, and the run needs it."""


_EXPLAINED = (MemoryFullError, DiskFullError, NotAllowedError, DamagedRunError)
_DAMAGED = ("WRONGTYPE", "DAMAGED")
_CODE_WORD = re.compile(r"(?!ERR )[A-Z]{3,} ")
_ACL_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")


class BufferRedis(Redis):
    """A client of one server.

    A command or a pipeline that meets no server, or a lost reply, is sent again for `try_for_s`,
    so only idempotent ones may be sent. Then it raises BufferConnectionError. Commands that block
    have as much more time for their reply.
    """

    where = ""
    """Host and port, for messages."""
    try_for_s = TRY_FOR_S
    """Longest that a command waits for a server that is away."""
    reached_at = float("-inf")
    """When the server was last seen, on this process's monotonic clock."""

    @classmethod
    def of(cls, connection_options: dict[str, Any], where: str, try_for_s: float) -> BufferRedis:
        """A client whose connections are made with these arguments."""
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
        """Commands for keys of one slot, in one round trip."""
        return _PatientPipeline(self, transaction)

    async def exchange(
        self, parts: Sequence[bytes | memoryview], num_replies: int, key: str
    ) -> list[Any]:
        """Sends commands for the slot of `key` that are packed already, in one round trip.

        Returns the replies as they come, error replies among them.
        """
        replies = await self._use_connection(key, lambda one: one.exchange(parts, num_replies))
        return [
            explained(reply, self.where) if isinstance(reply, exceptions.ResponseError) else reply
            for reply in replies
        ]

    async def receive(self, keys: Sequence[str], allocate: Allocate) -> list[Value]:
        """The values of keys of one slot, in memory of `allocate`; None where there is no key."""
        replies = await self._use_connection(keys[0], lambda one: one.receive(keys, allocate))
        for reply in replies:
            if isinstance(reply, exceptions.ResponseError):
                raise explained(reply, self.where)
        return replies

    async def _use_connection(
        self, key: str, call: Callable[[PayloadConnection], Awaitable[list[Any]]]
    ) -> list[Any]:
        """The replies to a call on a payload connection to the server that holds the key."""
        routed = ("GET", key)

        async def attempt() -> list[Any]:
            node = self.node_for(routed)
            async with node.payload_connections.one() as connection:
                replies = await call(connection)
            node.reached_at = time.monotonic()
            for reply in replies:
                if isinstance(reply, _AWAY):
                    raise reply
            return replies

        return await self.patiently(attempt, routed)

    @cached_property
    def payload_connections(self) -> PayloadConnections:
        return PayloadConnections(self.connection_pool)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.payload_connections.aclose()
        await super().aclose(close_connection_pool)

    def node_for(self, command: tuple[Any, ...]) -> BufferRedis:
        """The client of the server that holds the command's key."""
        return self

    async def recover(self, error: Exception) -> None:
        """Called before a command is tried again."""

    async def patiently(self, attempt: Callable[[], Awaitable[T]], command: tuple[Any, ...]) -> T:
        """Repeats `attempt`, which sends `command`, while the server is away."""
        failed_at: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except exceptions.AuthenticationError:
                raise  # redis-py takes it for a lost connection; it would never end
            except _AWAY as error:
                now = time.monotonic()
                failed_at = now if failed_at is None else failed_at
                # A wait that was cut off by several crashes met a server in between.
                away_s = now - max(failed_at, self._reached_at(command))
                is_loading = isinstance(error, exceptions.BusyLoadingError)
                if away_s > (LOADING_S if is_loading else self.try_for_s):
                    raise BufferConnectionError(
                        f"Redis at {self.where} is away since {away_s:.0f} s "
                        f"({error}): start it again on its data, or correct buffer.url"
                    ) from error
                # Jitter, or all clients of a server that comes back would arrive together.
                await sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                await self.recover(error)

    def _reached_at(self, command: tuple[Any, ...]) -> float:
        try:
            return self.node_for(command).reached_at
        except exceptions.ClusterDownError:
            return float("-inf")

    async def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        blocked_s = options.pop("blocked_s", 0.0)
        self.reached_at = time.monotonic()  # the command was sent, so there is a server
        usual = connection.socket_timeout
        connection.socket_timeout = usual + blocked_s  # it is ours alone until the reply
        try:
            return await super().parse_response(connection, command_name, **options)
        finally:
            connection.socket_timeout = usual


class _PatientPipeline(Pipeline):
    """A pipeline that is repeated as a whole."""

    def __init__(self, client: BufferRedis, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """The replies. Raises the first error among them, unless told to return errors too."""
        commands = self.command_stack
        if not commands:
            return []
        where = self._client.where
        try:
            replies = await self._client.patiently(lambda: self._once(commands), commands[0][0])
        except exceptions.ResponseError as error:  # of a transaction that was refused as a whole
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
            if isinstance(reply, _AWAY):
                raise reply
        return replies


def explained(error: exceptions.ResponseError, where: str) -> exceptions.ResponseError:
    """The error itself, or one that says what to do, if that is known."""
    if isinstance(error, _EXPLAINED):
        return error
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError):
        return MemoryFullError(
            f"Redis at {where} has no memory left and refused the write; nothing was lost. Raise "
            "its maxmemory, set buffer.capacity_bytes below it (pushes then wait for room), or "
            f"lower buffer.max_staleness ({text})"
        )
    if text.startswith("MISCONF"):
        return DiskFullError(
            f"Redis at {where} cannot write its append-only file and refused the write; nothing "
            "that it acknowledged before was lost. Make room on its disk; it takes writes again "
            f"by itself ({text})"
        )
    if isinstance(error, exceptions.NoPermissionError) or text.startswith(_ACL_IN_SCRIPT):
        return NotAllowedError(
            f"Redis at {where} does not allow the user in buffer.url a command ({text}): see "
            "deploy/redis/ for what each role needs"
        )
    # A script's own fault has no code word in front, as those of the server have (NOREPLICAS, ...).
    if text.startswith(_DAMAGED) or ("@user_script" in text and not _CODE_WORD.match(text)):
        return DamagedRunError(
            f"what the run keeps in Redis at {where} was changed by something else than Leash "
            f"({text}): launch the run anew under another run.name, and keep others from its keys "
            "(deploy/redis/README.md)"
        )
    return error


def _blocks_for_s(command: tuple[Any, ...]) -> float:
    """For how long a command tells the server to block."""
    if command[0] != "XREAD" or b"BLOCK" not in command:
        return 0.0
    return float(command[command.index(b"BLOCK") + 1]) / 1000
