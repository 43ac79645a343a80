"""Part DEPTH: each verb's latency in a shallow and in a deep buffer, and an eviction's longest
script."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
from redis.asyncio import Redis

from benchmarks.replay_buffer.groups import GroupMaker
from benchmarks.replay_buffer.leash_rate import Producer
from benchmarks.replay_buffer.stage import Sizes, Stage, lease, open_buffer
from benchmarks.report import Report
from benchmarks.team import Team
from buffer.redis.connection import connect
from buffer.replay_buffer import ReplayBuffer
from configs.choices import OnStale
from configs.schema import BufferConfig

_SHALLOW = 1_000
_BATCH = 8
_TINY = GroupMaker(8, size=1)
_FILLING = 64  # pushes in flight while a buffer is being filled
_FILL_PART = 20_000
_CONFIG = BufferConfig(on_stale=OnStale.drop, max_staleness=2)


def measure_depth(report: Report, stage: Stage, sizes: Sizes) -> None:
    shallow, deep = f"shallow-{uuid4().hex[:6]}", f"deep-{uuid4().hex[:6]}"
    _fill(stage.url, shallow, _SHALLOW)
    report.say(f"filling a buffer with {sizes.depth} groups")
    seconds = _fill(stage.url, deep, sizes.depth)
    report.row(f"pushes a second while filling {sizes.depth}", f"{sizes.depth / seconds:.0f}")
    report.say("latencies")
    asyncio.run(_measure_latencies(report, stage, sizes, shallow, deep))
    report.say("eviction")
    asyncio.run(_measure_eviction(report, stage, deep))


def _fill(url: str, run: str, num_groups: int) -> float:
    """Pushes so many groups by two processes; seconds that it took."""
    team = Team([partial(Producer, url, run, _BATCH, _TINY, _CONFIG, _FILLING)] * 2)
    try:
        parts = [_FILL_PART] * (num_groups // _FILL_PART) + [num_groups % _FILL_PART]
        return sum(team.play(part).seconds for part in parts)
    finally:
        team.close()


class _Probe:
    """Pushes a batch and takes it out again, so that the depth stays."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._step = 0

    async def go_round(self) -> None:
        self._step += 1
        for _ in range(_BATCH):
            await self._timed("push", self.buffer.push(_TINY.make(uuid4().hex)))
        leased = await self._timed("lease", lease(self.buffer, self._step, _BATCH))
        await self.buffer.consume(leased, leased.group_ids)
        await self._timed("ack", self.buffer.ack(self._step))

    async def _timed(self, verb: str, call: Any) -> Any:
        began = time.perf_counter()
        result = await call
        self.seconds[verb].append(time.perf_counter() - began)
        return result


async def _measure_latencies(
    report: Report, stage: Stage, sizes: Sizes, shallow: str, deep: str
) -> None:
    """Both buffers are probed in turn, so that a hiccup of the machine hits both alike."""
    await _wait_until_quiet(stage.url)
    probes = [_Probe(await open_buffer(stage.url, run, _BATCH, _CONFIG)) for run in (shallow, deep)]
    for num_rounds in (min(20, sizes.latency_rounds), sizes.latency_rounds):
        for probe in probes:
            probe.seconds.clear()  # the first ones were to warm up
        for _ in range(num_rounds):
            for probe in probes:
                await probe.go_round()
    growths = []
    for verb in ("push", "lease", "ack"):
        low, high = (1000 * np.percentile(probe.seconds[verb], (50, 99)) for probe in probes)
        growths.append(high[1] / low[1])
        report.row(
            f"{verb}: p50 / p99 ms at depth {_SHALLOW}, and at {sizes.depth}",
            f"{low[0]:.2f} / {low[1]:.2f}, {high[0]:.2f} / {high[1]:.2f}",
        )
    for probe in probes:
        await probe.buffer.close()
    how = f"p99 at depth {sizes.depth} over that at {_SHALLOW}, worst of push, lease, ack"
    report.target("p99_growth_1e6", max(growths), "<=", 1.5, how)


async def _measure_eviction(report: Report, stage: Stage, run: str) -> None:
    """Makes every ready group stale and sweeps; the server's slow log tells the times.

    They are by the server's clock: with whatever the machine did in between.
    """
    await _wait_until_quiet(stage.url)
    buffer = await open_buffer(stage.url, run, _BATCH, _CONFIG)
    redis = Redis.from_url(stage.url)
    await redis.config_set("slowlog-log-slower-than", 0)
    await redis.config_set("slowlog-max-len", 100_000)
    before = await buffer.stats()
    await redis.slowlog_reset()
    pinging = asyncio.create_task(_longest_ping_ms(await connect(stage.url)))
    cpu_s, began = stage.cpu_s(), time.perf_counter()
    await buffer.announce_version(_CONFIG.max_staleness + 1)
    await buffer.sweep()
    seconds, cpu_s = time.perf_counter() - began, stage.cpu_s() - cpu_s
    pinging.cancel()
    slow: Any = await redis.slowlog_get(100_000)
    scripts = [e["duration"] for e in slow if e["command"].upper().startswith(b"EVALSHA")]
    num_groups = before.ready - (await buffer.stats()).ready
    await redis.aclose()
    await buffer.close()
    report.row(
        f"eviction of {num_groups} groups: µs a group, of them CPU of the server; "
        "longest PING beside it, ms",
        f"{1e6 * seconds / max(1, num_groups):.1f}, {1e6 * cpu_s / max(1, num_groups):.1f}; "
        f"{await pinging:.1f}",
    )
    p50, p99, longest = np.percentile(scripts, (50, 99, 100)) / 1000
    report.row("its scripts: median / p99 ms", f"{p50:.2f} / {p99:.2f}")
    how = f"longest script while {num_groups} groups are evicted (SLOWLOG)"
    report.target("max_script_ms", longest, "<=", 10, how)


async def _longest_ping_ms(redis: Redis) -> float:
    """Until it is cancelled, which a client of redis-py's own may drop (`connect` says why)."""
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


async def _wait_until_quiet(url: str) -> None:
    """The rewrite of the append-only file that a fill sets off would disturb what comes next."""
    redis = Redis.from_url(url)
    while (await redis.info("persistence"))["aof_rewrite_in_progress"]:
        await asyncio.sleep(0.2)
    await redis.aclose()
