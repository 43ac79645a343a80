"""Engines that join, move and leave while a worker runs: real Redis and HTTP."""

from __future__ import annotations

import asyncio

import pytest

from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.sampling.engine_watch import EngineWatch
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from tests.support.rollout import make_sample, until


def connect(name, url):
    return SGLangClient(name, url, key="a-key", request_timeout_s=60.0)


@pytest.fixture
async def watch(state, buffer_factory):
    router = Router([], wait_timeout_s=60.0)
    watch = EngineWatch(router, state, await buffer_factory(), connect, load_every_s=0.02)
    running = asyncio.create_task(watch.run())
    yield watch
    await end_tasks([running])
    await watch.close()


def knows(watch, **engines):
    wanted = {name.replace("_", "-"): serves for name, serves in engines.items()}
    known = watch.router.engines
    return until(lambda: {name: state.serves for name, state in known.items()} == wanted)


async def test_sample_that_waits_goes_to_the_first_engine_that_joins_and_serves(watch, state, fake):
    sample = make_sample()
    waiting = asyncio.create_task(Sampler(watch.router, max_retries=0).complete(sample))
    await state.register_engine("engine-0", fake.url)
    await knows(watch, engine_0=None)  # it has not committed a version yet
    assert not waiting.done()
    await state.record_commits({"engine-0": 0})
    await asyncio.wait_for(waiting, 60)
    assert sample.finish_reason is not None and fake.num_loads > 0


async def test_engine_that_comes_back_at_another_url_is_asked_there(watch, state, fake, other_fake):
    await state.register_engine("engine-0", fake.url)
    await state.record_commits({"engine-0": 0})
    await knows(watch, engine_0=0)
    await state.forget_engine("engine-0")
    await knows(watch, engine_0=None)
    await state.register_engine("engine-0", other_fake.url)
    await state.record_commits({"engine-0": 1})
    await knows(watch, engine_0=1)
    asked_before = fake.num_loads
    await until(lambda: other_fake.num_loads > 3)
    assert fake.num_loads <= asked_before + 1


async def test_engine_that_left_the_run_is_forgotten(watch, state, fake, other_fake):
    await state.register_engine("engine-0", fake.url)
    await state.register_engine("engine-1", other_fake.url)
    await state.record_commits({"engine-0": 0, "engine-1": 0})
    await knows(watch, engine_0=0, engine_1=0)
    await state.remove_engine("engine-1")
    await knows(watch, engine_0=0)
    assert [*watch.connections] == ["engine-0"]


async def test_error_while_an_engines_load_is_read_ends_the_watch(state, buffer_factory, fake):
    class Broken(SGLangClient):
        async def load(self):
            raise KeyError("token_usage")

    watch = EngineWatch(
        Router([], wait_timeout_s=60.0),
        state,
        await buffer_factory(),
        lambda name, url: Broken(name, url, key="a-key", request_timeout_s=60.0),
    )
    await state.register_engine("engine-0", fake.url)
    with pytest.raises(KeyError, match="token_usage"):
        await asyncio.wait_for(watch.run(), 60)
    await watch.close()
