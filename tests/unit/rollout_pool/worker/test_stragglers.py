"""Stragglers under each policy; times are real but short."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from buffer.types import PromptRef
from configs.choices import TailPolicy
from rollout_pool.cancelling import end_tasks
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.request import EpisodeRequest
from rollout_pool.sampling.sample import Sample
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker import stragglers
from rollout_pool.worker.group_run import Counters, GroupRun, length_bucket
from rollout_pool.worker.stragglers import (
    MIN_RECENT,
    RECENT,
    TAILS,
    Lap,
    Pace,
    Postpone,
    Tail,
    WaitingRoom,
)
from tests.support.rollout import make_sample, spans, until, write


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "LOOK_EVERY_S", 0.1)


class CountStore:
    """Counts as RunState does, each only when it is let through."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.breaks = ""

    async def count(self, name: str, amount: float = 1) -> None:
        await self.is_open.wait()
        if name == self.breaks:
            raise ConnectionError("no server")
        self.counts[name] += amount  # type: ignore[assignment]


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

    def __init__(
        self, policy: TailPolicy, max_postponements: int = 2, keep_partial: bool = True
    ) -> None:
        self.versions, self.store = Versions(), CountStore()
        self.counters = Counters(self.store)
        self.interrupted: list[Sample] = []
        self.on_interrupt: list[Callable[[Sample], None]] = []
        self.is_full, self.order = False, 100
        self.tail: Tail = TAILS[policy](
            interrupt=self._interrupt,
            versions=self.versions,
            counters=self.counters,
            is_batch_ready=self._is_batch_ready,
            next_order=lambda: self.order,
            max_postponements=max_postponements,
            keep_partial=keep_partial,
        )

    def _interrupt(self, sample: Sample) -> None:
        self.interrupted.append(sample)
        for call in self.on_interrupt:
            call(sample)

    def lets_groups_wait_for_long(self) -> None:
        """From the first interruption on a postponed group has not waited for long enough."""
        self.on_interrupt.append(lambda _: self.note_times(60.0))

    def stops_at_once(self, run: GroupRun) -> list[asyncio.Task[None]]:
        """What the episode runners do with a sample of the group as soon as it is interrupted."""
        waiting: list[asyncio.Task[None]] = []

        def stop(sample: Sample) -> None:
            if sample in run.samples:
                waiting.append(asyncio.create_task(run.may_go_on(sample)))

        self.on_interrupt.append(stop)
        return waiting

    def note_times(self, seconds: float) -> None:
        """As if so many groups had taken so long that no others count."""
        assert isinstance(self.tail, Postpone)
        for _ in range(RECENT):
            self.tail._pace.note(seconds)

    async def _is_batch_ready(self) -> bool:
        return self.is_full

    def start(
        self, order: int, num_samples: int = 2, source: EpisodeSource | None = None
    ) -> GroupRun:
        prompt = Prompt(index=order, is_held_out=False, text="?")
        run = GroupRun(
            group_id=f"0-{order}",
            ref=PromptRef(task="sums", index=order),
            prompt=prompt,
            order=order,
            source=source or Unasked(),
        )
        for n in range(num_samples):
            run.note_sample(make_sample(n, prompt=[1]))
        self.tail.begin(run)
        return run

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


class Unasked(EpisodeSource):
    """A worker's own source, which runs nothing here."""

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        raise AssertionError("not run here")


class Stranger(Unasked):
    """An external program that never ends."""

    is_external = True


def _stopped(run: GroupRun) -> list[asyncio.Task[None]]:
    """What the episode runners do with samples that were interrupted."""
    return [asyncio.create_task(run.may_go_on(sample)) for sample in run.samples]


async def test_samples_wait_for_the_new_version_and_the_stalest_goes_first() -> None:
    scene, order = Scene(TailPolicy.interrupt_and_resume), list[int]()
    runs = [scene.start(order) for order in (5, 2, 9)]
    ended = next(iter(runs[0].samples))
    ended.finish_reason = "stop"

    async def go_on(run: GroupRun, sample: Sample) -> None:
        await run.may_go_on(sample)
        order.append(sample.order)

    async with scene.running():
        await asyncio.sleep(0)
        scene.versions.tell(trainer=1)
        await until(lambda: len(scene.interrupted) == 5)
        assert ended not in scene.interrupted
        resumed = [asyncio.create_task(go_on(f, s)) for f in runs for s in f.samples - {ended}]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in resumed)
        scene.versions.tell(engines=1)
        await asyncio.wait_for(asyncio.gather(*resumed), 60)
    assert order == [2, 2, 5, 9, 9]
    assert await scene.counted() == {"samples_interrupted": 5, "samples_resumed": 5}


async def test_sample_interrupted_late_does_not_wait_for_the_next_version() -> None:
    scene = Scene(TailPolicy.interrupt_and_resume)
    run = scene.start(1)
    async with scene.running():
        await asyncio.sleep(0)
        scene.versions.tell(trainer=1, engines=1)
        await until(lambda: len(scene.interrupted) == 2)
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asyncio.gather(*_stopped(run)), 60)


async def test_stopped_samples_lose_their_tokens_before_they_wait_except_what_a_client_reads() -> (
    None
):
    scene = Scene(TailPolicy.interrupt_and_resume, keep_partial=False)
    run = scene.start(1)
    read, unread = run.samples
    read.on_tokens = lambda sample: None
    for sample in (read, unread):
        write(sample, [7, 8, 9], version=0)
    async with scene.running():
        await asyncio.sleep(0)
        scene.versions.tell(trainer=1)
        await until(lambda: len(scene.interrupted) == 2)
        waiting = _stopped(run)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        assert (unread.output_ids, unread.logprobs, spans(unread)) == ([], [], [])
        assert (unread.num_wasted, unread.num_left) == (3, unread.max_new_tokens)
        assert (read.output_ids, read.num_wasted) == ([7, 8, 9], 0)
        scene.versions.tell(engines=1)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)


async def test_waiting_room_releases_after_its_limit() -> None:
    room, scene = WaitingRoom(), Scene(TailPolicy.continue_across_versions)
    room.close()
    (sample,) = scene.start(1, num_samples=1).samples
    await asyncio.wait_for(room.pass_through(sample, 0.05), 60)


async def test_groups_continue_across_versions() -> None:
    scene = Scene(TailPolicy.continue_across_versions)
    run = scene.start(1)
    async with scene.running():
        scene.versions.tell(trainer=1)
        scene.is_full = True
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asyncio.gather(*_stopped(run)), 60)
    assert not scene.interrupted


async def _land_quick_groups(scene: Scene, number: int = MIN_RECENT) -> None:
    for order in range(number):
        run = scene.start(order)
        await asyncio.sleep(0.02)
        scene.tail.end(run, is_done=True)


async def test_slow_group_waits_while_a_batch_is_ready_and_continues_when_it_is_taken() -> None:
    scene = Scene(TailPolicy.postpone, max_postponements=2)
    await _land_quick_groups(scene)
    slow = scene.start(10)
    async with scene.running():
        await asyncio.sleep(0.25)
        other = scene.start(11)
        assert not scene.interrupted  # the trainer still lacks groups
        waiting = scene.stops_at_once(slow)
        scene.lets_groups_wait_for_long()
        scene.is_full = True
        # `other` becomes slow as well at the first look: a third keeps both from being alone.
        keeper = asyncio.create_task(_keep_one_young(scene))
        await until(lambda: slow.samples <= set(scene.interrupted))
        assert slow.order == 100 and {sample.order for sample in slow.samples} == {100}
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        scene.is_full = False
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        scene.on_interrupt.clear()
        again = scene.stops_at_once(slow)
        scene.note_times(0.02)
        before = len(scene.interrupted)
        scene.is_full = True  # once more: the last time, after which it goes first
        await until(lambda: slow.samples <= set(scene.interrupted[before:]))
        assert slow.order == 0 and {sample.order for sample in slow.samples} == {0}
        await asyncio.wait_for(asyncio.gather(*again), 60)
        after = scene.interrupted.count(next(iter(slow.samples)))
        await asyncio.sleep(0.3)
        assert scene.interrupted.count(next(iter(slow.samples))) == after == 2
        await end_tasks([keeper])
        scene.tail.end(slow, is_done=True)
        scene.tail.end(other, is_done=False)


async def _keep_one_young(scene: Scene) -> None:
    while True:
        run = scene.start(50)
        try:
            await asyncio.sleep(0.03)
        finally:
            scene.tail.end(run, is_done=False)


async def test_last_group_is_never_postponed() -> None:
    scene = Scene(TailPolicy.postpone)
    await _land_quick_groups(scene)
    slow, scene.is_full = scene.start(10), True
    async with scene.running():
        await asyncio.sleep(0.3)
    assert not scene.interrupted
    scene.tail.end(slow, is_done=True)


async def test_new_turn_of_a_postponed_group_is_stopped_too() -> None:
    scene = Scene(TailPolicy.postpone)
    await _land_quick_groups(scene)
    slow = scene.start(10)
    acting, talking = sorted(slow.samples, key=lambda sample: sample.sample_id)
    acting.finish_reason = "stop"  # its environment is at work
    async with scene.running():
        keeper = asyncio.create_task(_keep_one_young(scene))
        stopped = scene.stops_at_once(slow)
        scene.lets_groups_wait_for_long()
        scene.is_full = True
        await until(lambda: scene.interrupted == [talking])
        later = make_sample(1)
        slow.note_sample(later)
        await until(lambda: later in scene.interrupted)
        assert scene.interrupted == [talking, later] and not any(one.done() for one in stopped)
        await end_tasks([keeper, *stopped])
    assert await scene.counted() == {"groups_postponed": 1, "samples_interrupted": 2}


async def test_policy_that_takes_over_releases_a_postponed_group_and_holds_it_by_its_own_rule() -> (
    None
):
    scene = Scene(TailPolicy.postpone)
    await _land_quick_groups(scene)
    slow = scene.start(10)
    async with scene.running():
        keeper = asyncio.create_task(_keep_one_young(scene))
        scene.lets_groups_wait_for_long()
        scene.is_full = True
        await until(lambda: slow.samples <= set(scene.interrupted))
        waiting = _stopped(slow)
        await end_tasks([keeper])
    scene.tail.close()
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    next_one = Scene(TailPolicy.interrupt_and_resume)
    next_one.tail.begin(slow)
    async with next_one.running():
        await asyncio.sleep(0)
        next_one.versions.tell(trainer=1)
        await until(lambda: slow.samples <= set(next_one.interrupted))
        held = asyncio.create_task(slow.wait_to_go_on(next(iter(slow.samples))))
        await asyncio.sleep(0.05)
        assert not held.done()
        next_one.versions.tell(engines=1)
        await asyncio.wait_for(held, 60)


async def test_group_without_running_samples_is_not_postponed() -> None:
    scene = Scene(TailPolicy.postpone)
    await _land_quick_groups(scene)
    scored = scene.start(10)
    for sample in scored.samples:
        sample.finish_reason = "stop"
    async with scene.running():
        keeper = asyncio.create_task(_keep_one_young(scene))
        scene.is_full = True
        await asyncio.sleep(0.3)
        await end_tasks([keeper])
    assert not scene.interrupted and await scene.counted() == {}


async def test_external_groups_are_neither_postponed_nor_part_of_the_median() -> None:
    scene = Scene(TailPolicy.postpone)
    await _land_quick_groups(scene)
    strange = scene.start(10, source=Stranger())
    strange.started -= 1000.0
    async with scene.running():
        keeper = asyncio.create_task(_keep_one_young(scene))
        scene.is_full = True
        await asyncio.sleep(0.3)
        await end_tasks([keeper])
    for _ in range(MIN_RECENT + 1):
        other = scene.start(11, source=Stranger())
        other.started -= 1000.0
        scene.tail.end(other, is_done=True)
    scene.tail.end(strange, is_done=True)
    assert not scene.interrupted
    assert isinstance(scene.tail, Postpone)
    median_s = scene.tail._pace.median_s
    assert median_s is not None and median_s < 1.0


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
    store.breaks = "tokens"
    counters = Counters(store)
    counters.add("groups")
    counters.add("tokens", 7)
    with pytest.raises(ConnectionError):
        await counters.flush()
    store.breaks = ""
    counters.add("tokens", 1)
    await counters.flush()
    assert store.counts == {"groups": 1, "tokens": 8}


def test_group_is_slow_after_twice_the_median_since_it_resumed() -> None:
    pace = Pace(max_postponements=1)
    lap = Lap(since=100.0)
    for seconds in (1.0, 2.0, 3.0):
        pace.note(seconds)
    assert not pace.is_slow(lap, now=1000.0)  # too few have ended to tell
    pace.note(50.0)
    assert pace.median_s == 2.5
    assert not pace.is_slow(lap, now=105.0) and pace.is_slow(lap, now=105.1)
    waiting = Lap(since=100.0, is_waiting=True)
    assert not pace.is_slow(waiting, now=999.0)
    assert not pace.has_waited(waiting, now=102.5) and pace.has_waited(waiting, now=102.6)
    assert not pace.is_slow(Lap(since=100.0, num_postponed=1), now=999.0)


def test_lengths_are_counted_in_buckets() -> None:
    lengths = (0, 256, 257, 1024, 4096, 4097, 16384, 16385, 65536, 65537)
    small = ["<=256", "<=256", "<=1k", "<=1k", "<=4k"]
    buckets = [*small, "<=16k", "<=16k", "<=64k", "<=64k", ">64k"]
    assert [length_bucket(n) for n in lengths] == buckets
