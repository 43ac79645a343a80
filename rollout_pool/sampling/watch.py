"""Keeps a worker's router informed of the engines' versions and load.

RunState   engines' versions, the trainer's version ──┐
buffer     max_staleness ─────────────────────────────┼──► EngineWatch ──► Router
engines    load, every half second ──► LoadPoller ────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from buffer.roles import WorkerBuffer
from buffer.run_state import RunState
from rollout_pool.sampling.engine_client import EngineError, LoadSource
from rollout_pool.sampling.router import Router

ASK_EVERY_S = 0.5
"""A cheap request: an engine answers from memory shared with its scheduler."""


class LoadPoller:
    """Polls the load of each engine every `every_s`, independently of the others."""

    def __init__(
        self, router: Router, engines: Sequence[LoadSource], every_s: float = ASK_EVERY_S
    ) -> None:
        self._router = router
        self._engines = engines
        self._every_s = every_s

    async def run(self) -> None:
        """Never returns."""
        await asyncio.gather(*(self._follow(engine) for engine in self._engines))

    async def _follow(self, engine: LoadSource) -> None:
        seen = engine.num_preemptions
        while True:
            try:
                load = await engine.load()
            except EngineError:
                self._router.note_silence(engine.name)
            else:
                preempted, seen = engine.num_preemptions - seen, engine.num_preemptions
                self._router.note_load(engine.name, load, preempted)
            await asyncio.sleep(self._every_s)


LOOK_AGAIN_S = 5.0
"""Longest delay until a new max_staleness is seen; versions are seen at once."""


class EngineWatch:
    """Follows the run's engines and its trainer for one router."""

    def __init__(
        self, router: Router, state: RunState, buffer: WorkerBuffer, loads: LoadPoller
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
            self._inform_router()

    async def _follow_trainer(self) -> None:
        while True:
            with suppress(TimeoutError):
                await self._state.wait_version_above(self._trainer, LOOK_AGAIN_S)
            await self._look_at_trainer()
            self._inform_router()

    async def _look_at_trainer(self) -> None:
        self._trainer = await self._state.trainer_version()
        self._max_staleness = await self._buffer.get_max_staleness()

    def _inform_router(self) -> None:
        self._router.follow(self._engines, self._trainer, self._max_staleness)
