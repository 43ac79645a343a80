"""Asks a server whether it has on disk what it was sent, and whether it is still the same server.

A server that was killed comes back without the last second or two of its log, and a replica takes
over without what had not reached it. Either is a picture of an earlier moment, in which a group
that was pushed since is still running: its credit ends, and its prompt runs again. So no client
keeps what it pushed; one that is about to end waits here until it is safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from redis import exceptions

from buffer.redis.client import BufferRedis
from buffer.redis.wakeups import Deadline, WakeStreams

_ROUND_EVERY_S = 0.2
_WAIT_MS = 5_000
_MARKER_EXPIRY_MS = 60_000
_SETTLE_S = 2.5
"""Without WAITAOF: after this long, a server with a healthy disk has called fsync (each second)."""

_log = logging.getLogger(__name__)


class Durability:
    """What one server, which has one hash tag, says of its disk."""

    def __init__(self, redis: BufferRedis, marker: str, wake: WakeStreams) -> None:
        """`marker` is a key below the hash tag, written before each question."""
        self._redis = redis
        self._marker = marker
        self._wake = wake
        self._server = ""
        self._noting = asyncio.Lock()
        self._num_replicas = 0
        self._can_wait_aof = True

    async def note_server(self) -> None:
        """Before the first push: which server it goes to."""
        if self._server:
            return
        async with self._noting:
            if self._server:  # many may push at once
                return
            _, info = await self._ask(1)
            self._server = info["run_id"]
            if not info["aof_enabled"]:
                _log.warning(
                    "Redis keeps no append-only file: a crash of it loses pushed groups; "
                    "set appendonly yes"
                )

    async def flush(self, timeout_s: float) -> bool:
        """Waits until what was sent before is on disk, and at a replica where one is connected.

        False if it was not in time, or the server is another one than that of the first push or
        the flush before: then some of it may be lost.
        """
        if not self._server:
            return True
        deadline, began_at = Deadline(timeout_s), time.monotonic()
        while True:
            self._wake.check_open()
            try:
                async with asyncio.timeout(max(deadline.left_s, 0.1)):
                    is_safe, info = await self._ask(int(1000 * deadline.left_s))
            except (exceptions.RedisError, OSError) as error:  # TimeoutError is an OSError
                _log.warning("Redis does not say what is on its disk yet: %s", error)
            else:
                if info["run_id"] != self._server:
                    self._server = info["run_id"]
                    return False
                has_settled = time.monotonic() - began_at >= _SETTLE_S
                if is_safe and (self._can_wait_aof or has_settled or not info["aof_enabled"]):
                    return True
            if not deadline.left_s:
                return False
            await asyncio.sleep(min(_ROUND_EVERY_S, deadline.left_s))

    async def _ask(self, timeout_ms: int) -> tuple[bool, dict[str, Any]]:
        """Whether all that came before is safe as far as the server can say, and its INFO."""
        wait_ms, num_replicas = max(1, min(_WAIT_MS, timeout_ms)), self._num_replicas
        async with self._redis.pipeline(transaction=False) as pipe:
            # Both waits are for the writes of their own connection, so one goes before them.
            pipe.set(self._marker, "", px=_MARKER_EXPIRY_MS)
            pipe.execute_command("WAIT", num_replicas, wait_ms)
            pipe.info("server", "replication", "persistence")
            if self._can_wait_aof:
                pipe.execute_command("WAITAOF", 1, 0, wait_ms)
            written, num_acknowledged, info, *synced = await pipe.execute(raise_on_error=False)
        for reply in (written, num_acknowledged, info):
            if isinstance(reply, Exception):
                raise reply
        # One that is still copying what is there does not count: it may take minutes.
        slaves = (info.get(f"slave{i}", {}) for i in range(info.get("connected_slaves", 0)))
        self._num_replicas = min(1, sum(slave.get("state") == "online" for slave in slaves))
        is_safe = num_acknowledged >= num_replicas and num_replicas >= self._num_replicas
        return is_safe and self._is_synced(info, synced), info

    def _is_synced(self, info: dict[str, Any], synced: list[Any]) -> bool:
        if not info["aof_enabled"]:
            return True  # as safe as it gets: the warning was given
        if not self._can_wait_aof:
            is_late = info.get("aof_pending_bio_fsync", 0) > 0
            return info["aof_last_write_status"] == "ok" and not is_late
        if not isinstance(synced[0], Exception):
            return bool(synced[0][0] >= 1)
        is_unknown = "unknown command" in str(synced[0]).lower()
        if not is_unknown and not isinstance(synced[0], exceptions.NoPermissionError):
            raise synced[0]
        self._can_wait_aof = False  # Redis before 7.2: it can say that no fsync is late
        return False
