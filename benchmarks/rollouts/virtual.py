"""Rules that schedule rollouts, under a virtual clock: the same figures each time, in any load.

Emulated engines (gpu_engine.py), router and sampler are those of part WORKS, all in this process;
there is no HTTP, no worker and no Redis. Ours is played by the buffer's own admission and staleness
(buffer/admission.py, staleness.py) and by what form_batch.lua and the worker's loop say; the others
by the code that part WORKS runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from benchmarks.rollouts.gpu_engine import NUM_PROMPT, GpuEngine, Running
from benchmarks.rollouts.published.rivals import Continuous, Run, Trainer
from benchmarks.rollouts.scale import GPU, Schedule, division, play_rule
from benchmarks.rollouts.work import Job, Tally, WorkSize
from buffer.admission import admission_limit, engine_lag
from buffer.staleness import is_fresh
from buffer.types import VersionSpan
from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.engine_client import EngineCounters, EngineLoad
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Completer, Sample, merge_spans
from rollout_pool.sampling.sampler import Sampler

T = TypeVar("T")
NEVER = 1 << 60


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing: time goes on to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing runs and no timer is set: the rule waits for ever")
        self.now += timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


class _Request(Running):
    """Reports only its end."""

    def report(self, version: int, reason: dict[str, Any] | None) -> None:
        self.num_sent = NEVER
        if reason is not None:
            self.send(reason)


def make_request(
    request_id: str, had: int, wanted: int, ended: Callable[[dict[str, Any] | None], None]
) -> Running:
    return _Request(request_id, NUM_PROMPT + had, wanted, NEVER, GPU.tokens, ended)


class _Client:
    """An engine of this process, as the sampler sees it."""

    def __init__(self, name: str, engine: GpuEngine) -> None:
        self.name, self.counters = name, EngineCounters()
        self._engine = engine

    def note_version(self, version: int) -> None:
        """Each request reports its versions itself."""

    async def generate_tokens(
        self, sample: Sample, request_id: str, on_arrival: Callable[[], None] | None = None
    ) -> None:
        ended, had = asyncio.Queue[dict[str, Any] | None](), len(sample.output_ids)
        request = make_request(request_id, had, sample.num_left, ended.put_nowait)
        self._engine.add(request)
        reason = await ended.get()
        sample.output_ids += [0] * request.num_done
        for version, first, last in request.spans:
            span = VersionSpan(version=version, start=had + first, end=had + last)
            sample.version_spans = merge_spans([*sample.version_spans, span])
        if reason and reason["type"] != "abort":
            sample.finish_reason = "length"

    def stop(self, request_id: str) -> None:
        self._engine.end(request_id)

    async def load(self) -> EngineLoad | None:
        return None

    async def close(self) -> None:
        """Nothing to close."""


class Ours(Continuous):
    """on_stale=wait, selector=stalest: a group has a credit until it has been trained."""

    def __init__(
        self, jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
    ) -> None:
        super().__init__(jobs, completer, size, trainer)
        self._router = cast(Sampler, completer).router
        self._served = self._num_leased = 0
        self._oldest: dict[Run, int] = {}
        """The oldest version that a running group's tokens can have."""

    @property
    def _lag(self) -> int:
        return engine_lag(self.version, [self._served], self.size.max_staleness)

    def may_begin(self) -> bool:
        limit = admission_limit(
            max_staleness=self.size.max_staleness,
            lag=self._lag,
            groups_per_version=self.size.batch_groups,
        )
        return len(self.running) + len(self.ended) + self._num_leased < limit

    @property
    def _has_room(self) -> bool:
        engines = self._router.engines.values()
        free = sum(engine.limit - engine.num_in_flight for engine in engines)
        new = sum(self.size.group_size for run in self.running if not run.samples)
        return self._router.num_waiting + new - free < self.size.group_size

    def start(self, run: Run) -> None:
        self._oldest[run] = self.version - self._lag
        super().start(run)

    def pick(self, wanted: int) -> list[Run]:
        if self._is_blocked or len(self.ended) < wanted:
            return []
        runs = sorted(self.ended, key=lambda run: run.oldest_version)[:wanted]
        for run in runs:
            assert is_fresh(self.version, run.oldest_version, self.size.max_staleness)
            self.ended.remove(run)
        self._num_leased = wanted
        return runs

    @property
    def _is_blocked(self) -> bool:
        """blocking_group of choose.lua."""
        oldest = sorted(self._oldest[run] for run in self.running)
        brink, share = self.version - self.size.max_staleness, self.size.batch_groups
        if oldest and oldest[0] <= brink:
            return True
        for later in range(oldest[0] - brink if oldest else NEVER, self.size.max_staleness):
            num_ready = sum(run.oldest_version <= brink + later for run in self.ended)
            num_running = sum(version <= brink + later for version in oldest)
            if num_ready < share and num_running > later * share:
                return True
        return False

    async def after_step(self) -> None:
        self._num_leased = 0
        self.version += 1
        self.feed()
        await self.trainer.commit()
        self._served = self.version


@dataclasses.dataclass(kw_only=True, slots=True)
class VirtualFleet:
    """Emulated engines, which take versions all at once."""

    engines: Sequence[GpuEngine]
    retracts: bool
    version: int = 0

    async def hold(self) -> None:
        for engine in self.engines:
            engine.hold(retracts=self.retracts)

    async def next(self) -> None:
        self.version += 1
        await self._take(self.engines, self.version)

    async def load(self, number: int, version: int) -> None:
        await self._take([self.engines[number]], version)

    async def _take(self, engines: Sequence[GpuEngine], version: int) -> None:
        for engine in engines:
            engine.hold(retracts=self.retracts)
        await asyncio.gather(*(engine.load_version(version) for engine in engines))
        for engine in engines:
            engine.go_on()


def play_virtually(
    schedule: Schedule, size: WorkSize, jobs: Sequence[Job], token_s: float
) -> Tally:
    """Plays the steps of `size`; takes no time but that of the processor."""
    return run_virtually(_play(schedule, size, jobs, token_s))


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def _play(schedule: Schedule, size: WorkSize, jobs: Sequence[Job], token_s: float) -> Tally:
    number, *seconds = division(schedule, size, token_s)
    engines = [GpuEngine(size.scale_speed, size.max_running, GPU) for _ in range(number)]
    clients = [_Client(f"engine-{place}", engine) for place, engine in enumerate(engines)]
    router = Router(clients, NEVER, max_running_requests=size.max_running)
    router.follow({client.name: 0 for client in clients}, trainer=0, max_staleness=0)
    running = [asyncio.create_task(engine.run()) for engine in engines]
    fleet = VirtualFleet(engines=engines, retracts=schedule.retracts)
    try:
        return await play_rule(
            schedule, Sampler(router, max_retries=2), fleet, size, jobs, (seconds[0], seconds[1])
        )
    finally:
        await end_tasks(running)
