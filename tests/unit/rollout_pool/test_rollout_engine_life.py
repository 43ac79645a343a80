"""An engine that stalls: real Redis and real HTTP around a server that is no process of its own."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from buffer.connection import connect
from buffer.run_state import STREAM_START, RunState
from configs.schema import WeightSyncConfig
from rollout_pool.engines import engine_life
from rollout_pool.engines.engine_life import EngineLife


class ThreadEngine:
    """In place of SGLangEngine: its server is the fake, which answers again after a restart."""

    def __init__(self, fake):
        config = SimpleNamespace(max_restarts=2, tp_size=1)
        self.spec = SimpleNamespace(name="engine-0", config=config, host="127.0.0.1")
        self.info = SimpleNamespace(pid=os.getpid())
        self.client = fake.client("engine-0")
        self.fake = fake

    async def start(self):
        return self.info

    async def restart(self):
        self.fake.slow.clear()

    async def wait_dead(self):
        await asyncio.Event().wait()

    async def stop(self, timeout_s):
        await self.client.close()


@pytest.fixture
async def state(redis_url, run_name, buffer_factory):
    await buffer_factory()
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


async def serves(state, wanted):
    async with asyncio.timeout(30):
        seen = await state.engine_versions()
        while seen != wanted:
            seen = await state.wait_engines_changed(seen, 5.0)


async def events(state):
    entries = await state.read_metrics(STREAM_START, block_s=0)
    return [e.record for e in entries if e.kind == "weights_event"]


async def test_an_engine_that_stalls_without_any_commit_is_lost_and_started_again(
    fake, state, receiver, monkeypatch
):
    monkeypatch.setattr(engine_life, "SHORTEST_SILENCE_S", 1.6)
    await state.register_receiver("receiver-0", receiver.url)
    engine = ThreadEngine(fake)
    config = WeightSyncConfig(timeout_s=1.6)
    life = EngineLife(engine, config=config, receiver="receiver-0", key="a-key", state=state)
    await life.start()
    receiver.offer(3)
    await serves(state, {"engine-0": 3})
    fake.slow["/update_weights_from_disk"] = 2.5  # busy for long with a load: that is no stall
    receiver.offer(4)
    await serves(state, {"engine-0": 4})
    assert await events(state) == []

    fake.slow["/model_info"] = 600.0
    await serves(state, {})  # and nobody published anything
    await serves(state, {"engine-0": 4})
    told = await events(state)
    assert [(e["event"], e["who"]) for e in told] == [
        ("engine_lost", "engine-0"),
        ("engine_restarted", "engine-0"),
    ]
    assert all("did not answer for" in str(e["detail"]) for e in told)
    await life.stop()
