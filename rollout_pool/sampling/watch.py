"""Keeps a worker's router informed of the engines' versions and load.

RunState   engines' versions, the trainer's version ──┐
buffer     max_staleness ─────────────────────────────┼──► EngineWatch ──► Router
engines    load, every half second ──► LoadPoller ────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from buffer.roles import WorkerBuffer
from buffer.run_state import Routes, RunState
from rollout_pool.sampling.engine_client import EngineError, LoadSource
from rollout_pool.sampling.router import Router

ASK_EVERY_S = 0.5
"""A cheap request: an engine answers from memory shared with its scheduler."""


@dataclass(eq=False)
class LoadPoller:
    """Polls the load of each engine every `every_s`, independently of the others."""

    router: Router
    engines: Sequence[LoadSource]
    every_s: float = ASK_EVERY_S

    async def run(self) -> None:
        """Never returns."""
        await asyncio.gather(*(self._follow(engine) for engine in self.engines))

    async def _follow(self, engine: LoadSource) -> None:
        seen = engine.num_preemptions
        while True:
            try:
                load = await engine.load()
            except EngineError:
                self.router.note_silence(engine.name)
            else:
                preempted, seen = engine.num_preemptions - seen, engine.num_preemptions
                self.router.note_load(engine.name, load, preempted)
            await asyncio.sleep(self.every_s)


LOOK_AGAIN_S = 5.0
"""Longest delay until a new max_staleness is seen; versions are seen at once."""


@dataclass(eq=False)
class EngineWatch:
    """Follows the run's engines and its trainer for one router."""

    router: Router
    state: RunState
    buffer: WorkerBuffer
    loads: LoadPoller
    _routes: Routes = field(default=Routes({}, frozenset()), init=False)
    _trainer: int = field(default=0, init=False)
    _max_staleness: int = field(default=0, init=False)

    async def run(self) -> None:
        """Never returns. Raises what the connection to Redis raises."""
        await self._look_at_trainer()
        await asyncio.gather(self._follow_engines(), self._follow_trainer(), self.loads.run())

    async def _follow_engines(self) -> None:
        while True:
            self._routes = await self.state.wait_routes_changed(self._routes, LOOK_AGAIN_S)
            self._inform_router()

    async def _follow_trainer(self) -> None:
        while True:
            with suppress(TimeoutError):
                await self.state.wait_version_above(self._trainer, LOOK_AGAIN_S)
            await self._look_at_trainer()
            self._inform_router()

    async def _look_at_trainer(self) -> None:
        self._trainer = await self.state.trainer_version()
        self._max_staleness = await self.buffer.get_max_staleness()

    def _inform_router(self) -> None:
        versions, draining = self._routes
        self.router.follow(versions, self._trainer, self._max_staleness, draining)
