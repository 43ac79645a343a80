"""Samples that span several requests to real SGLang servers, checked token by token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal

import psutil
import pytest
import pytest_asyncio
import torch

from processes.tree import family as family_of
from processes.tree import is_semaphore, shared_memory_files
from rollout_pool.sampling.engine_watch import poll_load
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Interrupted
from rollout_pool.sampling.sampler import Sampler
from tests.support.sglang_model import logprobs_of, make_sample, worst_difference

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

INTERVAL = 16
NUM_SAMPLES = 12
MAX_NEW_TOKENS = 600


class Pair:
    """A worker's view of the two servers, which both serve model a, as the same version."""

    def __init__(self, servers):
        self.servers = servers
        self.base = 1 + max(server.newest for server in servers)
        self.clients = [server.client(INTERVAL, is_only_client=True) for server in servers]
        self.router = Router(self.clients, 60.0, max_running_requests=32)
        self.sampler = Sampler(self.router, max_retries=2)
        self.polling = asyncio.gather(*(poll_load(self.router, c) for c in self.clients))

    async def publish(self, server, model, number):
        """Version `base + number`."""
        server.newest = self.base + number - 1
        assert (await server.publish(model)).version == self.base + number

    def follow(self, first, second):
        served = {"engine-0": self.base + first, "engine-1": self.base + second}
        self.router.follow(served, max(served.values()), 9)

    async def close(self):
        self.polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.polling
        for client in self.clients:
            await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(servers, models):
    pair = Pair(servers)
    for server in servers:
        await pair.publish(server, models["a"], 0)
    pair.follow(0, 0)
    yield pair
    await pair.close()


def spans(sample, base=0):
    return [(span.version - base, span.start, span.end) for span in sample.version_spans]


def check_whole(samples):
    """Every sample has ended, and every token has a log-probability and one version."""
    for sample in samples:
        length = len(sample.output_ids)
        ended = spans(sample)
        assert [start for _, start, _ in ended] == [0, *(end for _, _, end in ended[:-1])]
        assert ended[-1][2] == length == len(sample.logprobs)
        assert sample.finish_reason == ("length" if length == MAX_NEW_TOKENS else "stop")


def has_begun(samples, num_tokens):
    return all(len(s.output_ids) >= num_tokens or s.finish_reason for s in samples)


async def begun(samples, num_tokens):
    async with asyncio.timeout(60):
        while not has_begun(samples, num_tokens):
            await asyncio.sleep(0.005)


async def test_interrupted_samples_resume_with_exact_versions_and_logprobs(pair, models):
    """Version 0, a commit in mid-flight, an interruption under version 1, the rest under 2."""
    server = pair.servers[1]
    samples = [
        make_sample(i, max_new_tokens=MAX_NEW_TOKENS, name="interrupted-")
        for i in range(NUM_SAMPLES)
    ]
    for sample in samples:
        sample.engine = server.name
    tasks = [asyncio.create_task(pair.sampler.complete(sample)) for sample in samples]
    await begun(samples, 1 + INTERVAL)
    await pair.publish(server, models["b"], 1)
    at_commit = [len(sample.output_ids) for sample in samples]
    await begun(samples, max(at_commit) + 2 * INTERVAL)
    for sample in samples:
        pair.sampler.interrupt(sample)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    interrupted = [s for s, end in zip(samples, ends, strict=True) if isinstance(end, Interrupted)]
    assert interrupted and all(end is None or isinstance(end, Interrupted) for end in ends)
    kept = {sample: list(sample.output_ids) for sample in interrupted}
    assert any(len(ids) % INTERVAL != 1 for ids in kept.values())  # more than had been streamed
    await pair.publish(server, models["a"], 2)
    await asyncio.gather(*(pair.sampler.complete(sample) for sample in interrupted))

    check_whole(samples)
    seen = set()
    for sample in samples:
        if sample in kept:
            assert sample.output_ids[: len(kept[sample])] == kept[sample]
            version, start, _ = spans(sample, pair.base)[-1]
            assert (version, start) == (2, len(kept[sample]))
        got = torch.tensor(sample.logprobs)
        expected = {name: logprobs_of(models[name], sample, 1.0) for name in "ab"}
        for version, start, end in spans(sample, pair.base):
            seen.add(version)
            difference = (got - expected["aba"[version]])[start:end].abs().max()
            assert difference < 1e-3, (spans(sample), version)
    assert seen == {0, 1, 2}
    assert sum(sample.num_wasted + sample.num_failures for sample in samples) == 0


async def test_samples_of_a_killed_server_continue_elsewhere_and_it_leaves_nothing(pair, models):
    pair.follow(0, 2)  # both serve model a again
    engine = pair.servers[0].engine
    family = family_of(engine.info.pid)
    shared = shared_memory_files(family)
    kinds = ["semaphore" if is_semaphore(path) else path.name[:12] for path in shared]
    assert "sglang_loads" in kinds
    if torch.cuda.is_available():  # a process that is forked shares semaphores without a name
        assert "semaphore" in kinds
    assert {*map(str, shared)} <= {*engine.spec.leftovers_path.read_text().splitlines()}
    samples = [
        make_sample(i, max_new_tokens=MAX_NEW_TOKENS, name="killed-") for i in range(NUM_SAMPLES)
    ]
    lengths = {sample: [] for sample in samples}

    def note(sample):
        lengths[sample].append(len(sample.output_ids))
        if has_begun(samples, 1 + 2 * INTERVAL):  # at once: a look later, all may have ended
            os.kill(engine.info.pid, signal.SIGKILL)
            for sample in samples:
                sample.on_tokens = lambda s: lengths[s].append(len(s.output_ids))

    for sample in samples:
        sample.on_tokens = note
    tasks = [asyncio.create_task(pair.sampler.complete(sample)) for sample in samples]
    assert await asyncio.wait_for(engine.wait_dead(), 60) == -signal.SIGKILL
    async with asyncio.timeout(120):
        await asyncio.gather(*tasks)

    check_whole(samples)
    resumed = [sample for sample in samples if sample.num_failures]
    assert resumed
    for sample in resumed:
        (old, _, end), (new, _, _) = spans(sample, pair.base)
        assert (old, new) == (0, 2) and end >= 1 + 2 * INTERVAL
        assert end in lengths[sample]  # just what had arrived when the engine died
        assert sample.num_wasted <= INTERVAL
    for sample in samples:
        steps = [b - a for a, b in itertools.pairwise([0, *lengths[sample]])]
        assert all(step >= 0 for step in steps)
    assert worst_difference(models["a"], samples, 1.0) < 1e-3
    assert [engine.num_in_flight for engine in pair.router.engines.values()] == [0, 0]

    await engine.stop()
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert not any(path.exists() for path in shared)
