"""Part PREFIX: groups with long prompts and episodes of several turns, with and without a cache.

Two engines of the same model, one with its cache and one with none (as every engine was before
`weight_sync.pause_mode=resubmit`), play the same work in turn.

- prefill_ratio_group, prefill_ratio_turns: prompt tokens that the engine with the cache computed,
  per token that is there only once.
- prefix_speedup_group, prefix_speedup_turns: seconds without the cache, per second with it.
- recovery_s, recovery_s_without: from the end of a commit, which stops 16 siblings halfway, until
  each of them has its next token; by resubmit with the cache, and by retract without.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import KEY
from benchmarks.engines import make_engine
from benchmarks.report import Report
from benchmarks.rollouts.scene import build_model
from benchmarks.rollouts.work import WorkSize
from buffer.types import SamplingParams
from configs.choices import PauseMode
from configs.schema import WeightSyncConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.engines.sglang.strategies import make_strategy
from rollout_pool.sampling.sample import Sample

TURN_TOKENS = 30
"""Tokens of an answer; the environment's reply has as many."""
_VOCAB = 256


@dataclass(kw_only=True, slots=True, frozen=True)
class Played:
    seconds: float
    computed: int
    """Prompt tokens that were not in the cache."""
    unique: int


async def measure_prefixes(size: WorkSize, folder: Path, report: Report) -> None:
    folder = folder / "prefix"
    build_model(dataclasses.replace(size, hidden=size.prefix_hidden, layers=4), folder)
    async with AsyncExitStack() as stack:
        engines = {}
        for mode in (PauseMode.resubmit, PauseMode.retract):
            engine = make_engine(
                f"prefix-{mode.value}", folder, folder, max_running=32, pause_mode=mode
            )
            stack.push_async_callback(engine.stop)
            engines[mode] = engine
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        cached, bare = two = list(engines.values())
        rounds = min(size.pairs, 3) + 1  # the first warms up
        for engine in engines.values():
            await engine.client.update_from_disk(str(folder / "staged"), 0, 60.0)
        works: dict[str, Callable[[SGLangEngine, int], Awaitable[Played]]] = {
            "group": lambda engine, seed: play_group(engine, size.prefix_tokens, seed),
            "turns": lambda engine, seed: play_turns(engine, size.prefix_turns, seed),
        }
        for name, play in works.items():
            pairs = []
            for seed in range(rounds):
                pairs.append((await play(cached, seed), await play(bare, seed)))
            ratio = median(ours.computed / ours.unique for ours, _ in pairs[1:])
            report.target(
                f"prefill_ratio_{name}", ratio, "<=", 1.1, "computed tokens per unique one"
            )
            without = median(theirs.computed / theirs.unique for _, theirs in pairs[1:])
            report.figure(f"prefill_ratio_{name}_without", without, "the same without the cache")
            speedup = median(theirs.seconds / ours.seconds for ours, theirs in pairs[1:])
            report.target(f"prefix_speedup_{name}", speedup, ">=", 1.5, "against no cache")
        times = [
            [await _recovery(engine, folder, size.prefix_tokens // 2, 1 + number) for engine in two]
            for number in range(rounds)
        ]
        ours, theirs = (median(column) for column in zip(*times[1:], strict=True))
        report.figure("recovery_s", ours, "from a commit until 16 siblings have a token more")
        report.figure("recovery_s_without", theirs, "the same by retract, without the cache")


async def _recovery(engine: SGLangEngine, folder: Path, num_tokens: int, number: int) -> float:
    client = SGLangClient(
        engine.spec.name,
        engine.client.url,
        key=KEY,
        request_timeout_s=120.0,
        has_prefix_cache=engine.spec.config.radix_cache,
        stream_interval=1,
    )
    strategy = make_strategy(client, WeightSyncConfig(), tp_size=1)
    committer = Committer(client, strategy, engine.spec.pause_mode)
    name = f"recovery{number}"
    prompt = _words(num_tokens, number)
    most = 4 * TURN_TOKENS
    samples = [_sample(f"{name}.{n}", prompt, name, most) for n in range(16)]
    wanted, has_all = [TURN_TOKENS] * len(samples), asyncio.Event()

    def on_arrival() -> None:
        if all(len(s.output_ids) >= least for s, least in zip(samples, wanted, strict=True)):
            has_all.set()

    asked = [
        asyncio.create_task(client.generate_tokens(sample, f"{sample.sample_id}!", on_arrival))
        for sample in samples
    ]
    try:
        async with asyncio.timeout(120.0):
            await has_all.wait()
            report = await committer.commit(number, folder / "staged")
            began = time.perf_counter()
            # On a busy machine some have ended before the commit.
            wanted = [min(len(s.output_ids) + 1, most) for s in samples]
            has_all.clear()
            client.note_version(report.version)
            on_arrival()
            await has_all.wait()
            seconds = time.perf_counter() - began
            await asyncio.gather(*asked)
    finally:
        await end_tasks(asked)
        await client.close()
    return seconds


async def play_group(engine: SGLangEngine, num_tokens: int, seed: int) -> Played:
    """16 siblings with one prompt."""
    prompt = _words(num_tokens, seed)
    began, before = time.perf_counter(), engine.client.counters.num_prefilled
    await asyncio.gather(
        *(_answer(engine, f"group{seed}.{n}", prompt, f"group{seed}") for n in range(16))
    )
    return Played(
        seconds=time.perf_counter() - began,
        computed=engine.client.counters.num_prefilled - before,
        unique=num_tokens,
    )


async def play_turns(engine: SGLangEngine, num_turns: int, seed: int) -> Played:
    """16 episodes; each turn sends all that was said before."""
    began, before = time.perf_counter(), engine.client.counters.num_prefilled
    lengths = await asyncio.gather(
        *(_episode(engine, f"turns{seed}.{n}", num_turns, 1000 * seed + n) for n in range(16))
    )
    return Played(
        seconds=time.perf_counter() - began,
        computed=engine.client.counters.num_prefilled - before,
        unique=sum(lengths),
    )


async def _episode(engine: SGLangEngine, name: str, num_turns: int, seed: int) -> int:
    """The number of tokens that were not sampled: those were computed when they were."""
    said = _words(200, seed)
    for turn in range(num_turns):
        num_prompt = len(said) - turn * TURN_TOKENS
        answer = await _answer(engine, f"{name}.{turn}", said)
        said = [*said, *answer, *_words(TURN_TOKENS, seed + turn)]
    return num_prompt


async def _answer(engine: SGLangEngine, name: str, prompt: list[int], group: str = "") -> list[int]:
    sample = _sample(name, prompt, group, TURN_TOKENS)
    await engine.client.generate_tokens(sample, f"{name}!")
    return sample.output_ids


def _sample(name: str, prompt: list[int], group: str, num_tokens: int) -> Sample:
    return Sample(
        sample_id=name,
        prompt=prompt,
        sampling=SamplingParams(temperature=1.0),
        max_new_tokens=num_tokens,
        group=group,
    )


def _words(number: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(_VOCAB) for _ in range(number)]
