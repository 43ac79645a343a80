"""Samples that outlive the request they began in, at real SGLang servers, scored token by token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal

import pytest
import pytest_asyncio
import torch
from sglang_model import (
    build_model,
    engine_spec,
    logprobs_of,
    make_sample,
    served_tensors,
    stage,
    worst_difference,
)

from configs.choices import CommitStrategy, PauseMode
from configs.schema import WeightSyncConfig
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.commit import Committer, make_strategy
from rollout_pool.engines.engine import SGLangEngine
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Interrupted
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.sampling.watch import LoadPoller

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

INTERVAL = 16
NUM_SAMPLES = 12
MAX_NEW_TOKENS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def models(folder):
    return {name: build_model(folder / name, seed) for seed, name in enumerate("ab")}


class Pair:
    """Two engines that serve version 0, and a worker's view of them."""

    def __init__(self, folder):
        self.folder = folder
        names = ("engine-0", "engine-1")
        self.engines = [
            SGLangEngine(engine_spec(folder / "a", folder / f"{name}.log", name=name))
            for name in names
        ]
        self.clients = []
        self.numbers = itertools.count()

    async def start(self, tensors):
        await asyncio.gather(*(engine.start() for engine in self.engines))
        self.clients = [
            SGLangClient(
                engine.spec.name,
                engine.info.url,
                key=engine.spec.key,
                request_timeout_s=60,
                keys_prefix_by_version=False,
                stream_interval=INTERVAL,
            )
            for engine in self.engines
        ]
        for engine in self.engines:
            await self.publish(engine, tensors, 0)
        self.router = Router(self.clients, 60.0, max_running_requests=32)
        self.sampler = Sampler(self.router, max_retries=2)
        self.polling = asyncio.create_task(LoadPoller(self.router, self.clients).run())
        self.router.follow({engine.spec.name: 0 for engine in self.engines}, 0, 9)

    async def publish(self, engine, tensors, version):
        config = WeightSyncConfig(commit=CommitStrategy.staged_disk)
        strategy = make_strategy(engine.client, config, tp_size=1, host="127.0.0.1")
        await strategy.check()
        staged = stage(self.folder / f"staged-{next(self.numbers)}", tensors)
        committer = Committer(engine.client, strategy, PauseMode.retract)
        assert (await committer.commit(version, staged)).served_version == version
        await strategy.close()

    async def stop(self):
        self.polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.polling
        for client in self.clients:
            await client.close()
        await asyncio.gather(*(engine.stop() for engine in self.engines))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder, models):
    pair = Pair(folder)
    await pair.start(served_tensors(models["a"]))
    yield pair
    await pair.stop()


def spans(sample):
    return [(span.version, span.start, span.end) for span in sample.version_spans]


def check_whole(samples):
    """Every sample has ended, and every token has a log-probability and one version."""
    for sample in samples:
        length = len(sample.output_ids)
        ended = spans(sample)
        assert [start for _, start, _ in ended] == [0, *(end for _, _, end in ended[:-1])]
        assert ended[-1][2] == length == len(sample.logprobs)
        assert sample.finish_reason == ("length" if length == MAX_NEW_TOKENS else "stop")


async def begun(samples, num_tokens):
    async with asyncio.timeout(60):
        while any(len(s.output_ids) < num_tokens and not s.finish_reason for s in samples):
            await asyncio.sleep(0.005)


async def test_interrupted_samples_go_on_with_the_versions_and_logprobs_of_each_token_exact(
    pair, models
):
    """Version 0, a commit in mid-flight, an interruption under version 1, the rest under 2."""
    engine = pair.engines[1]
    samples = [
        make_sample(i, max_new_tokens=MAX_NEW_TOKENS, name="interrupted-")
        for i in range(NUM_SAMPLES)
    ]
    for sample in samples:
        sample.engine = engine.spec.name
    tasks = [asyncio.create_task(pair.sampler.complete(sample)) for sample in samples]
    await begun(samples, 1 + INTERVAL)
    await pair.publish(engine, served_tensors(models["b"]), 1)
    at_commit = [len(sample.output_ids) for sample in samples]
    await begun(samples, max(at_commit) + 2 * INTERVAL)
    for sample in samples:
        pair.sampler.interrupt(sample)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    interrupted = [s for s, end in zip(samples, ends, strict=True) if isinstance(end, Interrupted)]
    assert interrupted and all(end is None or isinstance(end, Interrupted) for end in ends)
    kept = {sample: list(sample.output_ids) for sample in interrupted}
    assert any(len(ids) % INTERVAL != 1 for ids in kept.values())  # more than had been streamed
    await pair.publish(engine, served_tensors(models["a"]), 2)
    await asyncio.gather(*(pair.sampler.complete(sample) for sample in interrupted))

    check_whole(samples)
    seen = set()
    for sample in samples:
        if sample in kept:
            assert sample.output_ids[: len(kept[sample])] == kept[sample]
            assert spans(sample)[-1][0] == 2 and spans(sample)[-1][1] == len(kept[sample])
        got = torch.tensor(sample.logprobs)
        expected = {name: logprobs_of(models[name], sample, 1.0) for name in "ab"}
        for version, start, end in spans(sample):
            seen.add(version)
            difference = (got - expected["aba"[version]])[start:end].abs().max()
            assert difference < 1e-3, (spans(sample), version)
    assert seen == {0, 1, 2}
    assert sum(sample.num_wasted + sample.num_failures for sample in samples) == 0


async def test_samples_of_an_engine_that_is_killed_go_on_elsewhere_and_lose_nothing(pair, models):
    pair.router.follow({"engine-0": 0, "engine-1": 2}, 2, 9)  # both serve model a again
    doomed = pair.engines[0]
    lengths = {}
    samples = [
        make_sample(i, max_new_tokens=MAX_NEW_TOKENS, name="killed-") for i in range(NUM_SAMPLES)
    ]
    for sample in samples:
        lengths[sample] = []
        sample.on_tokens = lambda s: lengths[s].append(len(s.output_ids))
    tasks = [asyncio.create_task(pair.sampler.complete(sample)) for sample in samples]
    await begun(samples, 1 + 2 * INTERVAL)
    os.killpg(doomed.info.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        await asyncio.gather(*tasks)

    check_whole(samples)
    resumed = [sample for sample in samples if sample.num_failures]
    assert len(resumed) > NUM_SAMPLES // 4
    for sample in resumed:
        (old, _, end), (new, _, _) = spans(sample)
        assert (old, new) == (0, 2) and end >= 1 + 2 * INTERVAL
        assert end in lengths[sample]  # just what had arrived when the engine died
        assert sample.num_wasted <= INTERVAL
    for sample in samples:
        steps = [b - a for a, b in itertools.pairwise([0, *lengths[sample]])]
        assert all(step >= 0 for step in steps)
    assert worst_difference(models["a"], samples, 1.0) < 1e-3
    assert [load.num_in_flight for load in pair.router.loads().values()] == [0, 0]
