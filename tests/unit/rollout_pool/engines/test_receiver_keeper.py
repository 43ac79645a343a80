"""The keeper of a node's receiver; the receivers are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from configs.schema import WeightSyncConfig
from rollout_pool.actors.receiver import ReceiverActor
from rollout_pool.engines import receiver_keeper
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from tests.support.rollout import records, rollout_spec, until, until_read
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.store import StagedStore

pytestmark = pytest.mark.slow

KEY = "k3y-of-the-weights"


@pytest.fixture
def spec(tmp_path, redis_url, run_name):
    return rollout_spec(
        weight_sync=WeightSyncConfig(timeout_s=6, stage_dir=str(tmp_path / "stage")),
        redis_url=redis_url,
        run=run_name,
        run_dir=str(tmp_path / "run"),
        weights_key=KEY,
    )


@pytest.fixture
def held_folder(spec):
    """The receiver's folder, in use by another process's receiver, as far as anyone can see."""
    folder = (
        Path(spec.weight_sync.stage_dir) / f"leash-{spec.run}-{spec.stage_token}" / "receiver-0"
    )
    folder.parent.mkdir(parents=True)
    store = StagedStore(folder, 2)
    yield store
    store.close()


async def status(state):
    client = ReceiverClient("receiver-0", (await state.receivers())["receiver-0"], KEY)
    try:
        return await client.status(timeout_s=60)
    finally:
        await client.close()


async def test_keeper_waits_for_the_folder_and_replaces_a_receiver_that_hangs(
    spec, state, held_folder, monkeypatch
):
    monkeypatch.setattr(receiver_keeper, "KILL_AFTER_S", 0.2)
    # One life: each start of a receiver imports torch.
    await state.register_receiver("receiver-0", "http://127.0.0.1:9")
    keeper = ReceiverKeeper(spec, "receiver-0", "127.0.0.1")
    keeping = asyncio.create_task(keeper.run())
    log = Path(spec.run_dir) / "logs" / "receiver-0.log"
    await until(lambda: log.exists() and "in use" in log.read_text(), 300)
    assert await state.receivers() == {}  # the one that is gone is offered to no engine
    assert not keeping.done()
    held_folder.close()
    async with asyncio.timeout(300):
        await keeper.wait_ready()
    first = await status(state)
    assert first.name == "receiver-0"

    url = (await state.receivers())["receiver-0"]
    os.kill(first.pid, signal.SIGSTOP)
    others = {None, url}
    await until_read(state.receivers, lambda found: found.get("receiver-0") not in others, 300)
    assert (await status(state)).pid != first.pid
    noted = await records(state, "weights_event")
    assert {(e["event"], e["who"]) for e in noted} == {("receiver_restarted", "receiver-0")}
    assert noted[0]["detail"] == "lost its keeper"
    assert "did not answer for" in noted[1]["detail"]
    await keeper.stop()
    await keeping


async def test_receiver_that_never_starts_is_given_up(spec, state, held_folder, monkeypatch):
    monkeypatch.setattr(receiver_keeper, "FIRST_START_S", 0.1)
    actor = ReceiverActor(spec, "receiver-0")
    starting = asyncio.create_task(actor.wait_ready())
    async with asyncio.timeout(300):
        why = await actor.keep([])
    assert why.startswith("was given up: receiver-0 ended at its start")
    with pytest.raises(Exception, match="receiver-0 ended at its start"):
        await starting
    await actor.stop(1.0)
