"""Part PAUSE: how long one SGLang engine on a CPU stands still for a commit, by pause mode.

Random float32 weights, a core for the engine, all requests in flight. The modes take turns. Each
pause is told against /update_weights_from_disk alone on the idle engine: no pause can be shorter.

- pause_<mode>_<model>: the median pause as a multiple of the median bare load. It includes the
  wait for a token's border, up to a step; on one core a step takes nearly as long as a load.
- standstill_<mode>_<model>: the same without the time in which the requests decode a last token.
- pause_direct_<model>: the pause with SGLang's own broadcast as the commit.

The mode `drain` pauses what still runs as `resubmit` does: it has no figures of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.engines import make_engine, random_qwen3
from benchmarks.report import Report
from benchmarks.weights.load import FleetSize, Load, bare_loads, pin
from benchmarks.weights.model import folder_in_memory
from benchmarks.weights.sglang_broadcast import SGLangBroadcast
from configs.choices import PauseMode
from configs.schema import WeightSyncConfig
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.engines.sglang.strategies import make_strategy

SIZES = {
    "100M": FleetSize(num_publishes=5),
    "500M": FleetSize(hidden=1280, layers=20, num_publishes=5),
    "tiny": FleetSize(
        hidden=128, layers=2, vocab=512, num_requests=3, num_publishes=1, num_bare_loads=2
    ),
}
TARGET = 1.3


def measure(report: Report, *, is_short: bool, size: str = "100M") -> None:
    torch.set_num_threads(1)
    name = "tiny" if is_short else size
    with folder_in_memory() as folder:
        asyncio.run(_measure(report, name, SIZES[name], folder))


async def _measure(report: Report, name: str, size: FleetSize, folder: Path) -> None:
    random_qwen3(
        0,
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
    ).save_pretrained(folder)
    num_bytes = (folder / "model.safetensors").stat().st_size
    report.say(f"{name}: {num_bytes / 4e6:.0f}M parameters")
    pauses: dict[str, list[float]] = defaultdict(list)
    stops: dict[str, list[float]] = defaultdict(list)
    async with _engine(folder) as engine:
        bare = await bare_loads(engine, str(folder), 0, size.num_bare_loads)
        version = 1
        load = Load(engine, size)
        await load.start()
        async with AsyncExitStack() as closing:
            committers: dict[str, Committer] = {}
            staged = make_strategy(engine.client, WeightSyncConfig(), tp_size=1)
            broadcast = SGLangBroadcast(engine, WeightSyncConfig())
            for strategy in (staged, broadcast):
                await strategy.check()
                closing.push_async_callback(strategy.close)
            for mode in (PauseMode.resubmit, PauseMode.retract, PauseMode.in_place):
                committers[mode.value] = Committer(engine.client, staged, mode)
            committers[broadcast.name] = Committer(engine.client, broadcast, PauseMode.resubmit)
            for number in range(size.num_publishes + 1):  # the first warms up
                for way, committer in committers.items():
                    done = await committer.commit(version, folder)
                    load.note_version(version)
                    version += 1
                    if number:
                        pauses[way].append(done.pause_s)
                        stops[way].append(done.stop_s)
                    await load.steady()
        await load.stop()
        bare += await bare_loads(engine, str(folder), 0, size.num_bare_loads)
    report.row(f"{name}: median bare load", f"{1e3 * median(bare):.0f} ms")
    for way, seconds in pauses.items():
        report.figure(f"pause_{way}_{name}", median(seconds) / median(bare), _how(seconds))
        if way != SGLangBroadcast.name:
            still = [pause - stop for pause, stop in zip(seconds, stops[way], strict=True)]
            ratio = median(still) / median(bare)
            report.target(f"standstill_{way}_{name}", ratio, "<=", TARGET, _how(still))


def _how(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.0f} ms, in bare loads"


@asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[SGLangEngine]:
    engine = make_engine("engine-0", folder, folder)
    await engine.start()
    try:
        cores = sorted(os.sched_getaffinity(0))
        pin(engine.info.pid, cores[:1])
        yield engine
    finally:
        await engine.stop()
