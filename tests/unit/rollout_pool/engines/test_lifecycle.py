"""An engine that stalls: real Redis and real HTTP, with a server inside this process."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from buffer.run_state import Routes
from configs.schema import WeightSyncConfig
from rollout_pool.engines import lifecycle
from rollout_pool.engines.lifecycle import EngineLife
from tests.support.rollout import records, serves

NO_ROUTES = Routes({}, frozenset(), {})


class ThreadEngine:
    """Replaces SGLangEngine: its server is the fake, which answers again after a restart."""

    def __init__(self, fake):
        config = SimpleNamespace(max_restarts=2, tp_size=1)
        self.spec = SimpleNamespace(name="engine-0", config=config, host="127.0.0.1")
        self.info = SimpleNamespace(pid=os.getpid(), url="http://127.0.0.1:1")
        self.client = fake.client("engine-0")
        self.has_server = True
        self.fake = fake
        self._dying = asyncio.Event()

    def die(self):
        self._dying.set()

    async def start(self):
        return self.info

    async def restart(self):
        self.fake.slow.clear()
        self._dying.clear()
        return self.info

    async def wait_dead(self):
        await self._dying.wait()
        return SimpleNamespace(exit_code=-9)

    async def stop(self, timeout_s=10.0):
        await self.client.close()


async def test_engine_that_stalls_without_a_commit_is_lost_and_restarted(
    fake, state, receiver, monkeypatch
):
    monkeypatch.setattr(lifecycle, "SHORTEST_SILENCE_S", 4.0)
    await state.register_receiver("receiver-0", receiver.url)
    engine = ThreadEngine(fake)
    config = WeightSyncConfig(timeout_s=4.0)
    life = EngineLife(engine, config=config, key="a-key", state=state)
    await life.start()
    receiver.offer(3)
    await serves(state, {"engine-0": 3})
    fake.slow["/update_weights_from_disk"] = 6.0  # busy for long with a load: that is no stall
    receiver.offer(4)
    await serves(state, {"engine-0": 4})
    assert await records(state, "weights_event") == []

    fake.slow["/model_info"] = 600.0
    await serves(state, {})  # and nothing was published
    await serves(state, {"engine-0": 4})
    noted = await records(state, "weights_event")
    assert [(e["event"], e["who"]) for e in noted] == [
        ("engine_lost", "engine-0"),
        ("engine_restarted", "engine-0"),
    ]
    assert all("did not answer for" in str(e["detail"]) for e in noted)
    await life.stop()


@pytest.fixture
async def life(fake, state, receiver):
    """An engine that serves version 3 beside another one that serves it too."""
    await state.register_receiver("receiver-0", receiver.url)
    config = WeightSyncConfig()
    life = EngineLife(ThreadEngine(fake), config=config, key="a-key", state=state)
    await life.start()
    await state.record_commits({"engine-9": 3})
    receiver.offer(3)
    await serves(state, {"engine-0": 3, "engine-9": 3})
    yield life
    await life.stop()


async def test_held_engine_is_withdrawn_until_it_is_released(life, state, receiver):
    assert await life.hold(3, wait_s=60.0, limit_s=60.0)
    assert await state.engine_versions() == {"engine-9": 3}
    receiver.offer(4)
    await asyncio.sleep(0.3)
    assert await state.engine_versions() == {"engine-9": 3}
    assert not await life.hold(4, wait_s=60.0, limit_s=60.0)  # it is held already
    await life.release()
    await serves(state, {"engine-0": 4, "engine-9": 3})


async def test_engine_is_held_while_the_other_drains(life, state):
    await state.drain_engine("engine-9")
    assert await life.hold(3, wait_s=60.0, limit_s=60.0)
    await state.drain_engine("engine-9")
    await asyncio.sleep(0.3)
    assert await state.engine_versions() == {"engine-9": 3}
    await life.release()
    await serves(state, {"engine-0": 3, "engine-9": 3})


async def test_only_engine_is_not_held(life, state, receiver):
    await state.forget_engine("engine-9")
    assert not await life.hold(3, wait_s=60.0, limit_s=60.0)
    receiver.offer(4)
    await serves(state, {"engine-0": 4})


@pytest.mark.parametrize("ending", ["limit", "others are gone", "died"])
async def test_hold_ends_by_itself(life, state, receiver, ending):
    assert await life.hold(3, wait_s=60.0, limit_s=0.3 if ending == "limit" else 60.0)
    receiver.offer(4)
    if ending == "others are gone":
        await state.forget_engine("engine-9")
    if ending == "died":
        life.engine.die()
    await serves(state, {"engine-0": 4} | ({} if "others" in ending else {"engine-9": 3}))
    lost = ["engine_lost", "engine_restarted"] if ending == "died" else []
    assert [e["event"] for e in await records(state, "weights_event")] == lost


async def test_engine_that_leaves_ends_its_requests_first(life, state, fake, receiver):
    fake.num_running = 1
    leaving = asyncio.create_task(life.leave(drain_s=300.0))
    await serves(state, {"engine-9": 3})
    receiver.offer(4)  # it takes no version any more
    await asyncio.sleep(0.2)
    assert not leaving.done()
    assert "engine-0" in (await state.wait_routes_changed(NO_ROUTES, 60)).urls
    fake.num_running = 0
    await asyncio.wait_for(leaving, 60)
    assert "engine-0" not in (await state.wait_routes_changed(NO_ROUTES, 60)).urls
    assert await state.engine_versions() == {"engine-9": 3}
    assert receiver.held == set()


async def test_engine_that_does_not_end_its_requests_leaves_nevertheless(life, state, fake):
    fake.num_running = 1
    await asyncio.wait_for(life.leave(drain_s=0.2), 60)
    assert await state.engine_versions() == {"engine-9": 3}


async def test_engine_that_lost_its_process_is_started_again_and_catches_up(fake, state, receiver):
    await state.register_receiver("receiver-0", receiver.url)
    receiver.offer(5)
    life = EngineLife(ThreadEngine(fake), config=WeightSyncConfig(), key="a-key", state=state)
    life.start_again("lost its process")
    await serves(state, {"engine-0": 5})
    assert (await state.wait_routes_changed(NO_ROUTES, 60)).urls == {
        "engine-0": "http://127.0.0.1:1"
    }
    noted = await records(state, "weights_event")
    assert [(e["event"], e["detail"]) for e in noted] == [("engine_restarted", "lost its process")]
    await life.stop()
