"""The actor of one rollout worker."""

from __future__ import annotations

import asyncio
import contextlib

import ray

from rollout_pool.actors.names import scorer_names, worker_names
from rollout_pool.actors.placed import PlacedActor, listen_host, log_to_stderr
from rollout_pool.rewards.scorer_actors import RayScorer, RemoteScoring
from rollout_pool.types import EvalReport, RolloutSpec, WorkerReport
from rollout_pool.worker.build import WorkerParts

STOP_TIMEOUT_S = 60.0
"""Longest wait for a worker's `run` to end."""


class WorkerActor(PlacedActor):
    """One rollout worker in a process of its own.

    When its process dies, Ray restarts the actor and repeats the calls that had no reply. The
    first of them prepares the new worker; `run` reclaims the groups of the one before and goes on.
    """

    def __init__(self, spec: RolloutSpec, index: int) -> None:
        log_to_stderr()
        # Looked up by name: with a handle among its arguments Ray could not restart this actor
        # once the driver's object store has forgotten it.
        scorers = [RayScorer(ray.get_actor(name)) for name in scorer_names(spec)]
        scoring = RemoteScoring(scorers) if scorers else None
        self._spec, self._name = spec, worker_names(spec)[index]
        self._parts = WorkerParts(spec, index, scoring=scoring, host=listen_host(spec.host))
        self._getting_ready: asyncio.Task[None] | None = None
        self._running: asyncio.Task[WorkerReport] | None = None
        self._is_draining = False
        self._stopping = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._is_closed = asyncio.Event()

    async def start(self) -> None:
        """Prepare, while the engines start. Raises ValueError for a bad task or model."""
        if self._getting_ready is None:
            self._getting_ready = asyncio.create_task(self._parts.prepare())
        await asyncio.shield(self._getting_ready)

    async def spec(self) -> RolloutSpec:
        return self._spec

    async def run(self) -> WorkerReport:
        """The report comes after `stop`. A controller that attaches calls it again."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> WorkerReport:
        await self.start()
        if self._stopping.is_set():
            self._parts.worker.stop()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            state, record = self._parts.worker.state, {"worker": self._name}
            await state.count("workers_restarted")
            await state.append_metrics(record, "worker_back")
        try:
            report = await self._parts.worker.run()
        finally:
            self._has_ended.set()
        if self._is_draining:
            await self._stopping.wait()  # unless the process ends before: Ray repeats the call
        return report

    async def drain(self, limit_s: float) -> None:
        """End `run` as RolloutWorker.drain does, but do not reply to it: the next process goes on.
        This one can be killed then."""
        self._is_draining = True
        if self._getting_ready is not None and self._getting_ready.done():
            await self._parts.worker.drain(limit_s)
        if self._running is not None:
            await self._has_ended.wait()

    async def evaluate(self, version: int, engine: str | None) -> EvalReport:
        await self.start()
        return await self._parts.worker.evaluator.run(version, engine)

    async def stop(self) -> None:
        """End `run`; evaluations still get their reply.

        Returns only after `run` has ended: if the process dies before, Ray repeats the call.
        """
        self._stopping.set()
        if self._getting_ready is not None and self._getting_ready.done():
            self._parts.worker.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._has_ended.wait()

    async def wait_dead(self) -> str:
        """Returns after `close`; Ray raises at the reference when the process is gone for good.
        (Ray logs an error for a call that is open when the actor is killed.)"""
        await self._is_closed.wait()
        return "was closed"

    async def close(self) -> None:
        await self._parts.close()
        self._is_closed.set()
