"""What one engine does when the trainer publishes a version.

    pause ── receive bucket 0 ── receive bucket 1 ── ... ── resume ──► CommitReport
      └──────────────── pause_s: no token is decoded ────────┘

Between two buckets the weights are of neither version. If one fails, the engine stays paused for
good: it must never decode a token with torn weights.
"""

from __future__ import annotations

import time

from configs.schema import PauseMode
from rollout_pool.generation import EngineError
from rollout_pool.sglang_client import SGLangClient
from weight_sync.types import Bucket, CommitReport, GroupSpec


class Committer:
    """Takes an engine from one version to the next. One call at a time, in the order above."""

    def __init__(self, client: SGLangClient, pause_mode: PauseMode) -> None:
        self._client = client
        self._pause_mode = pause_mode
        self._group: GroupSpec | None = None
        self._paused_at: float | None = None
        self._is_torn = False

    async def join_group(self, spec: GroupSpec, rank_offset: int) -> None:
        """Enter a weight group, leaving the one of an earlier membership epoch."""
        if self._group is not None:
            await self._client.leave_weight_group(self._group)
            self._group = None
        await self._client.join_weight_group(spec, rank_offset)
        self._group = spec

    async def pause(self) -> None:
        self._check_whole()
        self._paused_at = time.perf_counter()
        await self._client.pause(self._pause_mode)

    async def receive(self, bucket: Bucket, spec: GroupSpec, version: int) -> None:
        """Load one bucket. Raises EngineError, also for every later call, if it does not arrive."""
        self._check_whole()
        if self._paused_at is None:
            # A running server would first wait for all its requests, and hang the whole group.
            raise EngineError(f"{self._client.name} got a bucket while it was not paused")
        self._is_torn = True
        await self._client.receive(bucket, spec, version)
        self._is_torn = False

    async def resume(self, version: int) -> CommitReport:
        """Let the engine go on, now at `version`.

        Raises EngineError if the engine says that it serves another version.
        """
        self._check_whole()
        if self._paused_at is None:
            raise EngineError(f"{self._client.name} was told to resume while it was not paused")
        await self._client.resume()
        pause_s = time.perf_counter() - self._paused_at
        self._paused_at = None
        served = await self._client.served_version()
        if served != version:
            raise EngineError(
                f"{self._client.name} serves version {served} after the commit of {version}"
            )
        return CommitReport(
            engine=self._client.name, version=version, pause_s=pause_s, served_version=served
        )

    def _check_whole(self) -> None:
        if self._is_torn:
            raise EngineError(
                f"{self._client.name} holds torn weights: a bucket did not arrive; start it again"
            )
