"""Parts EFFICIENCY, STUB and REWARDS: what the pool itself costs.

- pool_efficiency: tokens/s through worker, router, reward and push against a bare load generator at
  the same engine with the same requests, in turn.
- stub_requests_per_s, stub_in_flight: one worker at an engine of fixed latency in another process.
- reward_overlap: seconds with rewards that take as long as generation, against rewards that take
  none, at the same engine of fixed latency.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.report import Report
from benchmarks.rollouts.bare import run_bare
from benchmarks.rollouts.scene import Commits, engines_of, pool_at
from benchmarks.rollouts.work import Tally, WorkSize, equal_jobs
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.engines.sglang.engine import SGLangEngine

STUB_TOKENS = 32


async def measure_efficiency(
    size: WorkSize, folder: Path, engine: SGLangEngine, report: Report
) -> None:
    num_groups = 6 * size.max_running // size.group_size
    jobs = equal_jobs(num_groups, size.group_size, 4 * size.median_tokens)
    ratios: list[float] = []
    url = engine.client.url
    await Commits(engine.client, folder).begin()
    await run_bare(jobs, url, size.max_running, prefix="warm")
    for number in range(size.pairs):
        bare = await run_bare(jobs, url, size.max_running, prefix=f"bare-{number}")
        # All under version 0: no commit, so that both ask the same of the engine.
        calm = dataclasses.replace(size, max_staleness=10_000)
        async with pool_at(folder, engine.info, calm, jobs, name=f"pool-{number}") as pool:
            ours = await pool.run(len(jobs))
        ratios.append(ours.tokens_per_s / bare.tokens_per_s)
        report.say(f"bare {bare.tokens_per_s:.0f}, pool {ours.tokens_per_s:.0f} tokens/s")
    report.target("pool_efficiency", median(ratios), ">=", 0.95, "tokens/s against bare load")


async def measure_stub(size: WorkSize, folder: Path, report: Report) -> None:
    num_samples = 6 * size.stub_in_flight
    async with stub_at(size.stub_latency_s, folder) as info:
        tally, most = await _at_stub(size, folder, info, num_samples, size.stub_in_flight)
    rate = num_samples / tally.seconds
    report.target("stub_requests_per_s", rate, ">=", 500, "one worker, an engine of fixed latency")
    report.target("stub_in_flight", most, ">=", 2000, "requests at once at that engine")


async def measure_rewards(size: WorkSize, folder: Path, report: Report) -> None:
    latency_s, processes = size.reward_s, size.reward_processes
    seconds = dict[float, float]()
    async with stub_at(latency_s, folder) as info:
        for score_s in (0.0, latency_s):
            num_samples = size.reward_rounds * processes
            tally, _ = await _at_stub(
                size, folder, info, num_samples, processes, score_s=score_s, processes=processes
            )
            seconds[score_s] = tally.seconds
            report.say(f"generation {latency_s:g} s, reward {score_s:g} s: {tally.seconds:.1f} s")
    ratio = seconds[latency_s] / seconds[0.0]
    report.target("reward_overlap", ratio, "<=", 1.1, "rewards as long as generation, against none")


async def _at_stub(
    size: WorkSize,
    folder: Path,
    info: EngineInfo,
    num_samples: int,
    in_flight: int,
    *,
    score_s: float = 0.0,
    processes: int = 1,
) -> tuple[Tally, int]:
    """The tally, and the most requests that the engine had at once."""
    jobs = equal_jobs(num_samples // size.group_size, size.group_size, STUB_TOKENS)
    # Admission is out of the way: the engine's places alone bound what is in flight.
    wide = dataclasses.replace(
        size,
        max_staleness=10_000,
        batch_groups=max(1, in_flight // size.group_size),
        max_running=in_flight,
    )
    async with httpx.AsyncClient(base_url=info.url, trust_env=False) as http:
        await http.get("/counts")
        async with pool_at(
            folder,
            info,
            wide,
            jobs,
            name=f"stub-{score_s:g}",
            score_s=score_s,
            reward_processes=processes,
        ) as pool:
            tally = await pool.run(len(jobs))
        counts = (await http.get("/counts")).json()
    return tally, int(counts["most_in_flight"])


@asynccontextmanager
async def stub_at(
    latency_s: float, folder: Path, num_tokens: int = STUB_TOKENS
) -> AsyncIterator[EngineInfo]:
    async with stubs_at(latency_s, folder, num_tokens, 1) as (info,):
        yield info


@asynccontextmanager
async def stubs_at(
    latency_s: float, folder: Path, num_tokens: int, number: int
) -> AsyncIterator[list[EngineInfo]]:
    """Engines of one process."""
    async with engines_of("stub_engine", folder, latency_s, num_tokens, number) as engines:
        yield engines
