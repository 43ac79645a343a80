"""What a worker counts for the run, gathered and told every second instead of group by group."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

TELL_EVERY_S = 1.0
LENGTHS = ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16384, "<=16k"), (65536, "<=64k"))
"""From 1k on those of the groups that the buffer drops."""
LONGER = ">64k"


def length_bucket(num_tokens: int) -> str:
    """Which of the buckets a sample of so many tokens belongs to."""
    return next((name for most, name in LENGTHS if num_tokens <= most), LONGER)


class Counting(Protocol):
    """What is used of RunState."""

    async def count(self, name: str, amount: float = 1) -> None: ...


class Tally:
    """Counters that are not told yet. Used in one event loop."""

    def __init__(self, state: Counting) -> None:
        self._state = state
        self._waiting: Counter[str] = Counter()
        self._telling: asyncio.Task[None] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self._waiting[name] += amount  # type: ignore[assignment]  # seconds are no integers

    async def flush(self) -> None:
        """Tells all that was added so far.

        What was begun to be told is told to its end, also if this is cancelled; the next flush
        waits for it. What could not be told stays for that one.
        """
        if self._telling is not None:
            await asyncio.wait([self._telling])
        self._telling = asyncio.create_task(self._tell())
        await asyncio.shield(self._telling)

    async def _tell(self) -> None:
        told, self._waiting = self._waiting, Counter()
        results = await asyncio.gather(
            *(self._state.count(name, amount) for name, amount in told.items()),
            return_exceptions=True,
        )
        errors = []
        for name, result in zip(told, results, strict=True):
            if isinstance(result, BaseException):
                self.add(name, told[name])
                errors.append(result)
        if errors:
            raise errors[0]

    async def keep_telling(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            await self.flush()
