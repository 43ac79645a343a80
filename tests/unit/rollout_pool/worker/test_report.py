"""What a worker reports of its engines, over real HTTP and Redis."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollout_pool.sampling.engine_client import EngineLoad
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.worker.report import WorkerReporter
from tests.support.rollout import make_sample, records, until


@pytest.fixture
def router(client):
    router = Router([client], wait_timeout_s=60.0, max_running_requests=40)
    router.follow({"engine-0": 7}, 7, 0)
    return router


@pytest.fixture
async def sampler(client, router, state):
    """Its engine is reported on every 20 ms."""
    sampler = Sampler(router, max_retries=0)
    reporter = WorkerReporter(
        index=3,
        num_workers=1,
        state=state,
        waited_for_rewards_s=lambda: 0.5,
        clients={"engine-0": client},
        router=router,
        sampler=sampler,
        every_s=0.02,
    )
    task = asyncio.create_task(reporter.run())
    yield sampler
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_record_has_the_engines_load_and_what_happened_since_the_last(
    fake, client, router, state, sampler, make_reply
):
    async def newest():
        return (await records(state, "engine"))[-1]

    async def has_begun():
        return bool(await records(state, "engine"))

    await until(has_begun)
    unknown = await newest()
    assert (unknown["engine"], unknown["worker"], unknown["limit"]) == ("engine-0", 3, 40)
    assert [unknown[name] != unknown[name] for name in ("running", "kv_usage")] == [True, True]
    load = EngineLoad(num_running=5, num_queued=2, num_tokens=9, capacity=100, kv_usage=0.25)
    router.note_load("engine-0", load, 0)
    fake.version = "7"
    fake.reply = lambda rid: make_reply(cached_tokens=2, num_retractions=1)
    await sampler.complete(make_sample())

    async def new(name):
        return [r for r in await records(state, "engine") if json.loads(r[name])]

    async def is_reported():
        return sum(json.loads(r["logprobs"])["7"] for r in await new("logprobs")) == 3

    await until(is_reported)
    record = next(r for r in await records(state, "engine") if r["preemptions"])
    assert (record["running"], record["queued"], record["kv_usage"]) == (5, 2, 0.25)
    assert record["prefix_hit_rate"] == pytest.approx(2 / 3)
    assert await new("logprobs_not_finite") == []
    fake.reply = lambda rid: make_reply(says_first_token=False, logprobs=[-0.5, None, -0.5])
    with pytest.raises(RuntimeError, match="log-probability of token 1 is None"):
        await sampler.complete(make_sample(1))

    async def is_refused():
        return bool(await new("logprobs_not_finite"))

    await until(is_refused)
    [bad] = await new("logprobs_not_finite")
    assert json.loads(bad["logprobs_not_finite"]) == {"7": 1}
    assert json.loads(bad["logprobs"]) == {"7": 3}


async def test_waits_and_totals_go_to_the_counters_once(fake, client, state, sampler, make_reply):
    fake.version = "7"
    fake.reply = lambda rid: make_reply(cached_tokens=1, num_retractions=2, queue_s=0.5)
    await asyncio.gather(*(sampler.complete(make_sample(i)) for i in range(4)))

    async def is_counted():
        return (await state.counters()).get("prompt_tokens:engine-0") == 12

    await until(is_counted)
    seen = len(await records(state, "engine"))

    async def is_later():
        return len(await records(state, "engine")) > seen + 3

    await until(is_later)
    counters = await state.counters()
    assert counters["requests:engine-0"] == 4 and counters["preemptions:engine-0"] == 8
    assert counters["prefilled_tokens:engine-0"] == 8 and counters["engine_queue_s:engine-0"] == 2
    assert counters["first_token_s:engine-0"] > 0
    assert await state.waits() == {("rollout", "rewards"): 0.5}
