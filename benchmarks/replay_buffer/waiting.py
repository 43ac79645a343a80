"""Part WAITING: how fast blocked calls are woken, and what they cost while nothing happens."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import numpy as np
from redis.asyncio import Redis

from benchmarks.replay_buffer.groups import GroupMaker
from benchmarks.replay_buffer.stage import Sizes, Stage, lease, open_buffer
from benchmarks.report import Report
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Lease
from configs.schema import BufferConfig

_STEP = 4
_ASLEEP_S = 0.03  # until a call has surely begun to wait
_FULL = BufferConfig(max_staleness=0, capacity_groups=_STEP)
_WAIT_S = 60.0


def measure_waiting(report: Report, stage: Stage, sizes: Sizes) -> None:
    report.say("wake-ups")
    medians = []
    for who, seconds in asyncio.run(_wake_ups(stage.url, sizes.wake_rounds)).items():
        p50, p99 = 1000 * np.percentile(seconds, (50, 99))
        medians.append(p50)
        report.row(f"wake-up of a blocked {who}: median / p99 ms", f"{p50:.2f} / {p99:.2f}")
    how = "from the call that wakes to the waiter's return, worst median"
    report.target("wakeup_ms", max(medians), "<=", 10, how)
    report.say(f"idle for {sizes.idle_s:g} s")
    commands = asyncio.run(_idle_commands(stage.url, sizes.idle_s))
    report.target(
        "idle_commands_per_s",
        sum(commands.values()) / sizes.idle_s,
        "<=",
        0,
        f"while a lease, a push and an admit are blocked for {sizes.idle_s:g} s: {commands}",
    )


class _Run:
    """One trainer and one producer, each with a buffer object of its own."""

    def __init__(self, trainer: ReplayBuffer, producer: ReplayBuffer) -> None:
        self.trainer, self.producer = trainer, producer
        self.step = 0
        self.maker = GroupMaker(8, size=1)

    @classmethod
    async def open(cls, url: str) -> _Run:
        name = f"wait-{uuid4().hex[:8]}"
        return cls(
            await open_buffer(url, name, _STEP, _FULL), await open_buffer(url, name, _STEP, _FULL)
        )

    async def close(self) -> None:
        await self.trainer.close()
        await self.producer.close()

    async def push(self, number: int = 1) -> None:
        for _ in range(number):
            await self.producer.push(self.maker.make(uuid4().hex), _WAIT_S)

    async def lease(self) -> Lease:
        self.step += 1
        return await lease(self.trainer, self.step, _STEP)

    async def consume(self, leased: Lease) -> None:
        await self.trainer.consume(leased, leased.group_ids)
        await self.trainer.ack(self.step)


async def _wake_ups(url: str, num_rounds: int) -> dict[str, list[float]]:
    """Seconds from just before the call that wakes to the return of the one that waited."""
    run = await _Run.open(url)
    seconds: dict[str, list[float]] = {"lease": [], "push": [], "admit": []}
    for _ in range(num_rounds):
        leasing = await _asleep(run.lease())
        await run.push(_STEP - 1)
        seconds["lease"].append(await _time_to_wake(leasing, run.push()))
        leased = leasing.result()
        waiting = await _asleep(run.push())  # the leased ones fill the capacity
        seconds["push"].append(await _time_to_wake(waiting, run.consume(leased)))
        await run.push(_STEP - 1)
        leased = await run.lease()
        waiting = await _asleep(run.producer.admit(uuid4().hex, _WAIT_S))
        seconds["admit"].append(await _time_to_wake(waiting, run.consume(leased)))
        await run.producer.abandon(waiting.result().group_id, "benchmark")
    await run.close()
    return seconds


async def _asleep(call: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(call)
    await asyncio.sleep(_ASLEEP_S)
    assert not task.done(), "it should have had to wait"
    return task


async def _time_to_wake(waiting: asyncio.Task[Any], event: Any) -> float:
    began = time.perf_counter()
    waking = asyncio.create_task(event)
    await waiting
    seconds = time.perf_counter() - began
    await waking
    return seconds


async def _idle_commands(url: str, seconds: float) -> dict[str, int]:
    """Commands that the server sees while a lease, a push and an admit are blocked, by name.

    Two runs: one lacks groups for the lease, the other one room for the push and the admit.
    """
    dry, full = await _Run.open(url), await _Run.open(url)
    await full.push(_STEP)
    calls = (dry.lease(), full.push(), full.producer.admit("nobody", _WAIT_S))
    waiting = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(min(1.0, seconds))
    redis = Redis.from_url(url)
    before = await redis.info("commandstats")
    await asyncio.sleep(seconds)
    after = await redis.info("commandstats")
    await redis.aclose()
    assert not any(task.done() for task in waiting), "somebody did not wait"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await dry.close()
    await full.close()
    made = {
        name.removeprefix("cmdstat_"): stats["calls"] - before.get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
        if name != "cmdstat_info"
    }
    return {name: number for name, number in made.items() if number}
