"""What keeps a node's receiver running; the receivers are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from buffer.redis.connection import connect
from buffer.run_state import STREAM_START, RunState
from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig
from rollout_pool.engines import receiver_keeper
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.pool import ReceiverActor
from rollout_pool.types import RolloutSpec
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.store import StagedStore

pytestmark = pytest.mark.slow

KEY = "k3y-of-the-weights"
TOKEN = "t0ken"


@pytest.fixture
async def state(redis_url, run_name, buffer_factory):
    await buffer_factory()
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


@pytest.fixture
def spec(tmp_path, redis_url, run_name):
    return RolloutSpec(
        config=RolloutConfig(),
        task=TaskConfig(),
        weight_sync=WeightSyncConfig(timeout_s=5, stage_dir=str(tmp_path / "stage")),
        buffer=BufferConfig(),
        model_path="not-asked-for",
        trust_remote_code=False,
        redis_url=redis_url,
        run=run_name,
        run_dir=str(tmp_path / "run"),
        host="127.0.0.1",
        num_threads=1,
        uses_gpu=False,
        seed=0,
        engine_key="a-key",
        weights_key=KEY,
    )


@pytest.fixture
def held_folder(spec):
    """The receiver's folder, in use by another process's receiver, as far as anyone can see."""
    folder = Path(spec.weight_sync.stage_dir) / f"leash-{spec.run}-{TOKEN}" / "receiver-0"
    folder.parent.mkdir(parents=True)
    store = StagedStore(folder, 2)
    yield store
    store.close()


async def events(state):
    entries = await state.read_metrics(STREAM_START, block_s=0)
    return [e.record for e in entries if e.kind == "weights_event"]


async def status(state):
    client = ReceiverClient("receiver-0", (await state.receivers())["receiver-0"], KEY)
    try:
        return await client.status(timeout_s=20)
    finally:
        await client.close()


async def test_a_receiver_that_is_stopped_is_killed_and_started_again(spec, state):
    keeper = ReceiverKeeper(spec, "receiver-0", TOKEN, "127.0.0.1", state)
    keeping = asyncio.create_task(keeper.run())
    await keeper.wait_ready()
    url = (await state.receivers())["receiver-0"]
    stalled = (await status(state)).pid
    os.kill(stalled, signal.SIGSTOP)
    async with asyncio.timeout(90):
        while (await state.receivers()).get("receiver-0") in (None, url):
            await asyncio.sleep(0.05)
    assert (await status(state)).pid != stalled
    (told,) = await events(state)
    assert (told["event"], told["who"]) == ("receiver_restarted", "receiver-0")
    assert "did not answer for" in told["detail"]
    await keeper.stop()
    await keeping


async def test_a_keeper_waits_for_the_receiver_of_an_earlier_one_to_leave_the_folder(
    spec, state, held_folder
):
    await state.register_receiver("receiver-0", "http://127.0.0.1:9")
    keeper = ReceiverKeeper(spec, "receiver-0", TOKEN, "127.0.0.1", state)
    keeping = asyncio.create_task(keeper.run())
    log = Path(spec.run_dir) / "logs" / "receiver-0.log"
    async with asyncio.timeout(60):
        while not (log.exists() and "in use" in log.read_text()):
            await asyncio.sleep(0.05)
    assert await state.receivers() == {}  # the one that is gone is offered to nobody
    assert not keeping.done()
    held_folder.close()
    async with asyncio.timeout(60):
        await keeper.wait_ready()
    assert (await status(state)).name == "receiver-0"
    assert [e["detail"] for e in await events(state)] == ["lost its keeper"]
    await keeper.stop()
    await keeping


async def test_a_receiver_that_never_starts_is_given_up_with_the_reason(
    spec, state, held_folder, monkeypatch
):
    monkeypatch.setattr(receiver_keeper, "FIRST_START_S", 0.1)
    actor = ReceiverActor(spec, "receiver-0", TOKEN)
    starting = asyncio.create_task(actor.start())
    async with asyncio.timeout(60):
        why = await actor.keep([])
    assert why.startswith("was given up: receiver-0 ended at its start")
    with pytest.raises(Exception, match="receiver-0 ended at its start"):
        await starting
    await actor.stop(1.0)
