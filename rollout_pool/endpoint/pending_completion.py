"""One completion of the model to one request, and the clients that wait for it.

    begun ──► running ──► ended ──► delivered (a turn of its session, once)
                 │          ▲
      client disconnects    │ client retries within the grace period, and reads on
                 └──────────┴──► no retry: cancelled

The official clients retry after a lost connection. A retry must not sample again, since the agent
would see only one of the two completions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from rollout_pool.sampling.sample import Sample

RETRY_GRACE_S = 20.0
"""The official clients wait at most 8 s before they retry."""
DROPPED = "dropped"


class PendingCompletion:
    """Constructing it starts `complete(sample)`, which extends `sample`."""

    def __init__(
        self,
        sample: Sample,
        complete: Callable[[Sample], Coroutine[Any, Any, None]],
        *,
        fingerprint: bytes,
        grace_s: float,
    ) -> None:
        """A retry of the request has the same `fingerprint`."""
        self.sample = sample
        self.fingerprint = fingerprint
        self.created = int(time.time())
        self.ended_at: float | None = None
        """On the monotonic clock."""
        self.num_readers = 0
        self.delivered = asyncio.Event()
        self.news: set[asyncio.Event] = set()
        """Set at each arrival, and at the end."""
        self._grace_s = grace_s
        self._leave: asyncio.TimerHandle | None = None
        sample.on_tokens = self._arrived
        self.task = asyncio.create_task(complete(sample))
        self.task.add_done_callback(self._ended)

    @property
    def is_running(self) -> bool:
        return not self.task.done()

    @property
    def is_delivered(self) -> bool:
        """A client received it."""
        return self.delivered.is_set()

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_dropped(self) -> bool:
        """It was complete, but its session ended before a client received it."""
        return self.sample.finish_reason == DROPPED

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Marks a waiting client. Without any, it is cancelled after the grace period."""
        self.num_readers += 1
        if self._leave is not None:
            self._leave.cancel()
            self._leave = None
        try:
            yield
        finally:
            self.num_readers -= 1
            if self.num_readers == 0 and self.is_running:
                loop = asyncio.get_running_loop()
                self._leave = loop.call_later(self._grace_s, self.task.cancel)

    async def wait(self) -> None:
        """Returns when it has ended, in whatever way."""
        await asyncio.wait([self.task])

    def _arrived(self, sample: Sample) -> None:
        for event in self.news:
            event.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.ended_at = time.monotonic()
        if self._leave is not None:
            self._leave.cancel()
        if task.cancelled():
            self.drop()
        else:
            task.exception()  # mark as retrieved: readers have seen it
        self._arrived(self.sample)

    def drop(self) -> None:
        """No client receives its tokens: they count as wasted, their versions are ignored."""
        assert not self.is_delivered
        self.sample.drop_tokens()
        self.sample.finish_reason = DROPPED
