"""Latency of each verb in a shallow and in a deep buffer, and the longest script of an eviction."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from redis.asyncio import Redis

from benchmarks.groups import GroupMaker
from benchmarks.leash_rate import open_buffer
from benchmarks.team import Team
from buffer.connect import Buffer
from configs.choices import OnStale
from configs.schema import BufferConfig

SHALLOW = 1_000
_BATCH = 8
_TOKENS = 8
_FILLING = 64  # pushes in flight while a buffer is being filled
_FILL_PART = 20_000
_DEEP = BufferConfig(on_stale=OnStale.drop, max_staleness=2)


@dataclass(slots=True)
class MakeFiller:
    url: str
    run: str

    def __call__(self) -> _Filler:
        return _Filler(self)


class _Filler:
    """Pushes groups of one short trajectory, as fast as one process can."""

    def __init__(self, spec: MakeFiller) -> None:
        self._maker = GroupMaker(_TOKENS, size=1)
        self._loop = asyncio.new_event_loop()
        self._buffer = self._loop.run_until_complete(open_buffer(spec.url, spec.run, _BATCH, _DEEP))

    def work(self, num_groups: int) -> None:
        self._loop.run_until_complete(self._fill(num_groups))

    async def _fill(self, num_groups: int) -> None:
        life = uuid4().hex[:8]
        numbers = iter(range(num_groups))

        async def one_after_the_other() -> None:
            for number in numbers:
                await self._buffer.push(self._maker.make(f"{life}-{number}"))

        await asyncio.gather(*(one_after_the_other() for _ in range(_FILLING)))


def fill(url: str, run: str, num_groups: int) -> float:
    """Pushes so many groups by two processes; seconds that it took."""
    team = Team([MakeFiller(url, run) for _ in range(2)], lambda: 0.0)
    try:
        parts = [_FILL_PART] * (num_groups // _FILL_PART) + [num_groups % _FILL_PART]
        return sum(team.play(part).seconds for part in parts)
    finally:
        team.close()


class _Probe:
    """Pushes a batch and takes it out again, so that the depth stays."""

    def __init__(self, buffer: Buffer) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._buffer = buffer
        self._maker = GroupMaker(_TOKENS, size=1)
        self._step = 0

    async def go_round(self) -> None:
        self._step += 1
        for _ in range(_BATCH):
            await self._timed("push", self._buffer.push(self._maker.make(uuid4().hex)))
        lease = await self._timed(
            "lease",
            self._buffer.lease(
                step=self._step,
                version=0,
                num_groups=_BATCH,
                share=0,
                num_shares=1,
                timeout_s=30,
            ),
        )
        await self._buffer.consume(lease, lease.group_ids)
        await self._timed("ack", self._buffer.ack(self._step))

    async def _timed(self, verb: str, call: Any) -> Any:
        began = time.perf_counter()
        result = await call
        self.seconds[verb].append(time.perf_counter() - began)
        return result


@dataclass(kw_only=True, slots=True, frozen=True)
class Latency:
    verb: str
    shallow_p50_ms: float
    deep_p50_ms: float
    shallow_p99_ms: float
    deep_p99_ms: float

    @property
    def growth(self) -> float:
        return self.deep_p99_ms / self.shallow_p99_ms


async def latencies(url: str, shallow: str, deep: str, num_rounds: int) -> list[Latency]:
    """Both buffers are probed in turn, so that a hiccup of the machine hits both alike."""
    probes = [_Probe(await open_buffer(url, run, _BATCH, _DEEP)) for run in (shallow, deep)]
    for probe in probes:
        for _ in range(20):
            await probe.go_round()
        probe.seconds.clear()
    for _ in range(num_rounds):
        for probe in probes:
            await probe.go_round()
    for probe in probes:
        await probe._buffer.close()

    def percentile(probe: _Probe, verb: str, q: float) -> float:
        return float(1000 * np.percentile(probe.seconds[verb], q))

    return [
        Latency(
            verb=verb,
            shallow_p50_ms=percentile(probes[0], verb, 50),
            deep_p50_ms=percentile(probes[1], verb, 50),
            shallow_p99_ms=percentile(probes[0], verb, 99),
            deep_p99_ms=percentile(probes[1], verb, 99),
        )
        for verb in ("push", "lease", "ack")
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class Eviction:
    num_groups: int
    seconds: float
    median_script_ms: float
    p99_script_ms: float
    longest_script_ms: float
    """By the server's clock: with whatever the machine did in between."""
    server_cpu_s: float
    longest_ping_ms: float
    """Round trip of another client's PING at the same time."""


async def evict(url: str, run: str, server_cpu_s: Callable[[], float]) -> Eviction:
    """Makes every ready group stale and sweeps; the server's slow log tells the times."""
    buffer = await open_buffer(url, run, _BATCH, _DEEP)
    redis = Redis.from_url(url)
    await redis.config_set("slowlog-log-slower-than", 0)
    await redis.config_set("slowlog-max-len", 100_000)
    before = await buffer.stats()
    await redis.slowlog_reset()
    pinging = asyncio.create_task(_longest_ping_ms(Redis.from_url(url)))
    cpu_s, began = server_cpu_s(), time.perf_counter()
    await buffer.publish_version(_DEEP.max_staleness + 1)
    await buffer.sweep()
    seconds, cpu_s = time.perf_counter() - began, server_cpu_s() - cpu_s
    pinging.cancel()
    slow: Any = await redis.slowlog_get(100_000)
    scripts = [e["duration"] for e in slow if e["command"].upper().startswith(b"EVALSHA")]
    after = await buffer.stats()
    await redis.aclose()
    await buffer.close()
    return Eviction(
        num_groups=before.ready - after.ready,
        seconds=seconds,
        median_script_ms=float(np.median(scripts)) / 1000,
        p99_script_ms=float(np.percentile(scripts, 99)) / 1000,
        longest_script_ms=max(scripts) / 1000,
        server_cpu_s=cpu_s,
        longest_ping_ms=await pinging,
    )


async def _longest_ping_ms(redis: Redis) -> float:
    longest = 0.0
    try:
        while True:
            began = time.perf_counter()
            await redis.ping()
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(0.001)
    except asyncio.CancelledError:
        await redis.aclose()
        return 1000 * longest


async def wait_until_quiet(url: str) -> None:
    """The rewrite of the append-only file that a fill sets off would disturb what comes next."""
    redis = Redis.from_url(url)
    while (await redis.info("persistence"))["aof_rewrite_in_progress"]:
        await asyncio.sleep(0.2)
    await redis.aclose()
