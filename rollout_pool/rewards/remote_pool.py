"""Scoring processes on several hosts, as one pool: who asks which, and what becomes of a lost one.

    score() ──► mailbox of the host with the fewest open requests ──► one call each CALL_GAP_S,
                                                                      with all that is in it

A call costs far more than a request, and episodes often end together. Answers come as they are
there, so that a slow one does not hold up the others of its call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from rollout_pool.cancelling import end_tasks
from rollout_pool.rewards.part import PartScore
from rollout_pool.rewards.pool import MAX_ASKED

log = logging.getLogger(__name__)

MAX_BATCH = 256
CALL_GAP_S = 0.02
"""The first request goes at once; those of the next moment share the next call."""
RETURN_TIMEOUT_S = 300.0
"""For a lost host to come back before it is given up, and for a request when all are lost."""

Answers = list[tuple[int, PartScore]]
"""Places in the call, and what was found."""


class ScoringHost(Protocol):
    """One set of scoring processes, elsewhere."""

    def score(self, requests: list[bytes]) -> AsyncIterator[Answers]:
        """All answers of one call, in any order. Raises ConnectionError if the host is lost."""
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Until it can be asked, also after it was lost.

        Raises ConnectionError or TimeoutError if it does not come back, ValueError if it refuses
        the settings.
        """
        ...


class RemoteScoring:
    """A `ScoringPool` over several hosts. Used in one event loop."""

    def __init__(self, hosts: Sequence[ScoringHost]) -> None:
        assert hosts
        self._lines = [_Line(host, self._lost) for host in hosts]
        self._one_is_back = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_lost = 0
        """Times that a host was lost."""

    async def start(self) -> None:
        """Wait until all can be asked. Raises as `ScoringHost.wait_ready`."""
        await asyncio.gather(*(line.host.wait_ready(RETURN_TIMEOUT_S) for line in self._lines))

    async def score(self, request: bytes) -> PartScore:
        line: _Line | None = None
        for _ in range(MAX_ASKED):
            try:
                line = await self._pick(rather_not=line)
            except TimeoutError:
                break
            try:
                return await line.ask(request)
            except ConnectionError:
                continue
        return PartScore(value=0.0, failure="the scoring actor died")

    async def close(self) -> None:
        await end_tasks(self._tasks)
        await asyncio.gather(*(line.close() for line in self._lines))

    async def _pick(self, rather_not: _Line | None) -> _Line:
        async with asyncio.timeout(RETURN_TIMEOUT_S):
            while not (there := [line for line in self._lines if not line.is_lost]):
                self._one_is_back.clear()
                await self._one_is_back.wait()
        return min(there, key=lambda line: (line is rather_not, line.num_open))

    def _lost(self, line: _Line) -> None:
        self.num_lost += 1
        task = asyncio.create_task(self._wait_for_return(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_return(self, line: _Line) -> None:
        try:
            await line.host.wait_ready(RETURN_TIMEOUT_S)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            log.error("a scoring actor is gone for good: %s", error)
            return
        line.is_lost = False
        self._one_is_back.set()


class _Line:
    """What is open at one host."""

    def __init__(self, host: ScoringHost, lost: Callable[[_Line], None]) -> None:
        self.host = host
        self.is_lost = False
        self.num_open = 0
        self._lost = lost
        self._mailbox: list[tuple[bytes, asyncio.Future[PartScore]]] = []
        self._next_send = 0.0
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, request: bytes) -> PartScore:
        """Raises ConnectionError if the host is lost meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[PartScore] = loop.create_future()
        self._mailbox.append((request, answer))
        if len(self._mailbox) == 1:
            loop.call_at(max(loop.time(), self._next_send), self._send)
        self.num_open += 1
        try:
            return await answer
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        await end_tasks(self._calls)

    def _send(self) -> None:
        self._next_send = asyncio.get_running_loop().time() + CALL_GAP_S
        while self._mailbox:
            batch, self._mailbox = self._mailbox[:MAX_BATCH], self._mailbox[MAX_BATCH:]
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, batch: list[tuple[bytes, asyncio.Future[PartScore]]]) -> None:
        try:
            async for answers in self.host.score([request for request, _ in batch]):
                for place, score in answers:
                    if not batch[place][1].done():  # its caller may have given up
                        batch[place][1].set_result(score)
        except ConnectionError as error:
            log.warning("a scoring actor was lost: %s", error)
            if not self.is_lost:
                self.is_lost = True
                self._lost(self)
        finally:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(ConnectionError("the scoring actor was lost"))
