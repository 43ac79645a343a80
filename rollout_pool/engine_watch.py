"""Tells a worker's router what the engines serve and how busy they are, as soon as that changes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from buffer.replay_buffer import ReplayBuffer
from buffer.run_state import RunState
from rollout_pool.engine_load import LoadPoller
from rollout_pool.router import Router

LOOK_AGAIN_S = 5.0
"""A new max_staleness is seen after this time at the latest; engines and versions at once."""


class EngineWatch:
    """Follows the run's engines and its trainer for one router."""

    def __init__(
        self, router: Router, state: RunState, buffer: ReplayBuffer, loads: LoadPoller
    ) -> None:
        self._router = router
        self._loads = loads
        self._state = state
        self._buffer = buffer
        self._engines: dict[str, int] = {}
        self._trainer = self._max_staleness = 0

    async def run(self) -> None:
        """Never returns. Raises what the connection to Redis raises."""
        await self._look_at_trainer()
        await asyncio.gather(self._follow_engines(), self._follow_trainer(), self._loads.run())

    async def _follow_engines(self) -> None:
        while True:
            self._engines = await self._state.wait_engines_changed(self._engines, LOOK_AGAIN_S)
            self._tell()

    async def _follow_trainer(self) -> None:
        while True:
            with suppress(TimeoutError):
                await self._state.wait_version_above(self._trainer, LOOK_AGAIN_S)
            await self._look_at_trainer()
            self._tell()

    async def _look_at_trainer(self) -> None:
        self._trainer = await self._state.trainer_version()
        self._max_staleness = await self._buffer.get_max_staleness()

    def _tell(self) -> None:
        self._router.follow(self._engines, self._trainer, self._max_staleness)
