"""Parts GPU and TRAINING: schedules at an engine with the service times of an H100.

Three published schedules, ours, and ours with the other two tail policies. Every group is
delivered. A trainer's step takes no time: these schedules wait for it between two batches and ours
goes on meanwhile, so that any time at all would speak for ours. Part TRAINING gives it time, and
compares ours with schedules that train meanwhile, too: `of the bound` is the time that generation
alone, or training alone, would take for all steps, the longer of the two, over that which was
taken. A commit takes as long as on the GPU, for all. The engine, and the looks at its load that set
the limit of requests in flight, are as many times faster than the clock; the CPU time of a worker
is not, which counts against ours.

`early length` shows the bias in what is trained: the mean length of the groups that the first half
of the steps trained, over the mean of all. A schedule without bias has 1 until its work ends. Below
1 short answers are trained first, and a run that learns meanwhile learns from them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks import KEY
from benchmarks.report import Report
from benchmarks.rollouts.gpu_engine import Roofline
from benchmarks.rollouts.published.rivals import Continuous, run_one_off
from benchmarks.rollouts.scene import ENGINE, Commits, engines_of, pool_at
from benchmarks.rollouts.strategies import RIVALS, Rival, run_rival
from benchmarks.rollouts.work import Job, Tally, WorkSize, draw_jobs
from configs.choices import OnStale, TailPolicy
from controller.simulate.events import Setting, simulate
from controller.simulate.machine import Machine
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.sampling.engine_watch import ASK_EVERY_S

MEANWHILE: dict[str, Rival] = {"one_off": run_one_off, "counter": Continuous.play}
"""Schedules that differ from the others only where a step takes time."""
OURS = {
    "ours": TailPolicy.continue_across_versions,
    "interrupt_and_resume": TailPolicy.interrupt_and_resume,
    "postpone": TailPolicy.postpone,
}


async def measure_gpu(size: WorkSize, folder: Path, report: Report) -> None:
    ratios: dict[str, list[float]] = defaultdict(list)
    wasted: list[float] = []
    for weight in size.gpu_tails:
        tallies = await _measure_tail(_sized(size, weight), folder, report)
        _show(report, tallies, weight)
        for name, max_staleness in (("sync", 0), ("ours", size.max_staleness)):
            simulated = _simulated(_sized(size, weight), max_staleness)
            ratio = median(t.seconds for t in tallies[name]) / simulated
            how = f"tail {weight:g}, {name}: seconds over those of the simulation"
            report.figure(f"gpu_simulated_{name}_{weight:g}", ratio, how)
        for rival in RIVALS:
            pairs = zip(tallies["ours"], tallies[rival], strict=True)
            ratio = median(ours.groups_per_s / theirs.groups_per_s for ours, theirs in pairs)
            ratios[rival].append(ratio)
            report.figure(f"gpu_vs_{rival}_{weight:g}", ratio, f"tail {weight:g}, groups/s")
        wasted.append(median(tally.wasted for tally in tallies["ours"]))
    for rival, bound in (("sync", 2.0), ("stream", 1.0), ("partial", 1.0)):
        report.target(f"gpu_vs_{rival}", min(ratios[rival]), ">=", bound, "least of all tails")
    report.target("gpu_wasted_tokens", max(wasted), "<=", 0.02, "most of all tails")


def _simulated(size: WorkSize, max_staleness: int) -> float:
    """Seconds of the clock for the same answers, under the virtual one; median of the rounds."""
    gpu, seconds = Roofline(), list[float]()
    machine = Machine(
        gpu="H100",
        num_params=gpu.parameters,
        active_params=gpu.parameters,
        kv_elements=gpu.kv_bytes / 2,
        tp_size=1,
        max_running=size.max_running,
        utilisation=float("inf"),  # a step takes no time
        wire_bytes_per_s=float("inf"),
        host_bytes_per_s=2 * gpu.parameters / gpu.load_s,
    )
    for number in range(size.gpu_rounds):
        jobs = draw_jobs(size, seed=number)
        setting = Setting(
            machine=machine,
            num_engines=1,
            num_trainer_gpus=1,
            num_steps=len(jobs) // size.batch_groups,
            groups_per_step=size.batch_groups,
            prompt_tokens=len(jobs[0].prompt),
            max_staleness=max_staleness,
            on_stale=OnStale.wait,
        )
        lengths = iter([job.lengths for job in jobs])
        seconds.append(simulate(setting, partial(next, lengths, ())).ends[-1])
    return median(seconds) / size.gpu_speed


def _sized(size: WorkSize, weight: float) -> WorkSize:
    return dataclasses.replace(
        size,
        num_groups=size.gpu_groups,
        p99_over_p50=weight,
        median_tokens=size.gpu_median_tokens,
        longest=size.gpu_longest,
    )


async def _measure_tail(size: WorkSize, folder: Path, report: Report) -> dict[str, list[Tally]]:
    tallies: dict[str, list[Tally]] = defaultdict(list)
    for number in range(size.gpu_rounds):
        jobs = draw_jobs(size, seed=number)
        for name in (*RIVALS, *OURS):
            tally = await _run(name, size, jobs, folder, number)
            tallies[name].append(tally)
            report.say(f"tail {size.p99_over_p50:g}, {name}: {tally.seconds:.1f} s")
    return tallies


async def measure_training(size: WorkSize, folder: Path, report: Report) -> None:
    sized = _sized(size, size.gpu_tails[min(1, len(size.gpu_tails) - 1)])
    for train_s in size.gpu_train_s:
        tallies: dict[str, list[Tally]] = defaultdict(list)
        for number in range(size.gpu_rounds):
            jobs = draw_jobs(sized, seed=number)
            for name in ("sync", "partial", *MEANWHILE, "ours"):
                tally = await _run(name, sized, jobs, folder, number, train_s / size.gpu_speed)
                tallies[name].append(tally)
        table = Table(
            title=f"tail {sized.p99_over_p50:g}, {train_s:g} s of training a step; medians"
        )
        for column in ("", "groups/s", "of the bound", "early length", "wasted"):
            table.add_column(column)
        for name, runs in tallies.items():
            reached = median(_bound_s(sized, tally, train_s) / tally.seconds for tally in runs)
            report.note(f"gpu_of_bound_{name}_train_{train_s:g}", reached)
            early = median(tally.early_length for tally in runs)
            wasted = median(tally.wasted for tally in runs)
            rate = median(tally.groups_per_s for tally in runs)
            table.add_row(name, f"{rate:.2f}", f"{reached:.2f}", f"{early:.2f}", f"{wasted:.1%}")
        report.show(table)


def _bound_s(size: WorkSize, tally: Tally, train_s: float) -> float:
    """Seconds of the clock that the longer of generation and training takes for all steps, if it
    never waits: an engine whose places are always taken by answers of mean length."""
    mean = tally.used_tokens / (len(tally.ends) * size.group_size)
    # A running answer has half its tokens in the cache, and its prompt.
    step_s = Roofline().step_s(size.max_running, size.max_running * (32 + mean / 2))
    generation = tally.used_tokens / size.max_running * step_s
    commits = Roofline().load_s * tally.num_steps
    return max(generation + commits, train_s * tally.num_steps) / size.gpu_speed


async def _run(
    name: str,
    size: WorkSize,
    jobs: list[Job],
    folder: Path,
    number: int,
    train_s: float = 0.0,
) -> Tally:
    async with gpu_at(folder, size) as info:
        client = SGLangClient(ENGINE, info.url, key=KEY, request_timeout_s=120.0)
        try:
            commits = Commits(client, folder)
            load_every_s = ASK_EVERY_S / size.gpu_speed
            if name in RIVALS | MEANWHILE:
                return await run_rival(
                    (RIVALS | MEANWHILE)[name],
                    size,
                    jobs,
                    info.url,
                    commits,
                    load_every_s=load_every_s,
                    train_s=train_s,
                )
            run = f"gpu-{name}-{size.p99_over_p50:g}-{train_s:g}-{number}"
            async with pool_at(
                folder,
                info,
                size,
                jobs,
                name=run,
                commits=commits,
                tail=OURS[name],
                load_every_s=load_every_s,
                train_s=train_s,
            ) as pool:
                return await pool.run(len(jobs))
        finally:
            await client.close()


@asynccontextmanager
async def gpu_at(folder: Path, size: WorkSize) -> AsyncIterator[EngineInfo]:
    """An emulated engine in another process."""
    async with gpus_at(folder, size.gpu_speed, size.max_running) as (info,):
        yield info


@asynccontextmanager
async def gpus_at(
    folder: Path, speed: float, places: int, model: str = "8b", number: int = 1
) -> AsyncIterator[list[EngineInfo]]:
    """Emulated engines in one other process."""
    async with engines_of("gpu_engine", folder, speed, places, model, number) as engines:
        yield engines


def _show(report: Report, tallies: dict[str, list[Tally]], weight: float) -> None:
    table = Table(title=f"H100 emulated, p99/p50 {weight:g}: every group delivered; medians")
    columns = ("groups/s", "tokens/s", "half done", "all done", "early length", "wasted", "steps")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in tallies.items():
        early = median(tally.early_length for tally in runs)
        report.note(f"gpu_early_length_{name}_{weight:g}", early)
        table.add_row(
            name,
            f"{median(t.groups_per_s for t in runs):.2f}",
            f"{median(t.tokens_per_s for t in runs):.0f}",
            *(f"{median(t.done_after(share) for t in runs):.1f} s" for share in (0.5, 1.0)),
            f"{early:.2f}",
            f"{median(t.wasted for t in runs):.1%}",
            str(runs[0].num_steps),
        )
    report.show(table)
