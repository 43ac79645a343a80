"""One pool over the scoring processes of Ray actors on several hosts (`rollout.reward_actors`).

    score() ──► mailbox of the host with the fewest open requests ──► one call each CALL_GAP_S,
                                                                      with all that is in it

A call costs far more than a request, and episodes often end together. Results return as they become
available, so a slow one does not delay the others of its call.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ray.exceptions import RayActorError

from configs.rollout_schema import TaskConfig
from rollout_pool.cancelling import BackgroundTasks
from rollout_pool.rewards.pool import MAX_ATTEMPTS, RewardPool
from rollout_pool.rewards.types import PartScore

log = logging.getLogger(__name__)

MAX_BATCH = 256
CALL_GAP_S = 0.02
"""The first request is sent at once; those within this time share the next call."""
RETURN_TIMEOUT_S = 300.0
"""How long a lost host may take to return, and how long a request waits if all are lost."""
LINGER_S = 0.02
"""Results available within this time are returned together."""
ASK_AGAIN_S = 0.5

Results = list[tuple[int, PartScore]]
"""Positions in the call, and results."""


class ScoringHost(Protocol):
    """A set of scoring processes in another process."""

    def score(self, requests: list[bytes]) -> AsyncIterator[Results]:
        """Yields all results of one call in any order. Raises ConnectionError if it is lost."""
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until it accepts requests, also after it was lost. Raises ConnectionError or
        TimeoutError if it does not return, ValueError if it refuses the settings."""
        ...


class RemoteScoring:
    """A `ScoringPool` over several hosts. Used in one event loop."""

    def __init__(self, hosts: Sequence[ScoringHost]) -> None:
        assert hosts
        self._lines = [_Line(host, self._lost) for host in hosts]
        self._one_is_back = asyncio.Event()
        self._tasks = BackgroundTasks()
        self.num_lost = 0
        """How often a host was lost."""

    async def start(self) -> None:
        await asyncio.gather(*(line.host.wait_ready(RETURN_TIMEOUT_S) for line in self._lines))

    async def score(self, request: bytes) -> PartScore:
        line: _Line | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                line = await self._pick(rather_not=line)
            except TimeoutError:
                break
            try:
                return await line.ask(request)
            except ConnectionError:
                continue
        return PartScore(failure="the scoring actor died", is_unscored=True)

    async def close(self) -> None:
        await self._tasks.end()
        await asyncio.gather(*(line.calls.end() for line in self._lines))

    async def _pick(self, rather_not: _Line | None) -> _Line:
        async with asyncio.timeout(RETURN_TIMEOUT_S):
            while not (there := [line for line in self._lines if not line.is_lost]):
                self._one_is_back.clear()
                await self._one_is_back.wait()
        return min(there, key=lambda line: (line is rather_not, line.num_open))

    def _lost(self, line: _Line) -> None:
        self.num_lost += 1
        self._tasks.spawn(self._wait_for_return(line))

    async def _wait_for_return(self, line: _Line) -> None:
        try:
            await line.host.wait_ready(RETURN_TIMEOUT_S)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            log.error("a scoring actor is gone for good: %s", error)
            return
        line.is_lost = False
        self._one_is_back.set()


class _Line:
    """The open requests of one host."""

    def __init__(self, host: ScoringHost, lost: Callable[[_Line], None]) -> None:
        self.host = host
        self.is_lost = False
        self.num_open = 0
        self._lost = lost
        self._mailbox: list[tuple[bytes, asyncio.Future[PartScore]]] = []
        self._next_send = 0.0
        self.calls = BackgroundTasks()

    async def ask(self, request: bytes) -> PartScore:
        """Raises ConnectionError if the host is lost meanwhile, and what its call raised."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[PartScore] = loop.create_future()
        self._mailbox.append((request, result))
        if len(self._mailbox) == 1:
            loop.call_at(max(loop.time(), self._next_send), self._send)
        self.num_open += 1
        try:
            return await result
        finally:
            self.num_open -= 1

    def _send(self) -> None:
        self._next_send = asyncio.get_running_loop().time() + CALL_GAP_S
        while self._mailbox:
            batch, self._mailbox = self._mailbox[:MAX_BATCH], self._mailbox[MAX_BATCH:]
            self.calls.spawn(self._call(batch))

    async def _call(self, batch: list[tuple[bytes, asyncio.Future[PartScore]]]) -> None:
        error: Exception = ConnectionError("the scoring actor was lost")
        try:
            async for results in self.host.score([request for request, _ in batch]):
                for place, score in results:
                    if not batch[place][1].done():  # else its caller was cancelled
                        batch[place][1].set_result(score)
        except ConnectionError as lost:
            log.warning("a scoring actor was lost: %s", lost)
            if not self.is_lost:
                self.is_lost = True
                self._lost(self)
        except Exception as failure:  # of the actor's own code: another one would not do better
            error = failure
        finally:
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)


class ScorerActor:
    """`num_processes` scoring processes. Ray restarts it when it dies (max_restarts=-1)."""

    def __init__(
        self,
        config: TaskConfig,
        num_processes: int,
        timeout_s: float,
        log_path: str,
        data: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._pool = RewardPool(
            config,
            num_processes=num_processes,
            timeout_s=timeout_s,
            log_path=Path(log_path),
            data=data,
        )
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Waits until its processes are ready; may be called again. Raises ValueError if the task
        refuses its config, RewardError if none can be started."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._pool.start())
        await asyncio.shield(self._starting)

    async def score(self, requests: list[bytes]) -> AsyncIterator[Results]:
        """Yields results as they come. Open requests are scored even if their caller is gone."""
        await self.start()
        places = {
            asyncio.create_task(self._pool.score(request)): place
            for place, request in enumerate(requests)
        }
        done, pending = await asyncio.wait(places, timeout=LINGER_S)
        while done or pending:
            if done:
                yield [(places[task], task.result()) for task in done]
            if not pending:
                return
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        await self._pool.close()

    async def pid(self) -> int:
        return os.getpid()


class RayScorer:
    """A `ScoringHost`: the handle of a ScorerActor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def score(self, requests: list[bytes]) -> AsyncIterator[Results]:
        try:
            async for results in self._handle.score.remote(requests):
                yield await results
        except RayActorError as error:
            raise ConnectionError(str(error)) from error

    async def wait_ready(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await self._handle.start.remote()
                    return
                except RayActorError:  # it is restarting
                    await asyncio.sleep(ASK_AGAIN_S)
