"""Checks that a server has written to disk what it was sent, and that it is still the same server.

A killed server comes back without the last second or two of its log, and a replica takes over
without the writes that had not reached it. In that older state a group pushed since is still
running: its credit expires, and its prompt runs again. So clients keep no copy of what they pushed;
a client that is about to exit waits here until its pushes are durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from redis import exceptions

from buffer.redis.client import BufferRedis
from buffer.redis.deadline import Deadline
from buffer.redis.wakeups import WakeStreams

_ROUND_EVERY_S = 0.2
_WAIT_MS = 5_000
_MARKER_EXPIRY_MS = 60_000
_SETTLE_S = 2.5
"""Without WAITAOF: after this long, a server with a healthy disk has called fsync (each second)."""

_log = logging.getLogger(__name__)


class Durability:
    """Durability of the writes to one server, under one hash tag."""

    def __init__(self, redis: BufferRedis, marker: str, wake: WakeStreams) -> None:
        """`marker` is a key under the hash tag, written before each WAIT."""
        self._redis = redis
        self._marker = marker
        self._wake = wake
        self._server = ""
        self._noting = asyncio.Lock()
        self._num_replicas = 0
        self._can_wait_aof = True

    async def note_server(self) -> None:
        """Records which server pushes go to. Call it before the first push."""
        if self._server:
            return
        async with self._noting:
            if self._server:  # another push was first
                return
            _, info = await self._ask(1)
            self._server = info["run_id"]
            if not info["aof_enabled"]:
                _log.warning(
                    "Redis has no append-only file, so a crash loses pushed groups: set "
                    "appendonly yes"
                )

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all earlier writes are on disk, and on a replica if one is connected.

        False on timeout, or if the server was restarted or replaced since the first push or the
        last flush: some writes may be lost.
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
                _log.warning("cannot tell yet whether Redis has written to disk: %s", error)
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
        """Returns whether the server knows all earlier writes to be durable, and its INFO."""
        wait_ms, num_replicas = max(1, min(_WAIT_MS, timeout_ms)), self._num_replicas
        async with self._redis.pipeline(transaction=False) as pipe:
            # WAIT and WAITAOF cover only writes of their own connection, so write something first.
            pipe.set(self._marker, "", px=_MARKER_EXPIRY_MS)
            pipe.execute_command("WAIT", num_replicas, wait_ms)
            pipe.info("server", "replication", "persistence")
            if self._can_wait_aof:
                pipe.execute_command("WAITAOF", 1, 0, wait_ms)
            written, num_acknowledged, info, *synced = await pipe.execute(raise_on_error=False)
        for reply in (written, num_acknowledged, info):
            if isinstance(reply, Exception):
                raise reply
        # A replica that is still syncing does not count: that may take minutes.
        slaves = (info.get(f"slave{i}", {}) for i in range(info.get("connected_slaves", 0)))
        self._num_replicas = min(1, sum(slave.get("state") == "online" for slave in slaves))
        is_safe = num_acknowledged >= num_replicas and num_replicas >= self._num_replicas
        return is_safe and self._is_synced(info, synced), info

    def _is_synced(self, info: dict[str, Any], synced: list[Any]) -> bool:
        if not info["aof_enabled"]:
            return True  # nothing to wait for: `note_server` has warned
        if not self._can_wait_aof:
            is_late = info.get("aof_pending_bio_fsync", 0) > 0
            return info["aof_last_write_status"] == "ok" and not is_late
        if not isinstance(synced[0], Exception):
            return bool(synced[0][0] >= 1)
        is_unknown = "unknown command" in str(synced[0]).lower()
        if not is_unknown and not isinstance(synced[0], exceptions.NoPermissionError):
            raise synced[0]
        self._can_wait_aof = False  # Redis before 7.2 only reports whether an fsync is late
        return False
