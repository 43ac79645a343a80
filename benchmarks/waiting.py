"""How fast blocked calls are woken, and what they cost while nothing happens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from redis.asyncio import Redis

from benchmarks.groups import GroupMaker
from benchmarks.leash_rate import open_buffer
from buffer.connect import Buffer
from configs.schema import BufferConfig

_STEP = 4
_ASLEEP_S = 0.03  # until a call has surely begun to wait
_FULL = BufferConfig(max_staleness=0, capacity_groups=_STEP)
_WAIT_S = 60.0


@dataclass(kw_only=True, slots=True, frozen=True)
class WakeUp:
    """From just before the call that wakes to the return of the one that waited."""

    who: str
    median_ms: float
    p99_ms: float


class _Stage:
    """One trainer and one producer, each with a buffer object of its own."""

    def __init__(self, trainer: Buffer, producer: Buffer) -> None:
        self.trainer, self.producer = trainer, producer
        self.step = 0
        self.maker = GroupMaker(8, size=1)

    async def push(self) -> Any:
        return await self.producer.push(self.maker.make(uuid4().hex), _WAIT_S)

    async def lease(self) -> Any:
        self.step += 1
        return await self.trainer.lease(
            step=self.step,
            version=0,
            num_groups=_STEP,
            share=0,
            num_shares=1,
            timeout_s=_WAIT_S,
        )

    async def consume(self, lease: Any) -> None:
        await self.trainer.consume(lease, lease.group_ids)
        await self.trainer.ack(self.step)


async def wake_ups(url: str, num_rounds: int) -> list[WakeUp]:
    stage = await _open(url)
    seconds: dict[str, list[float]] = {"lease": [], "push": [], "admit": []}
    for _ in range(num_rounds):
        leasing = await _asleep(stage.lease())
        for _ in range(_STEP - 1):
            await stage.push()
        seconds["lease"].append(await _time_to_wake(leasing, stage.push()))
        lease = leasing.result()
        waiting = await _asleep(stage.push())  # the leased ones fill the capacity
        seconds["push"].append(await _time_to_wake(waiting, stage.consume(lease)))
        for _ in range(_STEP - 1):
            await stage.push()
        lease = await stage.lease()
        name = uuid4().hex
        waiting = await _asleep(stage.producer.admit(name, _WAIT_S))
        seconds["admit"].append(await _time_to_wake(waiting, stage.consume(lease)))
        await stage.producer.abandon(waiting.result().group_id, "benchmark")
    await _close(stage)
    return [
        WakeUp(
            who=who,
            median_ms=float(1000 * np.median(times)),
            p99_ms=float(1000 * np.percentile(times, 99)),
        )
        for who, times in seconds.items()
    ]


async def idle_commands_per_s(url: str, seconds: float) -> tuple[float, dict[str, int]]:
    """Commands that the server sees while a lease, a push and an admit are blocked; by name too.

    Two runs: one lacks groups for the lease, the other one room for the push and the admit.
    """
    dry, full = await _open(url), await _open(url)
    for _ in range(_STEP):
        await full.push()
    waiting = [
        asyncio.create_task(dry.lease()),
        asyncio.create_task(full.push()),
        asyncio.create_task(full.producer.admit("nobody", _WAIT_S)),
    ]
    await asyncio.sleep(1.0)
    redis = Redis.from_url(url)
    before = await _calls(redis)
    await asyncio.sleep(seconds)
    after = await _calls(redis)
    await redis.aclose()
    assert not any(task.done() for task in waiting), "somebody did not wait"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await _close(dry)
    await _close(full)
    made = {name: after[name] - before.get(name, 0) for name in after if name != "cmdstat_info"}
    made = {name.removeprefix("cmdstat_"): number for name, number in made.items() if number}
    return sum(made.values()) / seconds, made


async def _calls(redis: Redis) -> dict[str, int]:
    stats = await redis.info("commandstats")
    return {name: int(values["calls"]) for name, values in stats.items()}


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


async def _open(url: str) -> _Stage:
    run = f"wait-{uuid4().hex[:8]}"
    return _Stage(
        await open_buffer(url, run, _STEP, _FULL), await open_buffer(url, run, _STEP, _FULL)
    )


async def _close(stage: _Stage) -> None:
    await stage.trainer.close()
    await stage.producer.close()
