"""Part FLEET: what the control of one worker costs with 8, 64 and 256 engines that answer at once.

One process serves all engines, at a port each, and its CPU is not counted. Measured for each number
of engines, in rounds that take turns:

- fleet_worker_us, fleet_redis_us: CPU for a sample and for a group; groups of 8, 5 tokens.
- fleet_growth: worker and Redis together for a group, over that at 8 engines.
- fleet_idle: CPU of worker and Redis while no group runs, of a core.
- fleet_join_ms: CPU of the worker for each engine that joins.
- fleet_version_ms: CPU of both for a new version that all engines commit, one by one.
- fleet_bare_us: CPU of a load generator that keeps nothing, for a sample, at the same engines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.report import Report
from benchmarks.rollouts.bare import run_bare
from benchmarks.rollouts.cost import NUM_TOKENS, cpu_s, until_pushed
from benchmarks.rollouts.efficiency import stubs_at
from benchmarks.rollouts.scene import Pool, pool_at
from benchmarks.rollouts.work import WorkSize, equal_jobs
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.sampling.sampler import Sampler

GROUP, WARM = 8, 50
FIGURES = {
    "worker_us": "CPU of the worker for a sample",
    "redis_us": "CPU of Redis for a group",
    "bare_us": "CPU of bare load for a sample",
    "idle": "of a core, worker and Redis without a group",
    "join_ms": "CPU of the worker for an engine that joins",
    "version_ms": "CPU of both for a version",
    "stub_us": "CPU of the engines for a sample",
}


async def measure_fleet(size: WorkSize, folder: Path, report: Report) -> None:
    seen = {number: dict[str, list[float]]() for number in size.fleets}
    for _ in range(size.fleet_rounds):
        for number, figures in seen.items():
            found = await _round(size, folder, number)
            report.say(f"{number} engines: {found['worker_us']:.0f} us a sample")
            for name, value in found.items():
                figures.setdefault(name, []).append(value)
    table = Table(title=f"{size.fleet_groups} groups of {GROUP}, {NUM_TOKENS} tokens")
    for column in ("engines", *FIGURES, "samples / CPU s", "growth"):
        table.add_column(column)
    base = None
    for number, figures in seen.items():
        found = {name: median(values) for name, values in figures.items()}
        rate, group_us = 1e6 / found["worker_us"], GROUP * found["worker_us"] + found["redis_us"]
        base = base or group_us
        rows = [*(found[name] for name in FIGURES), rate, group_us / base]
        table.add_row(str(number), *(f"{value:.3g}" for value in rows))
        for name in FIGURES:
            report.note(f"fleet_{name}_{number}", found[name])
        report.target(f"fleet_core_samples_per_s_{number}", rate, ">=", 2000, "of a worker's core")
        if group_us != base:
            name, how = f"fleet_growth_{number}", "CPU of a group over that at few engines"
            report.target(name, group_us / base, "<=", 1.2, how)
    report.show(table)


async def _round(size: WorkSize, folder: Path, number: int) -> dict[str, float]:
    wide = dataclasses.replace(
        size, group_size=GROUP, batch_groups=16, max_running=128, max_staleness=10_000, longest=8
    )
    most = 2 * number  # the same load for each engine
    # The stream does not end before the round does.
    jobs = equal_jobs(size.fleet_groups + most + 2 * (WARM + number), GROUP, NUM_TOKENS)
    async with stubs_at(0.0, folder, NUM_TOKENS, number) as engines:
        pid, bare = engines[0].pid, await _bare_us(engines, size.fleet_groups)
        async with pool_at(
            folder, engines[0], wide, jobs, name=f"fleet-{number}", max_groups_in_flight=most
        ) as pool:
            async with _spent(pid) as join:
                for engine in engines[1:]:
                    await pool.state.register_engine(engine.name, engine.url)
                await pool.state.record_commits({engine.name: 0 for engine in engines})
                await _until_served(pool, number, 0)
            async with _spent(pid) as idle:
                await asyncio.sleep(size.fleet_idle_s)
            running = asyncio.create_task(pool.worker.run())
            # Imports, and connections to all.
            num_before = await until_pushed(pool, running, WARM + number)
            async with _spent(pid) as work:
                num_after = await until_pushed(pool, running, num_before + size.fleet_groups)
                num_groups = num_after - num_before
            pool.worker.stop()
            await running
            async with _spent(pid) as version:
                await pool.buffer.announce_version(1)
                for engine in engines:
                    await pool.state.record_commits({engine.name: 1})
                await _until_served(pool, number, 1)
    return {
        "worker_us": 1e6 * work["worker"] / (GROUP * num_groups),
        "redis_us": 1e6 * work["redis"] / num_groups,
        "bare_us": bare,
        "idle": (idle["worker"] + idle["redis"]) / size.fleet_idle_s,
        "join_ms": 1e3 * join["worker"] / number,
        "version_ms": 1e3 * (version["worker"] + version["redis"]),
        "stub_us": 1e6 * work["stub"] / (GROUP * num_groups),
    }


@asynccontextmanager
async def _spent(pid: int) -> AsyncIterator[dict[str, float]]:
    """CPU seconds of the time inside, by role."""
    spent: dict[str, float] = {}
    before = cpu_s(pid)
    yield spent
    spent.update({role: seconds - before.get(role, 0.0) for role, seconds in cpu_s(pid).items()})


async def _bare_us(engines: list[EngineInfo], num_groups: int) -> float:
    jobs = equal_jobs(num_groups, GROUP, NUM_TOKENS)
    began, number = time.process_time(), len(engines)
    await asyncio.gather(
        *(
            run_bare(jobs[place::number], engine.url, GROUP, prefix="bare")
            for place, engine in enumerate(engines)
            if place < num_groups
        )
    )
    return 1e6 * (time.process_time() - began) / (GROUP * num_groups)


async def _until_served(pool: Pool, number: int, version: int) -> None:
    """The worker's router knows so many engines, all of which serve the version."""
    assert isinstance(pool.worker.completer, Sampler)
    engines = pool.worker.completer.router.engines
    while [engine.serves for engine in engines.values()] != [version] * number:
        await asyncio.sleep(0.02)
