"""Counters of a worker, whose sums over all ended groups go to the run every second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

SEND_EVERY_S = 1.0
LENGTHS = ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16384, "<=16k"), (65536, "<=64k"))
"""From 1k on the same buckets as for groups that the buffer drops."""
LONGER = ">64k"


def length_bucket(num_tokens: int) -> str:
    return next((name for most, name in LENGTHS if num_tokens <= most), LONGER)


class CounterStore(Protocol):
    """The part of RunState used here."""

    async def count_all(self, amounts: Mapping[str, float]) -> None: ...


class Counters:
    """Counts that have not been sent yet. Used in one event loop."""

    def __init__(self, store: CounterStore) -> None:
        self._store = store
        self._unsent: Counter[str] = Counter()
        self._sending: asyncio.Task[None] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self._unsent[name] += amount  # type: ignore[assignment]  # seconds are floats

    async def run(self) -> None:
        """Sends every second. Never returns."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends all counts so far. Counts that could not be sent stay for the next flush."""
        # When a flush is cancelled its sending still completes, so that nothing is sent twice; the
        # next flush waits for it.
        if self._sending is not None:
            await asyncio.wait([self._sending])
        self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        sent, self._unsent = self._unsent, Counter()
        try:
            await self._store.count_all(sent)
        except BaseException:
            self._unsent.update(sent)
            raise
