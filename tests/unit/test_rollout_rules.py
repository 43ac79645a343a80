"""The published rules that schedule rollouts, at engines whose clock is the turn of the loop.

An engine writes a token of each of its samples in a turn of the loop, so the order of all that
happens is always the same. The last tests have engines that take their time, on a virtual clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from benchmarks.rollouts.gpu_engine import GpuEngine, Roofline
from benchmarks.rollouts.published.rivals import (
    Continuous,
    Run,
    Trainer,
    run_batches,
    run_one_off,
    run_partial,
)
from benchmarks.rollouts.published.rules import Quota, Repack, Requeue, Window
from benchmarks.rollouts.scale import Schedule
from benchmarks.rollouts.strategies import Rival
from benchmarks.rollouts.task import Pauses
from benchmarks.rollouts.virtual import Ours, make_request, play_virtually, run_virtually
from benchmarks.rollouts.work import Tally, WorkSize, draw_jobs
from buffer.types import VersionSpan
from rollout_pool.sampling.sample import Clock, Interrupted, Sample, merge_spans

SIZE = WorkSize(
    num_groups=96, group_size=2, batch_groups=4, max_running=16, max_staleness=2, median_tokens=6,
    p99_over_p50=9.0, longest=60, scale_engines=2, pauses=Pauses(turns=3),
)  # fmt: skip
RULES: dict[str, Rival] = {
    "sync": run_batches, "one_off": run_one_off, "partial": run_partial, "counter": Continuous.play,
    "quota": Quota.play, "window": Window.play, "requeue": Requeue.play, "repack": Repack.play,
}  # fmt: skip


class Engines:
    """Completes samples, and remembers what was asked of the fleet."""

    def __init__(self) -> None:
        self.versions = Counter[str | None]()
        """By engine; None: of all."""
        self.calls: list[str] = []
        self.samples: set[Sample] = set()
        self.num_moved = 0
        self._stopped: set[Sample] = set()

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        self.samples.add(sample)
        while sample.num_left:
            await asyncio.sleep(0)
            if sample in self._stopped:
                self._stopped.remove(sample)
                raise Interrupted(sample.sample_id)
            number, version = len(sample.output_ids), self.versions[sample.engine]
            sample.output_ids.append(0)
            span = VersionSpan(version=version, start=number, end=number + 1)
            sample.version_spans = merge_spans([*sample.version_spans, span])
        sample.finish_reason = "length"

    def interrupt(self, sample: Sample) -> None:
        self.num_moved += 1
        self._stopped.add(sample)

    async def hold(self) -> None:
        self.calls.append("hold")

    async def commit(self) -> None:
        self.calls.append("commit")
        self.versions[None] += 1

    async def load(self, number: int, version: int) -> None:
        self.calls.append("load")
        self.versions[f"engine-{number}"] = version


@dataclass(kw_only=True, frozen=True)
class _Trainer(Trainer):
    order: list[int]
    """Numbers of the trained groups."""

    async def step(self, tally: Tally, runs: Sequence[Run], steps_a_version: int = 1) -> None:
        self.order.extend(run.job.index for run in runs)
        await super().step(tally, runs, steps_a_version)


def play(rule: Rival, size: WorkSize = SIZE) -> tuple[Tally, Engines, list[int]]:
    engines = Engines()
    trainer = _Trainer(
        step_s=0.0, commit=engines.commit, hold=engines.hold, load=engines.load, order=[]
    )
    tally = asyncio.run(rule(draw_jobs(size, seed=3), engines, size, trainer))
    return tally, engines, trainer.order


@pytest.mark.parametrize("name", RULES)
def test_rule_trains_every_group_once(name: str) -> None:
    tally, _, order = play(RULES[name])
    assert sorted(order) == [*range(SIZE.num_groups)]
    # Partial rollouts train more than a batch once a prompt has been put off twice.
    assert tally.num_steps < 24 if name == "partial" else tally.num_steps == 24
    assert len(tally.ages) == SIZE.num_groups and min(tally.ages) >= 0


def test_quota_transfers_every_fourth_step_and_bounds_what_begins_between() -> None:
    tally, engines, _ = play(Quota.play)
    assert engines.calls == ["hold", "commit"] * 6
    assert max(tally.ages) >= 4 and set(tally.ages[:16]) == {0, 1, 2, 3}


def test_window_is_overtaken_by_two_batches_at_most() -> None:
    tally, _, order = play(Window.play)
    left = set(order)
    for index in order:
        assert index < min(left) + 2 * SIZE.batch_groups
        left.remove(index)
    assert order != sorted(order) and max(tally.ages) <= SIZE.max_staleness


def test_requeue_throws_away_what_is_too_old() -> None:
    tally, _, _ = play(Requeue.play)
    assert max(tally.ages) <= SIZE.max_staleness and tally.wasted_tokens > 0


def test_repack_moves_last_answers_and_mixes_no_weights() -> None:
    _, engines, _ = play(Repack.play)
    assert engines.num_moved > 0 and "load" in engines.calls and "hold" not in engines.calls
    assert {len(sample.version_spans) for sample in engines.samples} == {1}


def test_ours_trains_nothing_too_old_and_the_virtual_clock_repeats_itself() -> None:
    size = dataclasses.replace(SIZE, max_running=4, scale_engines=3, scale_speed=1.0)
    jobs = draw_jobs(size, seed=3)
    for pauses in (Pauses(), Pauses(turns=3, turn_s=10.0), Pauses(reward_s=30.0)):
        for job in jobs:
            job.pauses = pauses
        ours = Schedule("", Ours.play)
        first, again = (play_virtually(ours, size, jobs, token_s=0.05) for _ in range(2))
        assert (first.ends, first.ages) == (again.ends, again.ages)
        assert max(first.ages) == SIZE.max_staleness
        assert sorted(first.lengths) == sorted(job.num_tokens for job in jobs)


def test_pause_of_an_engine_costs_no_part_of_a_step() -> None:
    """A step may stand for a second of a GPU, of which it had done a part."""
    roofline = Roofline(tokens=128)

    async def end_s(pause_s: float) -> float:
        engine, ended = GpuEngine(1.0, 4, roofline), asyncio.Queue[object]()
        engine.add(make_request("one", 0, 10, ended.put_nowait))
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(2.5 * roofline.step_s(1, 0))
        if pause_s:
            engine.hold(retracts=False)
            await asyncio.sleep(pause_s)
            engine.go_on()
        await ended.get()
        running.cancel()
        return asyncio.get_running_loop().time()

    without, paused = (run_virtually(end_s(pause_s)) for pause_s in (0.0, 7.0))
    assert paused == pytest.approx(without + 7.0, rel=1e-3)
