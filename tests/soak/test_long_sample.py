"""One sample of 160,000 tokens, interrupted twenty times, from the engine to the trainer.

The engine is emulated. Each of its tokens says at which position it belongs, and its
log-probability by which version it was sampled: what is lost, doubled or moved is seen.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.rollouts.gpu import gpu_at
from benchmarks.rollouts.gpu_engine import logprob_at, token_at
from benchmarks.rollouts.work import WorkSize
from buffer.connect import Buffer
from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from configs.choices import PauseMode
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Interrupted, Sample
from rollout_pool.sampling.sampler import Sampler

pytestmark = pytest.mark.slow

NUM_TOKENS = 160_000
NUM_PROMPT = 1000
TIMES = 20
EVERY = 6000
"""Tokens between two interruptions, or more: the engine runs ahead of what has arrived."""
BYTES_PER_TOKEN = 6
"""Bytes of a token in a request: a number of up to three digits, a comma and a space."""
INTERRUPT = "interrupt"
WAYS = (INTERRUPT, PauseMode.resubmit, PauseMode.retract, PauseMode.in_place)


async def test_long_sample_arrives_whole_after_twenty_interruptions(
    tmp_path: Path, buffer_factory: Callable[..., Awaitable[Buffer]]
) -> None:
    buffer = await buffer_factory(groups_per_step=1, max_staleness=TIMES)
    size = dataclasses.replace(WorkSize(), gpu_speed=200.0)
    async with gpu_at(tmp_path, size) as info:
        client = SGLangClient(
            info.name, info.url, key="k", request_timeout_s=30.0, keys_prefix_by_version=True
        )
        try:
            sample = await _sample(client, buffer)
        finally:
            await client.close()
        async with httpx.AsyncClient(base_url=info.url, trust_env=False) as http:
            counts = (await http.get("/counts")).json()

    assert sample.finish_reason == "length"
    assert sample.num_failures == sample.num_refused == sample.num_wasted == 0
    spans = sample.version_spans
    assert [span.version for span in spans] == list(range(TIMES + 1))
    assert sample.output_ids == [token_at(NUM_PROMPT + p) for p in range(NUM_TOKENS)]
    assert sample.logprobs == [
        logprob_at(NUM_PROMPT + p, span.version) for span in spans for p in range(*_ends(span))
    ]
    # What it costs: prompt and tokens so far are sent again where the engine has given them up.
    sent = [0, *(spans[n + 1].start for n in range(TIMES) if _way(n) in WAYS[:2])]
    assert counts["num_samples"] == len(sent)
    assert counts["num_prompt_tokens"] == sum(NUM_PROMPT + start for start in sent)
    assert counts["num_bytes"] <= BYTES_PER_TOKEN * counts["num_prompt_tokens"] + 1000 * len(sent)

    await _check_buffer(buffer, sample)


def _way(number: int) -> object:
    return WAYS[number % len(WAYS)]


def _newest(sample: Sample) -> int:
    return max((span.version for span in sample.version_spans), default=-1)


def _ends(span: VersionSpan) -> tuple[int, int]:
    return span.start, span.end


async def _sample(client: SGLangClient, buffer: Buffer) -> Sample:
    arrived = asyncio.Event()
    sample = Sample(
        sample_id="long",
        prompt=[token_at(p) for p in range(NUM_PROMPT)],
        sampling=SamplingParams(),
        max_new_tokens=NUM_TOKENS,
        on_tokens=lambda _: arrived.set(),
    )
    router = Router([client], 30.0)
    router.follow({client.name: 0}, trainer=0, max_staleness=TIMES)
    sampler = Sampler(router, max_retries=0)
    running = asyncio.create_task(sampler.complete(sample))
    for number in range(TIMES):
        async with asyncio.timeout(60):
            while len(sample.output_ids) < (number + 1) * EVERY or _newest(sample) < number:
                arrived.clear()
                await arrived.wait()
        way, version = _way(number), number + 1
        if way is INTERRUPT:
            sampler.interrupt(sample)
            with pytest.raises(Interrupted):
                await running
        await client.pause(way if isinstance(way, PauseMode) else PauseMode.retract)
        await client.update_from_disk("nowhere", version, 30.0)
        await client.resume()
        await buffer.announce_version(version)
        router.follow({client.name: version}, trainer=version, max_staleness=TIMES)
        if way is INTERRUPT:
            running = asyncio.create_task(sampler.complete(sample))
    async with asyncio.timeout(60.0):
        await running
    return sample


async def _check_buffer(buffer: Buffer, sample: Sample) -> None:
    tokens = [*sample.prompt, *sample.output_ids]
    trajectory = Trajectory(
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array([0] * NUM_PROMPT + [1] * NUM_TOKENS, np.uint8),
        rollout_logprobs=np.array([0.0] * NUM_PROMPT + sample.logprobs, np.float32),
        version_spans=tuple(
            VersionSpan(
                version=span.version, start=NUM_PROMPT + span.start, end=NUM_PROMPT + span.end
            )
            for span in sample.version_spans
        ),
        prompt_length=NUM_PROMPT,
        reward=1.0,
        finish_reason="length",
    )
    ref = PromptRef(task="long", index=0)
    await buffer.push(TrajectoryGroup(group_id="long", prompt=ref, trajectories=(trajectory,)))
    lease = await buffer.lease(
        step=TIMES + 1, version=TIMES, num_groups=1, share=0, num_shares=1, timeout_s=30.0
    )
    (leased,) = lease.groups[0].trajectories
    assert leased.tokens.tolist() == tokens
    assert leased.rollout_logprobs.tolist() == [0.0] * NUM_PROMPT + sample.logprobs
    assert np.array_equal(leased.loss_mask, trajectory.loss_mask)
    assert leased.version_spans == trajectory.version_spans
