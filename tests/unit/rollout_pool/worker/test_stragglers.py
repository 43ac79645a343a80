"""Stragglers under each policy; times are real but short."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from configs.choices import TailPolicy
from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import Sample
from rollout_pool.worker import stragglers
from rollout_pool.worker.counters import Counters, length_bucket
from rollout_pool.worker.stragglers import MIN_RECENT, RECENT, TAILS, Tail
from tests.support.rollout import make_sample, until


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "LOOK_EVERY_S", 0.1)


class CountStore:
    """Counts as RunState does, but only when it is let through."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.is_broken = False

    async def count_all(self, amounts: Mapping[str, float]) -> None:
        await self.is_open.wait()
        if self.is_broken:
            raise ConnectionError("no server")
        self.counts.update(amounts)  # type: ignore[arg-type]


class Versions:
    """The published and served versions of a trainer and its engines."""

    def __init__(self) -> None:
        self.trainer = self.engines = 0
        self._changed = asyncio.Event()

    def tell(self, *, trainer: int | None = None, engines: int | None = None) -> None:
        self.trainer = self.trainer if trainer is None else trainer
        self.engines = self.engines if engines is None else engines
        self._changed.set()
        self._changed = asyncio.Event()

    async def trainer_version(self) -> int:
        return self.trainer

    async def wait_version_above(self, version: int, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            while self.trainer <= version:
                await self._changed.wait()
        return self.trainer

    async def wait_engines_at(self, version: int, timeout_s: float) -> dict[str, int]:
        async with asyncio.timeout(timeout_s):
            while self.engines < version:
                await self._changed.wait()
        return {"engine-0": self.engines}


class Scene:
    """One tail with what it may see of a worker."""

    def __init__(self, policy: TailPolicy, max_postponements: int = 2) -> None:
        self.versions, self.store = Versions(), CountStore()
        self.counters = Counters(self.store)
        self.interrupted: list[Sample] = []
        self.on_interrupt: list[Callable[[Sample], None]] = []
        self.is_full, self.order = False, 100
        self.groups: list[GroupSamples] = []
        self.durations: deque[float] = deque(maxlen=RECENT)
        self.tail: Tail = TAILS[policy](
            groups=self.groups,
            durations=self.durations,
            interrupt=self._interrupt,
            versions=self.versions,
            counters=self.counters,
            is_batch_ready=self._is_batch_ready,
            next_order=lambda: self.order,
            max_postponements=max_postponements,
            keep_partial=True,
        )

    def _interrupt(self, sample: Sample) -> None:
        self.interrupted.append(sample)
        for call in self.on_interrupt:
            call(sample)

    def lets_groups_wait_for_long(self) -> None:
        """From the first interruption on a postponed group has not waited for long enough."""
        self.on_interrupt.append(lambda _: self.durations.extend([60.0] * RECENT))

    def stops_at_once(self, group: GroupSamples) -> list[asyncio.Task[None]]:
        """Plays the episode runners with a sample of the group as soon as it is interrupted."""
        waiting: list[asyncio.Task[None]] = []

        def stop(sample: Sample) -> None:
            if sample in group.in_progress:
                waiting.append(asyncio.create_task(group.wait_released(sample)))

        self.on_interrupt.append(stop)
        return waiting

    async def _is_batch_ready(self) -> bool:
        return self.is_full

    def start(self, order: int, **fields: Any) -> GroupSamples:
        group = GroupSamples(order=order, **fields)
        for n in range(2):
            group.begin(make_sample(n, prompt=[1]))
        self.groups.append(group)
        return group

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.tail.run())
        try:
            yield
            assert not task.done()
        finally:
            await end_tasks([task])

    async def counted(self) -> Counter[str]:
        await self.counters.flush()
        return self.store.counts


def _stopped(group: GroupSamples) -> list[asyncio.Task[None]]:
    """Plays the episode runners with samples that were interrupted."""
    return [asyncio.create_task(group.wait_released(sample)) for sample in group.in_progress]


async def test_samples_wait_for_the_new_version_and_the_stalest_goes_first() -> None:
    scene, order = Scene(TailPolicy.interrupt_and_resume), list[int]()
    groups = [scene.start(order) for order in (5, 2, 9)]
    ended = next(iter(groups[0].in_progress))
    ended.finish_reason = "stop"

    async def go_on(group: GroupSamples, sample: Sample) -> None:
        await group.wait_released(sample)
        order.append(sample.order)

    async with scene.running():
        await asyncio.sleep(0)
        scene.versions.tell(trainer=1)
        await until(lambda: len(scene.interrupted) == 5)
        assert ended not in scene.interrupted
        resumed = [
            asyncio.create_task(go_on(f, s)) for f in groups for s in f.in_progress - {ended}
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in resumed)
        scene.versions.tell(engines=1)
        await asyncio.wait_for(asyncio.gather(*resumed), 60)
    assert order == [2, 2, 5, 9, 9]
    assert await scene.counted() == {"samples_interrupted": 5}
    assert sum(group.num_resumed for group in groups) == 5


async def test_groups_continue_across_versions() -> None:
    scene = Scene(TailPolicy.continue_across_versions)
    group = scene.start(1)
    async with scene.running():
        scene.versions.tell(trainer=1)
        scene.is_full = True
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asyncio.gather(*_stopped(group)), 60)
    assert not scene.interrupted


async def test_slow_group_waits_while_a_batch_is_ready_and_continues_when_it_is_taken() -> None:
    scene = Scene(TailPolicy.postpone, max_postponements=2)
    scene.durations.extend([0.02] * MIN_RECENT)
    slow = scene.start(10)
    async with scene.running():
        await asyncio.sleep(0.25)
        scene.start(11)
        assert not scene.interrupted  # the trainer still lacks groups
        waiting = scene.stops_at_once(slow)
        scene.lets_groups_wait_for_long()
        scene.is_full = True
        # The other becomes slow as well at the first look: a third keeps both from being alone.
        keeper = asyncio.create_task(_keep_one_young(scene))
        await until(lambda: slow.in_progress <= set(scene.interrupted))
        assert slow.order == 100 and {sample.order for sample in slow.in_progress} == {100}
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        scene.is_full = False
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        scene.on_interrupt.clear()
        again = scene.stops_at_once(slow)
        scene.durations.extend([0.02] * RECENT)
        before = len(scene.interrupted)
        scene.is_full = True  # once more: the last time, after which it goes first
        await until(lambda: slow.in_progress <= set(scene.interrupted[before:]))
        assert slow.order == 0 and {sample.order for sample in slow.in_progress} == {0}
        await asyncio.wait_for(asyncio.gather(*again), 60)
        after = scene.interrupted.count(next(iter(slow.in_progress)))
        await asyncio.sleep(0.3)
        assert scene.interrupted.count(next(iter(slow.in_progress))) == after == 2
        await end_tasks([keeper])


async def _keep_one_young(scene: Scene) -> None:
    while True:
        group = scene.start(50)
        try:
            await asyncio.sleep(0.03)
        finally:
            scene.groups.remove(group)


async def test_last_group_is_never_postponed() -> None:
    scene = Scene(TailPolicy.postpone)
    scene.start(10, started=time.monotonic() - 1000.0)
    await _postpones_nothing(scene, is_alone=True)


async def _postpones_nothing(scene: Scene, is_alone: bool = False) -> None:
    """Though a batch is ready and others were far quicker."""
    scene.durations.extend([100.0] * MIN_RECENT)
    async with scene.running():
        others = [] if is_alone else [asyncio.create_task(_keep_one_young(scene))]
        scene.is_full = True
        await asyncio.sleep(0.3)
        await end_tasks(others)
    assert not scene.interrupted and await scene.counted() == {}


async def test_new_turn_of_a_postponed_group_is_stopped_too() -> None:
    scene = Scene(TailPolicy.postpone)
    scene.durations.extend([0.02] * MIN_RECENT)
    slow = scene.start(10)
    acting, talking = sorted(slow.in_progress, key=lambda sample: sample.sample_id)
    acting.finish_reason = "stop"  # its environment is at work
    async with scene.running():
        keeper = asyncio.create_task(_keep_one_young(scene))
        stopped = scene.stops_at_once(slow)
        scene.lets_groups_wait_for_long()
        scene.is_full = True
        await until(lambda: scene.interrupted == [talking])
        later = make_sample(1)
        slow.begin(later)
        await until(lambda: later in scene.interrupted)
        assert scene.interrupted == [talking, later] and not any(one.done() for one in stopped)
        await end_tasks([keeper, *stopped])
    assert await scene.counted() == {"groups_postponed": 1, "samples_interrupted": 2}


async def test_group_without_running_samples_is_not_postponed() -> None:
    scene = Scene(TailPolicy.postpone)
    scored = scene.start(10, started=time.monotonic() - 1000.0)
    for sample in scored.in_progress:
        sample.finish_reason = "stop"
    await _postpones_nothing(scene)


async def test_external_groups_are_not_postponed() -> None:
    scene = Scene(TailPolicy.postpone)
    scene.start(10, is_external=True, started=time.monotonic() - 1000.0)
    await _postpones_nothing(scene)


async def test_counts_being_sent_when_the_worker_ends_are_sent_once() -> None:
    store = CountStore()
    store.is_open.clear()
    counters = Counters(store)
    counters.add("groups", 3)
    counters.add("tokens", 0.5)
    sending = asyncio.create_task(counters.flush())
    await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.wait([sending])
    assert sending.cancelled()
    counters.add("groups")
    last = asyncio.create_task(counters.flush())
    await asyncio.sleep(0.01)
    store.is_open.set()
    await last
    assert store.counts == {"groups": 4, "tokens": 0.5}


async def test_counts_that_failed_are_sent_later() -> None:
    store = CountStore()
    store.is_broken = True
    counters = Counters(store)
    counters.add("groups")
    counters.add("tokens", 7)
    with pytest.raises(ConnectionError):
        await counters.flush()
    store.is_broken = False
    counters.add("tokens", 1)
    await counters.flush()
    assert store.counts == {"groups": 1, "tokens": 8}


async def test_group_is_slow_after_twice_the_median_of_enough_others() -> None:
    scene = Scene(TailPolicy.postpone)
    early, late = scene.start(1), scene.start(2)
    early.started, late.started = time.monotonic() - 400.0, time.monotonic() - 600.0
    scene.is_full = True
    scene.durations.extend([100.0, 200.0, 300.0])
    async with scene.running():
        await asyncio.sleep(0.3)
        assert not scene.interrupted, "too few have ended to tell"
        scene.durations.append(5000.0)
        await until(lambda: late.in_progress <= set(scene.interrupted))
    assert late.in_progress == set(scene.interrupted) and not early.is_held


def test_lengths_are_counted_in_buckets() -> None:
    lengths = (0, 256, 257, 1024, 4096, 4097, 16384, 16385, 65536, 65537)
    small = ["<=256", "<=256", "<=1k", "<=1k", "<=4k"]
    buckets = [*small, "<=16k", "<=16k", "<=64k", "<=64k", ">64k"]
    assert [length_bucket(n) for n in lengths] == buckets
