"""Part STRATEGIES: the same prompts, lengths and engine for three published schedules and ours.

Ours runs twice: with a leash that the longest answers have room in, and with one so short that the
trainer has to wait for them. Every group is delivered, whatever it costs, so a schedule that takes
the short ones first gains nothing by it. `utilisation` is the rate of tokens of use against the
engine's own, with as many equally long requests at once as it may run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks import KEY
from benchmarks.report import Report
from benchmarks.rollouts.bare import run_bare
from benchmarks.rollouts.published.rivals import Trainer, run_batches, run_partial, run_stream
from benchmarks.rollouts.scene import ENGINE, Commits, pool_at
from benchmarks.rollouts.work import Job, Tally, WorkSize, draw_jobs, equal_jobs
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.sampling.engine_watch import ASK_EVERY_S, poll_load
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Completer
from rollout_pool.sampling.sampler import Sampler

Rival = Callable[[Sequence[Job], Completer, WorkSize, Trainer], Awaitable[Tally]]
RIVALS: dict[str, Rival] = {"sync": run_batches, "stream": run_stream, "partial": run_partial}
SHORT_LEASH = "ours, short leash"


async def measure_strategies(
    size: WorkSize, folder: Path, engine: SGLangEngine, report: Report
) -> None:
    jobs = draw_jobs(size, seed=1)
    tallies: dict[str, list[Tally]] = defaultdict(list)
    peaks: list[float] = []
    commits = Commits(engine.client, folder)
    await commits.begin()
    leashes = {"ours": size.max_staleness, SHORT_LEASH: size.short_leash}
    for number in range(size.rounds):
        peaks.append(await _peak(size, engine, number))
        for name in (*RIVALS, *leashes):
            await commits.begin()
            if name in RIVALS:
                tally = await run_rival(RIVALS[name], size, jobs, engine.client.url, commits)
            else:
                sized = dataclasses.replace(size, max_staleness=leashes[name])
                run = f"ours-{leashes[name]}-{number}"
                async with pool_at(
                    folder, engine.info, sized, jobs, name=run, commits=commits
                ) as pool:
                    tally = await pool.run(len(jobs))
            tallies[name].append(tally)
            report.say(f"{name}: {tally.seconds:.1f} s, {tally.wasted:.1%} wasted")
    _show(report, tallies, median(peaks))


async def _peak(size: WorkSize, engine: SGLangEngine, number: int) -> float:
    """Tokens a second of the engine at its fullest."""
    length = max(16, 2 * size.median_tokens)
    jobs = equal_jobs(3 * size.max_running // size.group_size, size.group_size, length)
    tally = await run_bare(jobs, engine.client.url, size.max_running, prefix=f"peak-{number}")
    return tally.tokens_per_s


async def run_rival(
    rival: Rival,
    size: WorkSize,
    jobs: Sequence[Job],
    url: str,
    commits: Commits,
    *,
    load_every_s: float = ASK_EVERY_S,
    train_s: float = 0.0,
) -> Tally:
    client = SGLangClient(ENGINE, url, key=KEY, request_timeout_s=120.0, is_only_client=True)
    router = Router([client], 120.0, max_running_requests=size.max_running)
    router.follow({ENGINE: 0}, trainer=0, max_staleness=0)
    polling = asyncio.create_task(poll_load(router, client, load_every_s))
    try:
        trainer = Trainer(step_s=train_s, commit=commits.next)
        return await rival(jobs, Sampler(router, max_retries=2), size, trainer)
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await client.close()


def _show(report: Report, tallies: dict[str, list[Tally]], peak: float) -> None:
    table = Table(title="every group delivered; medians")
    columns = ("groups/s", "tokens/s", "utilisation", "half done", "90% done", "all done", "wasted")
    for column in ("", *columns, "steps"):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in tallies.items():
        table.add_row(
            name,
            f"{median(t.groups_per_s for t in runs):.2f}",
            f"{median(t.tokens_per_s for t in runs):.0f}",
            f"{median(t.tokens_per_s for t in runs) / peak:.0%}",
            *(f"{median(t.done_after(share) for t in runs):.1f} s" for share in (0.5, 0.9, 1.0)),
            f"{median(t.wasted for t in runs):.1%}",
            str(runs[0].num_steps),
        )
    report.show(table)

    def against(name: str, ours: str = "ours") -> float:
        pairs = zip(tallies[ours], tallies[name], strict=True)
        return median(mine.groups_per_s / rival.groups_per_s for mine, rival in pairs)

    report.target("vs_sync", against("sync"), ">=", 2.0, "groups/s against synchronous batches")
    report.target("vs_stream", against("stream"), ">=", 1.0, "against the first to finish")
    report.target("vs_partial", against("partial"), ">=", 1.0, "against interrupted and resumed")
    short = against("sync", SHORT_LEASH)
    report.figure("short_leash_vs_sync", short, "ours with the short leash, against synchronous")
    ours = tallies["ours"]
    wasted = median(tally.wasted for tally in ours)
    report.target("wasted_tokens", wasted, "<=", 0.02, "sampled and not delivered")
    utilisation = median(tally.tokens_per_s for tally in ours) / peak
    report.figure("engine_utilisation", utilisation, "tokens of use against the engine's own rate")
