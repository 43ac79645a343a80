"""A client of a Redis Cluster: finds the node that holds a key, also after a failover.

redis-py's cluster client refuses EVALSHA in pipelines and retries by its own rules. Here one plain
client per node does the work, and this one routes commands by their key:

    evalsha(sha, 1, "{leash:RUN:2}", ...) -> slot of "leash:RUN:2" -> node -> its BufferRedis

After MOVED, a lost connection or a demoted node it asks any live node for the slots again.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_right
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import Redis
from redis.crc import key_slot

from buffer.redis.client import BufferRedis

Address = tuple[str, int]

_ASK_TIMEOUT_S = 5.0
_FRESH_S = 0.1  # a younger slot map is not refreshed
_ANY_NODE = frozenset({"PING", "INFO", "TIME"})
_ONE_NODE_ONLY = frozenset({"SCAN", "KEYS", "DBSIZE", "RANDOMKEY"})


class SlotRange(NamedTuple):
    """Slots `first` to `last`, and the nodes that hold them, the primary first."""

    first: int
    last: int
    nodes: tuple[Address, ...]


class ClusterRedis(BufferRedis):
    """A client of all nodes of a cluster. Every pipeline and script has keys of one slot."""

    def __init__(self, seed: Address, connection_options: dict[str, Any], try_for_s: float) -> None:
        """`connection_options` are those of a ConnectionPool without host and port."""
        self._options = connection_options
        self._seed = seed
        self._clients: dict[Address, BufferRedis] = {}
        self._ranges: list[SlotRange] = []
        self._resolving = asyncio.Lock()
        self._resolved_at = float("-inf")
        super().__init__(connection_pool=self._client(seed).connection_pool)
        self.where, self.try_for_s = f"{seed[0]}:{seed[1]}", try_for_s

    async def resolve(self) -> list[SlotRange]:
        """Asks the cluster which node holds which slots."""
        known = {node for slots in self._ranges for node in slots.nodes} | {self._seed}
        last_error: Exception | None = None
        for address in random.sample(sorted(known), len(known)):
            ask = Redis.execute_command(self._client(address), "CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    reply = await ask
            except (exceptions.ConnectionError, exceptions.TimeoutError, TimeoutError) as error:
                last_error = error  # this node is down: try another one
                continue
            self._ranges = _parse_slots(reply, asked_host=address[0])
            self._resolved_at = time.monotonic()
            return self._ranges
        raise exceptions.ConnectionError(f"no node of the cluster responds: {last_error}")

    def node_for(self, command: tuple[Any, ...]) -> BufferRedis:
        key = key_of(command)
        if key is None:
            return self._client(self._ranges[0].nodes[0])
        slot = key_slot(key.encode() if isinstance(key, str) else key)
        place = bisect_right(self._ranges, slot, key=lambda slots: slots.first) - 1
        if place < 0 or slot > self._ranges[place].last:
            raise exceptions.ClusterDownError(
                f"no node of the cluster holds slot {slot}: CLUSTER ADDSLOTSRANGE"
            )
        return self._client(self._ranges[place].nodes[0])

    async def recover(self, error: Exception) -> None:
        async with self._resolving:  # commands that failed together resolve once
            if time.monotonic() - self._resolved_at > _FRESH_S:
                try:
                    await self.resolve()
                except exceptions.ConnectionError:
                    return  # the command raises once its time is up

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self._is_closed = True
        for client in list(self._clients.values()):  # a command under way may add one
            await client.aclose()

    def _client(self, address: Address) -> BufferRedis:
        if address not in self._clients:
            host, port = address
            options = {**self._options, "host": host, "port": port}
            self._clients[address] = BufferRedis.of(options, f"{host}:{port}", 0.0)
        return self._clients[address]


def key_of(command: tuple[Any, ...]) -> str | bytes | None:
    """The key that a command is routed by; None if any node will do."""
    name = str(command[0])
    if name in _ANY_NODE:
        return None
    if name in _ONE_NODE_ONLY:
        raise ValueError(f"{name} sees the keys of one node only: not for a Redis Cluster")
    if name in {"EVALSHA", "EVAL"}:
        key = command[3]
    elif name == "XREAD":
        key = command[command.index(b"STREAMS") + 1]
    else:
        key = command[1]
    assert isinstance(key, str | bytes)
    return key


def _parse_slots(reply: list[Any], asked_host: str) -> list[SlotRange]:
    ranges = []
    for first, last, *nodes in reply:
        # A node that does not know its own host leaves it empty: it is the node that was asked.
        addresses = tuple(((host or b"").decode() or asked_host, port) for host, port, *_ in nodes)
        ranges.append(SlotRange(first, last, addresses))
    return sorted(ranges)
