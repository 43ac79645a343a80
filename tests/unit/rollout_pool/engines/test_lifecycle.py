"""An engine that stalls: real Redis and real HTTP, with a server inside this process."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from buffer.probes import Probes
from buffer.run_state import EngineRoutes
from configs.rollout_schema import EngineConfig
from configs.schema import WeightSyncConfig
from rollout_pool.engines import lifecycle
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.engines.sglang.strategies import StagedDisk
from rollout_pool.sampling.engine_client import EngineError
from tests.support.rollout import engine_spec, records, serves, until

NO_ROUTES = EngineRoutes({}, frozenset(), {})


class ThreadEngine:
    """An Engine whose server is the fake, which answers again after a restart."""

    def __init__(self, fake):
        config = EngineConfig(max_restarts=2)
        self.spec = engine_spec(config=config, uses_gpu=True, context_length=1088)
        self.info = SimpleNamespace(pid=os.getpid(), url="http://127.0.0.1:1")
        self.client = fake.client("engine-0")
        self.is_stopped = False
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

    def strategy(self, config):
        return StagedDisk(self.client, config.commit_timeout_s)

    async def stop(self, timeout_s=10.0):
        self.is_stopped = True
        await self.client.close()


@pytest.fixture
async def begin(fake, state, receiver):
    """Makes the life of an engine with a receiver; each is stopped."""
    await state.register_receiver("receiver-0", receiver.url)
    begun = []

    async def begin(starts=True, config=None, max_restarts=2):
        engine, config = ThreadEngine(fake), config or WeightSyncConfig()
        engine.spec = replace(engine.spec, config=EngineConfig(max_restarts=max_restarts))
        begun.append(EngineLife(engine, config=config, key="a-key", state=state))
        if starts:
            await begun[-1].start()
        return begun[-1]

    yield begin
    for life in begun:
        await life.stop()


async def test_engine_that_stalls_without_a_commit_is_restarted(
    fake, begin, state, receiver, monkeypatch
):
    monkeypatch.setattr(lifecycle, "SHORTEST_SILENCE_S", 4.0)
    await begin(config=WeightSyncConfig(timeout_s=4.0))
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


@pytest.mark.parametrize(
    ("uses_gpu", "limits", "what"),
    [
        (True, {}, "mem_fraction=null"),
        (True, {"mem_fraction": 0.2}, "mem_fraction=0.2"),
        (True, {"max_total_tokens": 2000}, "max_total_tokens=2000"),
        (False, {}, "max_total_tokens=null"),
    ],
)
async def test_engine_without_room_for_a_trajectory_is_refused(fake, state, uses_gpu, limits, what):
    engine = ThreadEngine(fake)
    engine.spec = replace(engine.spec, uses_gpu=uses_gpu, config=EngineConfig(**limits))
    fake.num_kv_tokens = 1087
    life = EngineLife(engine, config=WeightSyncConfig(), key="a-key", state=state)
    words = rf"rollout\.engine\.{what}: the KV cache of engine-0 has room for 1087 .* = 1088;"
    with pytest.raises(ValueError, match=words):
        await life.start()
    assert engine.is_stopped


@pytest.fixture
async def life(begin, state, receiver):
    """An engine that serves version 3 beside another one that serves it too."""
    life = await begin()
    await state.record_commits({"engine-9": 3})
    receiver.offer(3)
    await serves(state, {"engine-0": 3, "engine-9": 3})
    return life


async def test_engine_is_compared_as_soon_as_it_serves_a_version(begin, state, receiver):
    """Engines commit in turn, and the trainer's first publish ends with the first of them."""
    life = await begin()
    await state.leave_probes(Probes(version=3, text=[5] * 9, logprobs=[[-1.0] * 8], most=0.1))
    await state.record_commits({"engine-9": 3})
    comparing = asyncio.create_task(life.compare())
    await asyncio.wait({comparing}, timeout=0.2)
    assert not comparing.done()
    receiver.offer(3)
    async with asyncio.timeout(60):
        found = await comparing
    assert (found.engine, found.version, found.problem) == ("engine-0", 3, None)


async def test_engine_that_is_given_up_is_not_compared(begin):
    life = await begin(max_restarts=0)
    comparing = asyncio.create_task(life.compare())
    life.engine.die()
    with pytest.raises(EngineError, match=r"engine-0 died .*max_restarts=0"):
        async with asyncio.timeout(60):
            await comparing


async def test_held_engine_is_withdrawn_until_it_is_released(life, state, receiver):
    assert await life.hold(3, wait_s=60.0, limit_s=60.0)
    assert await state.engine_versions() == {"engine-9": 3}
    receiver.offer(4)
    await asyncio.sleep(0.3)
    assert await state.engine_versions() == {"engine-9": 3}
    assert not await life.hold(4, wait_s=60.0, limit_s=60.0)  # it is held already
    await life.release()
    await serves(state, {"engine-0": 4, "engine-9": 3})


async def test_engine_is_held_while_the_other_drains(life, fake, state):
    await state.drain_engine("engine-9")
    assert await life.hold(3, wait_s=60.0, limit_s=60.0)
    await state.drain_engine("engine-9")
    await asyncio.sleep(0.3)
    assert await state.engine_versions() == {"engine-9": 3}
    await life.release()
    await serves(state, {"engine-0": 3, "engine-9": 3})
    assert len(fake.bodies("/update_weights_from_disk")) == 1, "it has that version already"


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


async def test_engine_that_lost_its_process_is_started_again_and_catches_up(begin, state, receiver):
    receiver.offer(5)
    life = await begin(starts=False)
    life.start_again("lost its process")
    await serves(state, {"engine-0": 5})
    assert (await state.wait_routes_changed(NO_ROUTES, 60)).urls == {
        "engine-0": "http://127.0.0.1:1"
    }
    noted = await records(state, "weights_event")
    assert [(e["event"], e["detail"]) for e in noted] == [("engine_restarted", "lost its process")]


async def test_engine_whose_disk_is_full_at_its_restart_is_tried_again(
    begin, state, receiver, monkeypatch
):
    monkeypatch.setattr(lifecycle, "SYSTEM_PAUSE_S", 0.01)
    receiver.offer(5)
    life = await begin(starts=False)
    restart, errors = life.engine.restart, [OSError(28, "No space left on device")]

    async def restart_with_room():
        if errors:
            raise errors.pop()
        return await restart()

    life.engine.restart = restart_with_room
    life.start_again("lost its process")
    await serves(state, {"engine-0": 5})
    noted = [event["detail"] for event in await records(state, "weights_event")]
    assert noted == [
        "lost its process",
        "did not restart: [Errno 28] No space left on device",
    ]


async def test_engine_that_takes_no_weights_is_given_up_at_once(
    fake, begin, state, receiver, tmp_path
):
    """Its next server would have the same loader."""
    fake.held = lambda version: {"norm.weight": "the first"}
    life = await begin()
    for version in (3, 4):
        receiver.offer_weights(tmp_path, version, {"norm.weight": version})
        await until(lambda: len(fake.bodies("/weights_checker")) == len(receiver.offered))
    async with asyncio.timeout(60):
        why = await life.wait_given_up()
    assert why.startswith("did not take what was published as version 4: since version 3 ")
    [event] = await records(state, "weights_event")
    assert (event["event"], event["detail"]) == ("engine_lost", why)
    assert await state.engine_versions() == {}
