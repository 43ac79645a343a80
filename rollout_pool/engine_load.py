"""Asks the engines how busy they are, again and again, and tells the router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout_pool.generation import EngineError, LoadSource
from rollout_pool.router import Router

ASK_EVERY_S = 0.5
"""An engine answers from memory that it shares with its scheduler, at the price of a ping."""


class LoadPoller:
    """One look at each engine every `every_s`, whatever the others do."""

    def __init__(
        self, router: Router, engines: Sequence[LoadSource], every_s: float = ASK_EVERY_S
    ) -> None:
        self._router = router
        self._engines = engines
        self._every_s = every_s

    async def run(self) -> None:
        """Never returns; ends when it is cancelled."""
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
