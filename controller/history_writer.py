"""Records the run's metrics while it trains: Redis -> metrics.jsonl and the panel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from buffer.connect import Buffer
from buffer.run_state import STREAM_START, RunState
from configs.run_files import Scalar
from controller.metrics.history import (
    ATTACHED,
    EVAL_FAILED,
    LENGTHS,
    RESERVED_NAMES,
    RESUMED,
    STALL,
    STALL_ENDED,
    MetricsLog,
    Record,
)
from controller.watch.look import take_sample
from controller.watch.run_view import RunView

T = TypeVar("T")

PANEL_S = 0.5
SAMPLE_S = 2.0
SWEEP_S = 5.0
LENGTHS_S = 30.0
SILENT_S = 10.0
"""A longer wait for Redis is reported."""
_CONTROLLERS_KINDS = frozenset(
    {
        *("phase", "eval", EVAL_FAILED, "buffer", "redis_restarted", RESUMED, ATTACHED),
        *(STALL, STALL_ENDED),
    }
)
REPORTED = ("step", "checkpoint", "agreement")


@dataclass(eq=False)
class HistoryWriter:
    """Follows the metrics stream and samples the buffer, until its tasks are cancelled.

    writer = HistoryWriter(buffer, state, log, view, show=panel.show)
    writer.record("phase", {"phase": "training"})   # a line of metrics.jsonl, and on the panel
    await writer.drain_metrics(block_s=5.0)         # what other processes have reported
    """

    buffer: Buffer
    state: RunState
    log: MetricsLog
    view: RunView
    history: Sequence[Record] = ()
    """Records of a run that goes on."""
    on_record: Callable[[Record], None] = lambda record: None
    """Gets the records of the kinds in REPORTED."""
    show: Callable[[RunView], None] = lambda view: None
    say: Callable[[str], None] = lambda words: None
    on_sample: Callable[[RunView], None] = lambda view: None
    """Sees the run after each look at its buffer."""
    tune: Callable[[RunView], Awaitable[None]] | None = None
    """May change settings of the run after each look of `sample_buffer`."""

    def __post_init__(self) -> None:
        for record in self.history:
            self.view.apply(record)
        self._is_shown = not self.history
        """The history of a run that goes on is not shown before `resume` or `attach`."""
        self._ended_at = self.history[-1].t if self.history else None
        """End of the run that goes on."""
        self._last_id = next((r.id for r in reversed(self.history) if r.id), STREAM_START)

    def record(self, kind: str, values: Mapping[str, Scalar], *, id: str = "") -> Record:
        record = self.log.append(kind, values, id=id)
        self.view.apply(record)
        if self._is_shown:
            self.show(self.view)
        return record

    async def follow_metrics(self) -> None:
        while True:
            await self.drain_metrics(block_s=5.0)

    async def resume(self, step: int, source: str = "disk") -> None:
        """Record that the run goes on after `step`, from a checkpoint on disk or a copy in memory.
        Call it before the trainer takes another."""
        away_s = await self._catch_up()
        self.record(RESUMED, {"step": step, "away_s": away_s, "source": source})

    async def attach(self) -> None:
        """Record that this controller has taken over from one that was killed."""
        self.record(ATTACHED, {"away_s": await self._catch_up()})

    async def _catch_up(self) -> float:
        """Record what a controller that was killed has not; returns how long there was none."""
        while await self.drain_metrics(block_s=0):
            pass
        # Recorded times are rounded, or another machine's: the last one may be ahead of this clock.
        away_s = 0.0 if self._ended_at is None else max(0.0, time.time() - self._ended_at)
        self._ended_at = None
        self._is_shown = True
        return away_s

    async def drain_metrics(self, block_s: float) -> int:
        """Record what has arrived, waiting up to `block_s` for the first; returns how many."""
        entries = await self.state.read_metrics(self._last_id, block_s)
        for entry in entries:
            if _place(entry.id) <= _place(self._last_id):
                continue  # another call, which waited for it too, has recorded it
            self._last_id = entry.id
            if not _is_of_a_process(entry.kind, entry.record):
                continue
            record = self.record(entry.kind, entry.record, id=entry.id)
            if entry.kind in REPORTED:
                self.on_record(record)
        return len(entries)

    async def sample_buffer(self) -> None:
        """Update the panel twice a second; write a line of metrics every two seconds."""
        next_sample = next_sweep = next_lengths = 0.0
        while True:
            now = time.time()
            if now >= next_sweep:
                await self._named(self.buffer.sweep())
                next_sweep = now + SWEEP_S
            values = await self._named(self._observe())
            if self.tune is not None:
                await self.tune(self.view)
            if now >= next_sample:
                self.log.append("buffer", values, now)
                next_sample = now + SAMPLE_S
            if now >= next_lengths and (lengths := self.view.lengths) is not None:
                # Through the stream, where Prometheus reads it.
                await self._named(self.state.append_metrics(lengths.values(), LENGTHS))
                next_lengths = now + LENGTHS_S
            await asyncio.sleep(PANEL_S)  # the panel's refresh rate: nothing waits for it

    async def _named(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer to a question to Redis, of which it is told if it takes long."""
        began, asking = time.monotonic(), asyncio.create_task(question)
        try:
            if not (await asyncio.wait({asking}, timeout=SILENT_S))[0]:
                self.say(f"Redis has not answered for {SILENT_S:g} s: the run waits for it")
                await asking
                self.say(f"Redis answers again, after {time.monotonic() - began:.0f} s")
            return await asking
        finally:
            asking.cancel()

    async def sample_once(self) -> None:
        self.log.append("buffer", await self._observe())

    async def _observe(self) -> Mapping[str, Scalar]:
        values = await take_sample(self.view, self.buffer, self.state, self.log.path.parent)
        self.on_sample(self.view)
        self.show(self.view)
        return values


def _place(entry_id: str) -> tuple[int, int]:
    """The order of a stream's entries."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)


def _is_of_a_process(kind: str, values: Mapping[str, Scalar]) -> bool:
    """Returns whether one of our processes may have written the entry."""
    # Every user of the run's Redis can append to the stream: a malformed entry must neither end
    # the run nor enter its history.
    if kind in _CONTROLLERS_KINDS or RESERVED_NAMES & values.keys():
        return False
    if kind != "step":
        return True
    numbers = [values.get(name) for name in ("step", "version")]
    return all(isinstance(number, int) and 0 <= number <= 2**53 for number in numbers)
