"""Chooses the engine for a sample: the least loaded one that may serve it and has a free slot.

    assign() ──► waiting line, by priority and order ──► slot at an engine ──► release()
                     ▲   served whenever a slot, an engine, a version
                     └── or a better limit comes

An engine gets samples while it serves a version whose tokens can still be trained. One that is
starting, lost, too far behind or failing gets none: samples wait for it or go elsewhere. The turns
of a session go to the engine with their prefix, unless it is overloaded.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import time
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from buffer.staleness import is_fresh
from rollout_pool.sampling.engine_client import EngineClient, EngineError, EngineLoad
from rollout_pool.sampling.engine_state import BreakerState, EngineState, Slot, StickySessions
from rollout_pool.sampling.sample import Interrupted, Priority, Sample

OVERLOAD_FACTOR = 1.5
OVERLOAD_SAMPLES = 8
"""A session leaves its engine when that has more than OVERLOAD_FACTOR times the load of the least
loaded one plus so many samples of the session's size."""
LENGTHS_KEPT = 0.98
"""Decay of the mean length per ended sample: it adapts within a few hundred samples."""
STARVED_LOOKS = 16
"""Looks for starved samples within one `wait_timeout_s`, at most."""

COMPARED = 16
"""Engines that are compared for a sample, where there are more."""
_arrivals = count()


class Needs(NamedTuple):
    """Decides which engines may serve a sample."""

    engine: str | None
    """The only engine that may serve it, if one was named."""
    min_version: int


class QueueKey(NamedTuple):
    """Common to the samples of one queue."""

    needs: Needs
    failed: frozenset[str]
    """Engines that failed them."""


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter:
    """One waiting sample. Equal orders are served first come, first served."""

    sample: Sample
    tokens: int
    """Its expected final number of tokens."""
    failed: Mapping[str, float]
    """Engines at which it failed, with the time; others are preferred."""
    joined_at: float
    granted: asyncio.Future[Slot]
    order: tuple[int, int] = field(init=False)
    key: QueueKey = field(init=False)

    def __post_init__(self) -> None:
        # Fixed now: the line finds the waiter by them when it leaves.
        self.order = (self.sample.order, next(_arrivals))
        needs = Needs(self.sample.engine, self.sample.min_version)
        self.key = QueueKey(needs, frozenset(self.failed))


class WaitingLine:
    """All waiting samples: rollouts before evaluations, then the lowest order first.

    Samples with the same needs share a queue: if its first finds no slot, none does. So the cost of
    serving grows with the number of queues, not of samples.
    """

    def __init__(self) -> None:
        self.waiters: dict[Sample, Waiter] = {}
        self._queues: dict[Priority, dict[QueueKey, list[Waiter]]] = {p: {} for p in Priority}
        self.has_shrunk = asyncio.Event()

    def queues(self, priority: Priority) -> dict[QueueKey, list[Waiter]]:
        """The non-empty queues, each in order. The mapping is a copy, the queues are not."""
        return dict(self._queues[priority])

    def join(self, waiter: Waiter) -> None:
        assert waiter.sample not in self.waiters, waiter.sample.sample_id
        self.waiters[waiter.sample] = waiter
        queue = self._queues[waiter.sample.priority].setdefault(waiter.key, [])
        insort(queue, waiter, key=_order)

    def leave(self, waiter: Waiter) -> None:
        """Does nothing if it has left already."""
        if self.waiters.get(waiter.sample) is not waiter:
            return
        del self.waiters[waiter.sample]
        queues = self._queues[waiter.sample.priority]
        queue = queues[waiter.key]
        del queue[bisect_left(queue, waiter.order, key=_order)]
        if not queue:
            del queues[waiter.key]
        self.has_shrunk.set()


_order, _tokens = attrgetter("order"), attrgetter("tokens")


class Router:
    """Assigns samples to engines by load, version and health. Used in one event loop."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        wait_timeout_s: float,
        *,
        max_running_requests: int = 128,
        num_workers: int = 1,
    ) -> None:
        """`engines`: the first ones; others join and leave. `wait_timeout_s`: longest wait of a
        sample while no engine makes progress (buffer.wait_timeout_s). All workers share the
        engines' slots."""
        self._new_state = partial(
            EngineState, max_running_requests=max_running_requests, num_workers=num_workers
        )
        self.engines = {engine.name: self._new_state(engine) for engine in engines}
        self._wait_timeout_s = wait_timeout_s
        self._line = WaitingLine()
        self._progress: dict[Needs, float] = {}
        """When an engine that could serve such a sample last made progress."""
        self._starving: asyncio.TimerHandle | None = None
        self._sessions = StickySessions()
        self._mean_length: float | None = None
        self._alarm: asyncio.Handle | None = None
        self._alarm_at: float | None = None
        self._situation = "their versions are not known yet"
        self._candidates: dict[Needs, list[EngineState]] = {}
        """Engines that may serve such samples; empty after each change of what an engine serves."""

    # Reports ----------------------------------------------------------------------------------

    def join(self, engine: EngineClient) -> None:
        """An engine has come, or come back as another process. It gets requests once `follow` tells
        that it serves a version."""
        self.leave(engine.name)
        self.engines[engine.name] = self._new_state(engine)
        self._candidates.clear()

    def leave(self, name: str) -> None:
        """An engine is gone for good, if there was one. Slots taken there stay valid."""
        self._note_progress()
        if self.engines.pop(name, None) is not None:
            self._candidates.clear()
            self._sessions.lose(name)

    def follow(
        self,
        versions: Mapping[str, int],
        trainer: int,
        max_staleness: int,
        draining: Collection[str] = (),
    ) -> None:
        """Sets the version that each serving engine serves now, and the trainer's. Engines that are
        draining before a commit get no new samples, but keep their limit and their sessions."""
        now = time.monotonic()
        self._note_progress()
        for engine in self.engines.values():
            serves = versions.get(engine.name)
            if serves is None and engine.serves is not None:
                self._sessions.lose(engine.name)
            is_allowed = serves is not None and is_fresh(trainer, serves, max_staleness)
            is_open = is_allowed and engine.name not in draining
            engine.follow(serves, may_roll_out=is_open, now=now)
        self._candidates.clear()
        drain = f"{', '.join(sorted(draining))} drain before a commit, " if draining else ""
        self._situation = (
            f"they serve {dict(versions) or 'nothing'}, {drain}the trainer is at version {trainer} "
            f"and max_staleness is {max_staleness}"
        )
        self.serve()

    def note_load(self, engine: str, load: EngineLoad | None, num_preempted: int) -> None:
        """Takes an engine's load report; None if it is alive but cannot report."""
        self.engines[engine].note_load(load, num_preempted)
        self.serve()

    def note_silence(self, engine: str) -> None:
        self.engines[engine].note_silence()

    def note_end(self, sample: Sample) -> None:
        """A sample has ended; its length updates the expected length of others."""
        length = len(sample.output_ids)
        known = length if self._mean_length is None else self._mean_length
        self._mean_length = LENGTHS_KEPT * known + (1 - LENGTHS_KEPT) * length

    @property
    def num_waiting(self) -> int:
        return len(self._line.waiters)

    async def wait_room(self, num_samples: int) -> int:
        """Returns once fewer rollout samples than these wait for a slot: how many times these may
        come, one after the other, until no fewer would wait. None waits for ever: see `assign`."""
        while (num_waiting := self._num_rollouts_waiting()) >= num_samples:
            self._line.has_shrunk.clear()
            await self._line.has_shrunk.wait()
        if num_waiting:
            return 1
        able = self._that_may_serve(Needs(None, 0))
        # One that failed takes one sample on trial, which is no room for a group.
        able = [one for one in able if one.breaker.state is BreakerState.closed]
        free = _with_slot(able, Priority.rollout, time.monotonic())
        return 1 + math.ceil(sum(one.limit - one.num_in_flight for one in free) / num_samples)

    def _num_rollouts_waiting(self) -> int:
        return sum(map(len, self._line.queues(Priority.rollout).values()))

    # Assignment -----------------------------------------------------------------------------------

    async def assign(self, sample: Sample, failed: Mapping[str, float] | None = None) -> Slot:
        """A slot for the sample, which the caller must release.

        Engines in `failed` (with the time) are used only if there is no other, and only once they
        may have recovered. Waits behind samples of higher priority or lower order.
        Raises TimeoutError naming the engines if none made progress for too long, Interrupted
        after `withdraw`, and EngineError for an engine that is not there.
        """
        if sample.engine is not None and sample.engine not in self.engines:
            raise EngineError(f"there is no {sample.engine} among {self._names}")
        if not failed and (slot := self._take(sample)) is not None:
            return slot
        waiter = Waiter(
            sample=sample,
            tokens=self._expected_tokens(sample),
            failed={} if failed is None else failed,
            joined_at=time.monotonic(),
            granted=asyncio.get_running_loop().create_future(),
        )
        self._line.join(waiter)
        self._progress.setdefault(waiter.key.needs, float("-inf"))
        if self._starving is None:
            loop = asyncio.get_running_loop()
            self._starving = loop.call_later(self._wait_timeout_s, self._end_starved)
        self.serve()
        try:
            return await waiter.granted
        except BaseException:
            granted = waiter.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().release()  # granted at the same moment
            raise
        finally:
            self._line.leave(waiter)

    def _take(self, sample: Sample) -> Slot | None:
        """A slot at once, if none waits; most samples find one."""
        if self._line.waiters:
            return None
        needs, now = Needs(sample.engine, sample.min_version), time.monotonic()
        if not (free := self._free(self._that_may_serve(needs), sample, now)):
            return None
        tokens = self._expected_tokens(sample)
        return self._slot(sample, tokens, self._choose(sample, tokens, free), now)

    def withdraw(self, sample: Sample) -> None:
        """Makes `assign` raise Interrupted for a waiting sample; does nothing for others."""
        if (waiter := self._line.waiters.get(sample)) is not None:
            self._line.leave(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(Interrupted(sample.sample_id))

    def _expected_tokens(self, sample: Sample) -> int:
        """Expected final tokens of the sample. With long-tailed lengths the expected rest does not
        shrink with age, so the mean is added regardless of the current length."""
        mean = sample.num_left / 2 if self._mean_length is None else self._mean_length
        return len(sample.prompt) + len(sample.output_ids) + min(sample.num_left, round(mean))

    # Waiting --------------------------------------------------------------------------------------

    def _note_progress(self) -> None:
        """Must be called before what an engine may serve changes."""
        for needs in self._progress:
            for engine in self._that_may_serve(needs):
                self._progress[needs] = max(self._progress[needs], engine.last_progress)

    def _end_starved(self) -> None:
        """Ends the wait of samples for which no engine made progress for `wait_timeout_s`; a sample
        may wait while any engine that may serve it makes progress with any sample."""
        self._starving = None
        self._note_progress()
        now = time.monotonic()
        deadlines = {
            waiter: max(waiter.joined_at, self._progress[waiter.key.needs]) + self._wait_timeout_s
            for waiter in self._line.waiters.values()
        }
        for waiter in [waiter for waiter, deadline in deadlines.items() if deadline <= now]:
            del deadlines[waiter]
            self._line.leave(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(TimeoutError(self._explain(waiter)))
        needed = {waiter.key.needs for waiter in deadlines}
        self._progress = {needs: self._progress[needs] for needs in needed}
        if deadlines:
            wait_s = max(min(deadlines.values()) - now, self._wait_timeout_s / STARVED_LOOKS)
            self._starving = asyncio.get_running_loop().call_later(wait_s, self._end_starved)

    @property
    def _names(self) -> str:
        return ", ".join(self.engines) or "the run's engines, of which none has started"

    def _explain(self, waiter: Waiter) -> str:
        version = waiter.sample.min_version
        what = f" for version {version} or later" if version else ""
        busy = "; ".join(
            f"{name}: {engine.num_in_flight} of {engine.limit} slots taken, "
            f"breaker {engine.breaker.state.value}"
            for name, engine in self.engines.items()
        )
        who = waiter.sample.engine or f"none of {self._names}"
        is_not = "could not" if waiter.sample.engine else "could"
        return (
            f"{who} {is_not} be given a request{what} for "
            f"buffer.wait_timeout_s={self._wait_timeout_s:g}: {self._situation} ({busy})"
        )

    # Serving --------------------------------------------------------------------------------------

    def _that_may_serve(self, needs: Needs) -> list[EngineState]:
        if needs not in self._candidates:
            is_pinned = needs.engine is not None
            self._candidates[needs] = [
                engine
                for engine in self.engines.values()
                if needs.engine in (None, engine.name)
                and engine.may_serve(needs.min_version, is_pinned=is_pinned)
            ]
        return self._candidates[needs]

    def serve(self) -> None:
        if not self.num_waiting:
            return
        now = time.monotonic()
        for priority in Priority:
            self._serve_queues(priority, now)
        self._set_alarm(now)

    def _serve_queues(self, priority: Priority, now: float) -> None:
        """Serves the queues by the order of their first waiters; skips one that finds no slot."""
        queues = self._line.queues(priority)
        firsts = [(queue[0].order, key) for key, queue in queues.items()]
        heapq.heapify(firsts)
        while firsts:
            _, key = firsts[0]
            queue = queues[key]
            if (found := self._find_slot(key, queue, priority, now)) is None:
                heapq.heappop(firsts)
                continue
            self._grant(*found, now)
            if queue:
                heapq.heapreplace(firsts, (queue[0].order, key))
            else:
                heapq.heappop(firsts)

    def _find_slot(
        self, key: QueueKey, queue: list[Waiter], priority: Priority, now: float
    ) -> tuple[Waiter, EngineState] | None:
        """The first waiter of a queue that can be served, and its engine."""
        able, first = self._that_may_serve(key.needs), queue[0]
        if not key.failed:  # nearly always, and once or twice for each sample
            free = self._free(able, first.sample, now)
            return (first, self._choose(first.sample, first.tokens, free)) if free else None
        healthy = [engine for engine in able if engine.is_healthy(now)]
        if others := [engine for engine in healthy if engine.name not in key.failed]:
            free = [engine for engine in others if engine.has_slot[priority]]
            return (first, self._choose(first.sample, first.tokens, free)) if free else None
        failed = [engine for engine in healthy if engine.has_slot[priority]]
        # A healthy engine that has not recovered failed once or twice, so few wait for it.
        for waiter in queue if failed else ():
            if free := [r for r in failed if r.breaker.has_recovered(waiter.failed[r.name], now)]:
                return waiter, self._choose(waiter.sample, waiter.tokens, free)
        return None

    def _free(self, able: list[EngineState], sample: Sample, now: float) -> list[EngineState]:
        """Engines with a slot. Of many, a few that are drawn and the home of the sample's prefix:
        among a few the least loaded is nearly that of all (the power of choices, Mitzenmacher), and
        a look at 256 engines takes longer than all else that is done for a sample."""
        priority = sample.priority
        if len(able) > COMPARED:  # so it needs no engine by name
            free = _with_slot(random.choices(able, k=COMPARED), priority, now)
            home = self._home(sample)
            if free and home is not None and home.may_serve(sample.min_version, is_pinned=False):
                free += _with_slot([home], priority, now)
            if free:
                return free
        return _with_slot(able, priority, now)

    def _home(self, sample: Sample) -> EngineState | None:
        name = self._sessions.home(sample.session) or self._sessions.home(sample.group)
        return self.engines.get(name or "")

    def _choose(self, sample: Sample, tokens: int, free: list[EngineState]) -> EngineState:
        least = min(free, key=_tokens)
        home = self._home(sample)
        if home is not None and home in free:
            most = OVERLOAD_FACTOR * least.tokens + OVERLOAD_SAMPLES * tokens
            if home.tokens <= most:
                return home
        return least

    def _grant(self, waiter: Waiter, engine: EngineState, now: float) -> None:
        self._line.leave(waiter)
        if not waiter.granted.done():  # else its task was just cancelled
            waiter.granted.set_result(self._slot(waiter.sample, waiter.tokens, engine, now))

    def _slot(self, sample: Sample, tokens: int, engine: EngineState, now: float) -> Slot:
        for prefix in (sample.session, sample.group):
            if prefix:
                self._sessions.settle(prefix, engine.name)
        return Slot(engine, sample.priority, tokens, now, self.serve)

    def _set_alarm(self, now: float) -> None:
        """Serves samples that wait for an engine's recovery, even if nothing else happens."""
        waiting_for = self.engines.values() if self.num_waiting else ()
        times = [e.breaker.retry_at for e in waiting_for if e.breaker.retry_at > now]
        at = min(times, default=None)
        # Kept beside the handle: uvloop's, for a time that is now, does not know it.
        if at == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = None if at is None else asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm_at = None  # a timer may fire a little too early, and is then set again
        self.serve()


def _with_slot(engines: list[EngineState], priority: Priority, now: float) -> list[EngineState]:
    return [e for e in engines if e.has_slot[priority] and e.is_healthy(now)]
