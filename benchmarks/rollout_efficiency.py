"""Parts EFFICIENCY, STUB and REWARDS: what the pool itself costs.

- pool_efficiency: tokens/s through worker, router, reward and push against a bare load generator at
  the same engine with the same requests, in turn.
- stub_requests_per_s, stub_in_flight: one worker at an engine of fixed latency in another process.
- reward_overlap: seconds with rewards that take as long as generation, against rewards that take
  none, at the same engine of fixed latency.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.report import Report
from benchmarks.rollout_bare import run_bare
from benchmarks.rollout_scene import KEY, Commits, build_model, engine_at, pool_at, run_pool
from benchmarks.rollout_task import text_of
from benchmarks.rollout_work import Job, Tally, WorkSize, encode
from rollout_pool.engines.engine import EngineInfo

STUB_TOKENS = 32
NUM_PAIRS = 6


def equal_jobs(num_groups: int, group_size: int, length: int) -> list[Job]:
    texts = [text_of(index) for index in range(num_groups)]
    return [
        Job(index=index, text=text, prompt=encode(text), lengths=(length,) * group_size)
        for index, text in enumerate(texts)
    ]


async def measure_efficiency(size: WorkSize, folder: Path, report: Report) -> None:
    folder.mkdir()
    build_model(size, folder)
    num_groups = 6 * size.max_running // size.group_size
    jobs = equal_jobs(num_groups, size.group_size, 4 * size.median_tokens)
    ratios: list[float] = []
    async with engine_at(folder, size) as engine:
        await Commits(engine, folder / "staged").begin()
        await run_bare(jobs, engine.client.url, KEY, size.max_running, prefix="warm")
        for number in range(NUM_PAIRS if size.num_groups > 100 else 1):
            bare = await run_bare(
                jobs, engine.client.url, KEY, size.max_running, prefix=f"bare-{number}"
            )
            # All under version 0: no commit, so that both ask the same of the engine.
            calm = dataclasses.replace(size, max_staleness=10_000)
            async with pool_at(
                folder, engine.info, calm, jobs, commits=None, name=f"pool-{number}"
            ) as pool:
                ours = await run_pool(pool, len(jobs))
            ratios.append(ours.tokens_per_s / bare.tokens_per_s)
            report.say(f"bare {bare.tokens_per_s:.0f}, pool {ours.tokens_per_s:.0f} tokens/s")
    report.target("pool_efficiency", median(ratios), ">=", 0.95, "tokens/s against bare load")


async def measure_stub(size: WorkSize, folder: Path, report: Report) -> None:
    folder.mkdir()
    build_model(size, folder)
    latency_s, in_flight = (2.0, 2400) if size.num_groups > 100 else (0.5, 200)
    num_samples = 6 * in_flight
    num_groups = num_samples // size.group_size
    async with stub_at(latency_s) as info:
        tally, most = await _at_stub(size, folder, info, num_groups, in_flight)
    rate = num_samples / tally.seconds
    report.target("stub_requests_per_s", rate, ">=", 500, "one worker, an engine of fixed latency")
    report.target("stub_in_flight", most, ">=", 2000, "requests at once at that engine")


async def measure_rewards(size: WorkSize, folder: Path, report: Report) -> None:
    folder.mkdir()
    build_model(size, folder)
    latency_s, in_flight, processes = (1.0, 16, 16) if size.num_groups > 100 else (0.3, 8, 8)
    num_groups = 20 * in_flight // size.group_size
    seconds = dict[float, float]()
    async with stub_at(latency_s) as info:
        for score_s in (0.0, latency_s):
            tally, _ = await _at_stub(
                size, folder, info, num_groups, in_flight, score_s=score_s, processes=processes
            )
            seconds[score_s] = tally.seconds
            report.say(f"generation {latency_s:g} s, reward {score_s:g} s: {tally.seconds:.1f} s")
    ratio = seconds[latency_s] / seconds[0.0]
    report.target("reward_overlap", ratio, "<=", 1.1, "rewards as long as generation, against none")


async def _at_stub(
    size: WorkSize,
    folder: Path,
    info: EngineInfo,
    num_groups: int,
    in_flight: int,
    *,
    score_s: float = 0.0,
    processes: int = 1,
) -> tuple[Tally, int]:
    """The tally, and the most requests that the engine had at once."""
    jobs = equal_jobs(num_groups, size.group_size, STUB_TOKENS)
    # Admission is out of the way: the engine's places alone bound what is in flight.
    wide = dataclasses.replace(
        size, max_staleness=10_000, batch_groups=max(1, in_flight // size.group_size)
    )
    async with httpx.AsyncClient(base_url=info.url, trust_env=False) as http:
        await http.get("/counts")
        async with pool_at(
            folder,
            info,
            wide,
            jobs,
            commits=None,
            name=f"stub-{score_s:g}",
            score_s=score_s,
            reward_processes=processes,
            max_running=in_flight,
        ) as pool:
            tally = await run_pool(pool, num_groups)
        counts = (await http.get("/counts")).json()
    return tally, int(counts["most_in_flight"])


@asynccontextmanager
async def stub_at(latency_s: float) -> AsyncIterator[EngineInfo]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.stub_engine",
        str(latency_s),
        str(STUB_TOKENS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert process.stdout is not None and process.stdin is not None
    port = int(await process.stdout.readline())
    try:
        yield EngineInfo(name="engine-0", url=f"http://127.0.0.1:{port}", pid=process.pid)
    finally:
        process.stdin.close()
        await process.wait()
