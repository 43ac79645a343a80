"""Part GPU: the schedules at an engine with the service times of an H100, at several tail weights.

Three published schedules, ours, and ours with the other two tail policies. Every group is
delivered. A trainer's step takes no time here: the published schedules wait for it between two
batches and ours goes on meanwhile, so that any time at all would speak for ours. A commit takes
as long as on the GPU, for all. The engine, and the looks at its load that set the limit of requests
in flight, are as many times faster than the clock; the CPU time of a worker is not, which counts
against ours.

`early length` shows the bias in what is trained: the mean length of the groups that the first half
of the steps trained, over the mean of all. A schedule without bias has 1 until its work ends. Below
1 short answers are trained first, and a run that learns meanwhile learns from them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks import KEY
from benchmarks.report import Report
from benchmarks.rollouts.scene import ENGINE, Commits, pool_at
from benchmarks.rollouts.strategies import RIVALS, run_rival
from benchmarks.rollouts.work import Job, Tally, WorkSize, draw_jobs
from configs.choices import TailPolicy
from processes.child import Child
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.sampling.watch import ASK_EVERY_S

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
        for rival in RIVALS:
            pairs = zip(tallies["ours"], tallies[rival], strict=True)
            ratio = median(ours.groups_per_s / theirs.groups_per_s for ours, theirs in pairs)
            ratios[rival].append(ratio)
            report.figure(f"gpu_vs_{rival}_{weight:g}", ratio, f"tail {weight:g}, groups/s")
        wasted.append(median(tally.wasted for tally in tallies["ours"]))
    for rival, bound in (("sync", 2.0), ("stream", 1.0), ("partial", 1.0)):
        report.target(f"gpu_vs_{rival}", min(ratios[rival]), ">=", bound, "least of all tails")
    report.target("gpu_wasted_tokens", max(wasted), "<=", 0.02, "most of all tails")


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


async def _run(name: str, size: WorkSize, jobs: list[Job], folder: Path, number: int) -> Tally:
    async with gpu_at(folder, size) as info:
        client = SGLangClient(ENGINE, info.url, key=KEY, request_timeout_s=120.0)
        try:
            commits = Commits(client, folder)
            load_every_s = ASK_EVERY_S / size.gpu_speed
            if name in RIVALS:
                return await run_rival(
                    RIVALS[name], size, jobs, info.url, commits, load_every_s=load_every_s
                )
            run = f"gpu-{name}-{size.p99_over_p50:g}-{number}"
            async with pool_at(
                folder,
                info,
                size,
                jobs,
                name=run,
                commits=commits,
                tail=OURS[name],
                load_every_s=load_every_s,
            ) as pool:
                return await pool.run(len(jobs))
        finally:
            await client.close()


@asynccontextmanager
async def gpu_at(folder: Path, size: WorkSize) -> AsyncIterator[EngineInfo]:
    """An emulated engine in another process."""
    command = [sys.executable, "-m", "benchmarks.rollouts.gpu_engine"]
    child = Child(
        [*command, str(size.gpu_speed), str(size.max_running)], folder / "gpu.log", speaks=True
    )
    try:
        url = f"http://127.0.0.1:{int(await child.first_line())}"
        yield EngineInfo(name=ENGINE, url=url, pid=child.pid)
    finally:
        child.stop(timeout_s=5.0)


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
