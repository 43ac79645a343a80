"""Part COST: CPU of a short sample by process, at a real engine and at one that answers at once.

- cost_*_ms: CPU of each process for a sample of 5 tokens, groups of 8, a commit every 16 groups.
- stub_core_samples_per_s: what one core of a worker drives where the engine costs nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Report
from benchmarks.rollouts.efficiency import stub_at
from benchmarks.rollouts.scene import Commits, Pool, engine_at, pool_at
from benchmarks.rollouts.work import WorkSize, equal_jobs
from processes import tree

NUM_TOKENS = 5
ROLES = {
    "sglang::scheduler": "scheduler",
    "sglang.server": "http",
    "stub_engine": "stub",
    "rewards.process": "scoring",
    "valkey-server": "redis",
    "redis-server": "redis",
}
"""Processes by what their command lines have in them."""


def cpu_s(engine_pid: int) -> dict[str, float]:
    """Seconds so far of this process, its descendants and the engine's, by role; ours is the
    worker's. The engine may have been forked by a fork server, and is no descendant then."""
    seconds = {"worker": time.process_time()}
    for child in {*tree.descendants(os.getpid()), *tree.family(engine_pid)}:
        try:
            command, times = " ".join(child.cmdline()), child.cpu_times()
        except psutil.NoSuchProcess:  # it has just ended
            continue
        if role := next((role for mark, role in ROLES.items() if mark in command), None):
            seconds[role] = seconds.get(role, 0.0) + times.user + times.system
    return seconds


async def measure_cost(size: WorkSize, folder: Path, report: Report) -> None:
    short = dataclasses.replace(
        size, group_size=8, batch_groups=16, max_running=128, max_staleness=2, longest=8
    )
    num_samples = short.group_size * size.cost_groups
    async with engine_at(folder, short) as engine:
        commits, jobs = Commits(engine.client, folder), equal_jobs(size.cost_groups, 8, NUM_TOKENS)
        await commits.begin()
        async with pool_at(folder, engine.info, short, jobs, name="cost", commits=commits) as pool:
            before = cpu_s(engine.info.pid)
            await pool.run(len(jobs))
            for role, seconds in cpu_s(engine.info.pid).items():
                cost_ms = 1000 * (seconds - before[role]) / num_samples
                report.figure(f"cost_{role}_ms", cost_ms, "CPU of a sample of 5 tokens")
    wide = dataclasses.replace(short, max_staleness=10_000)
    async with (
        stub_at(0.0, folder, NUM_TOKENS) as info,
        pool_at(folder, info, wide, jobs, name="core") as pool,
    ):
        worker_s = await _generate(pool, len(jobs))
    rate = num_samples / worker_s
    report.target("stub_core_samples_per_s", rate, ">=", 2000, "a worker's core, no engine's cost")


async def _generate(pool: Pool, num_groups: int) -> float:
    """Returns the worker's CPU in seconds. No trainer takes the groups."""
    began, running = time.process_time(), asyncio.create_task(pool.worker.run())
    await until_pushed(pool, running, num_groups)
    spent = time.process_time() - began
    pool.worker.stop()
    await running
    return spent


async def until_pushed(pool: Pool, running: asyncio.Task[Any], num_groups: int) -> int:
    """Waits until the worker, which is `running`, has pushed so many groups; returns how many it
    has."""
    while (number := pool.worker._group_runner.num_groups) < num_groups and not running.done():
        await asyncio.sleep(0.02)
    assert not running.done(), running.exception()
    return number
