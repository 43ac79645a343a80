"""Keeps a worker's router informed: which engines there are, their versions and load.

RunState   engines' URLs and versions, the trainer's version ──┐
buffer     max_staleness ──────────────────────────────────────┼──► EngineWatch ──► Router
engines    load, every half second at most ── poll_load ───────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from buffer.replay_buffer import ReplayBuffer
from buffer.run_state import EngineRoutes, RunState
from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.engine_client import EngineClient, EngineError
from rollout_pool.sampling.router import Router

ASK_EVERY_S = 0.5
"""A cheap request: an engine replies from memory shared with its scheduler."""
ASKED_PER_S = 64.0
"""Limit of one worker: with many engines each is asked less often, or the worker would do little
else."""


async def poll_load(router: Router, engine: EngineClient, every_s: float = ASK_EVERY_S) -> None:
    """Tell `router` an engine's load, again and again. Never returns."""
    counters = engine.counters
    seen = counters.num_preemptions
    while True:
        try:
            load = await engine.load()
        except EngineError:
            router.note_silence(engine.name)
        else:
            preempted, seen = counters.num_preemptions - seen, counters.num_preemptions
            router.note_load(engine.name, load, preempted)
        await asyncio.sleep(max(every_s, len(router.engines) / ASKED_PER_S))


LOOK_AGAIN_S = 5.0
"""Longest delay until a new max_staleness is seen; versions are seen at once."""


@dataclass(eq=False)
class EngineWatch:
    """Follows the run's engines and its trainer for one router; `close` ends the connections.

    An engine may join, leave, or come back at another URL at any time.
    """

    router: Router
    state: RunState
    buffer: ReplayBuffer
    connect: Callable[[str, str], EngineClient]
    """Makes a connection from an engine's name and URL."""
    load_every_s: float = ASK_EVERY_S
    connections: dict[str, EngineClient] = field(default_factory=dict, init=False)
    """By the engine's name."""
    _polls: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _failed: asyncio.Future[None] = field(init=False)
    """Gets the error that ends a poll: none does while all is well."""
    _routes: EngineRoutes = field(default=EngineRoutes({}, frozenset(), {}), init=False)
    _trainer: int = field(default=0, init=False)
    _max_staleness: int = field(default=0, init=False)

    async def run(self) -> None:
        """Never returns. Raises what the connection to Redis raises."""
        self._failed = asyncio.get_running_loop().create_future()
        await self._look_at_trainer()
        await asyncio.gather(self._follow_engines(), self._follow_trainer(), self._failed)

    async def close(self) -> None:
        for name in [*self.connections]:
            await self._disconnect(name)

    async def _follow_engines(self) -> None:
        while True:
            before = self._routes
            self._routes = await self.state.wait_routes_changed(before, LOOK_AGAIN_S)
            await self._connect_to(before.urls, self._routes.urls)
            self._inform_router()

    async def _connect_to(self, before: Mapping[str, str], urls: Mapping[str, str]) -> None:
        for name in before:
            if urls.get(name) != before[name]:
                await self._disconnect(name)
        for name, url in urls.items():
            if name not in self.connections:
                self.connections[name] = connection = self.connect(name, url)
                self.router.join(connection)
                poll = poll_load(self.router, connection, self.load_every_s)
                self._polls[name] = asyncio.create_task(poll)
                self._polls[name].add_done_callback(self._note_end)

    async def _disconnect(self, name: str) -> None:
        await end_tasks([self._polls.pop(name)])
        self.router.leave(name)
        await self.connections.pop(name).close()

    def _note_end(self, poll: asyncio.Task[None]) -> None:
        if not poll.cancelled() and (error := poll.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    async def _follow_trainer(self) -> None:
        while True:
            with suppress(TimeoutError):
                await self.state.wait_version_above(self._trainer, LOOK_AGAIN_S)
            await self._look_at_trainer()
            self._inform_router()

    async def _look_at_trainer(self) -> None:
        self._trainer = await self.state.trainer_version()
        self._max_staleness = (await self.buffer.get_leash()).max_staleness

    def _inform_router(self) -> None:
        versions, draining, _ = self._routes
        self.router.follow(versions, self._trainer, self._max_staleness, draining)
