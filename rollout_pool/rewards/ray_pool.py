"""Scoring processes on the nodes of a cluster: Ray actors, thin shells round `RewardPool`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from configs.rollout_schema import TaskConfig
from rollout_pool.rewards.part import PartScore
from rollout_pool.rewards.pool import DEFAULT_FACTORY, RewardPool
from rollout_pool.rewards.remote_pool import Answers

LINGER_S = 0.02
"""Answers that are there by then go back together."""
ASK_AGAIN_S = 0.5


class ScorerActor:
    """`num_processes` scoring processes. Ray starts it anew when it dies (max_restarts=-1)."""

    def __init__(
        self,
        config: TaskConfig,
        num_processes: int,
        timeout_s: float,
        log_path: str,
        factory: str = DEFAULT_FACTORY,
    ) -> None:
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        self._pool = RewardPool(
            config,
            num_processes=num_processes,
            timeout_s=timeout_s,
            log_path=Path(log_path),
            factory=factory,
        )
        self._starting: asyncio.Task[None] | None = None
        self._num_open = 0

    async def start(self) -> None:
        """Until its processes are ready; any number of times.

        Raises ValueError if the task refuses its config, RewardError if none can be started.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._pool.start())
        await asyncio.shield(self._starting)

    async def score(self, requests: list[bytes]) -> AsyncIterator[Answers]:
        """Answers as they come. What is open when its caller is gone is still scored."""
        await self.start()
        pending = {
            asyncio.create_task(self._one(place, request)) for place, request in enumerate(requests)
        }
        done, pending = await asyncio.wait(pending, timeout=LINGER_S)
        while done or pending:
            if done:
                yield [answer.result() for answer in done]
            if not pending:
                return
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def load(self) -> int:
        """Requests that are open."""
        return self._num_open

    async def close(self) -> None:
        await self._pool.close()

    async def pid(self) -> int:
        return os.getpid()

    async def _one(self, place: int, request: bytes) -> tuple[int, PartScore]:
        self._num_open += 1
        try:
            return place, await self._pool.score(request)
        finally:
            self._num_open -= 1


class RayScorer:
    """A `ScoringHost`: the handle of a ScorerActor."""

    def __init__(self, handle: Any) -> None:
        """Ray gives handles no useful static type."""
        self._handle = handle

    async def score(self, requests: list[bytes]) -> AsyncIterator[Answers]:
        try:
            async for answers in self._handle.score.remote(requests):
                yield await answers
        except RayActorError as error:
            raise ConnectionError(str(error)) from error

    async def wait_ready(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await self._handle.start.remote()
                    return
                except RayActorError:  # it is being started anew
                    await asyncio.sleep(ASK_AGAIN_S)
