"""A worker's reports of its engines, over real HTTP and Redis."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollout_pool.sampling.engine_client import EngineLoad
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.worker.report import WorkerReporter
from tests.support.rollout import make_sample, records, until_read


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
        scoring=lambda: 12,
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


async def test_record_has_the_engines_load_and_what_is_new(fake, client, router, state, sampler):
    async def read():
        return await records(state, "engine")

    unknown = (await until_read(read))[-1]
    assert (unknown["engine"], unknown["worker"], unknown["limit"]) == ("engine-0", 3, 40)
    assert [unknown[name] != unknown[name] for name in ("running", "kv_usage")] == [True, True]
    load = EngineLoad(num_running=5, num_queued=2, num_tokens=9, capacity=100, kv_usage=0.25)
    router.note_load("engine-0", load, 0)
    fake.version = "7"
    fake.says(cached_tokens=2, num_retractions=1)
    await sampler.complete(make_sample())

    def new(found, name):
        return [value for record in found if (value := json.loads(record[name]))]

    found = await until_read(read, lambda all: sum(n["7"] for n in new(all, "logprobs")) == 3)
    record = next(r for r in found if r["preemptions"])
    assert (record["running"], record["queued"], record["kv_usage"]) == (5, 2, 0.25)
    assert record["scoring"] == 12 and record["evaluating"] == 0
    assert record["prefix_hit_rate"] == pytest.approx(2 / 3)
    assert new(found, "logprobs_not_finite") == []
    fake.says(says_first_token=False, logprobs=[-0.5, None, -0.5])
    with pytest.raises(RuntimeError, match="log-probability of token 1 is None"):
        await sampler.complete(make_sample(1))

    found = await until_read(read, lambda all: new(all, "logprobs_not_finite"))
    [bad] = [record for record in found if new([record], "logprobs_not_finite")]
    assert json.loads(bad["logprobs_not_finite"]) == {"7": 1}
    assert json.loads(bad["logprobs"]) == {"7": 3}


async def test_waits_and_totals_go_to_the_counters_once(fake, client, state, sampler):
    fake.version = "7"
    fake.says(cached_tokens=1, num_retractions=2, queue_s=0.5)
    await asyncio.gather(*(sampler.complete(make_sample(i)) for i in range(4)))

    await until_read(state.counters, lambda counted: counted.get("prompt_tokens:engine-0") == 12)
    seen = len(await records(state, "engine"))
    await until_read(lambda: records(state, "engine"), lambda found: len(found) > seen + 3)
    counters = await state.counters()
    assert counters["requests:engine-0"] == 4 and counters["preemptions:engine-0"] == 8
    assert counters["prefilled_tokens:engine-0"] == 8 and counters["engine_queue_s:engine-0"] == 2
    assert counters["first_token_s:engine-0"] > 0
    assert await state.waits() == {("rollout", "rewards"): 0.5}
