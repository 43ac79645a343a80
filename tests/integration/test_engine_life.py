"""Restarts of a real engine and its receiver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from buffer.redis.connection import connect
from buffer.run_state import RunState
from configs.schema import WeightSyncConfig
from processes.leftovers import list_path
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from tests.support.rollout import records, rollout_spec, serves
from tests.support.sglang_model import (
    build_model,
    engine_spec,
    manifest_of,
    sample,
    served_tensors,
    worst_difference,
)
from tests.support.weights.receiver_specs import KEY, receiver_spec
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.receiver.store import StagedStore
from weight_sync.types import Transfer

pytestmark = pytest.mark.slow

START_S = 240.0
"""Longest start of an engine."""


@pytest.fixture
async def state(redis_url, run_name, buffer_factory):
    await buffer_factory()
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


@pytest.fixture
def models(tmp_path):
    return [build_model(tmp_path / f"model-{seed}", seed) for seed in range(3)]


@pytest.fixture
def spec(tmp_path, redis_url, run_name):
    return rollout_spec(
        weight_sync=WeightSyncConfig(commit_timeout_s=10, timeout_s=10),
        redis_url=redis_url,
        run=run_name,
        run_dir=str(tmp_path / "run"),
        weights_key=KEY,
    )


@pytest.fixture
async def keeper(spec, state):
    """The node's receiver, kept running."""
    keeper = ReceiverKeeper(spec, "receiver-0", "127.0.0.1")
    keeping = asyncio.create_task(keeper.run())
    await keeper.wait_ready()
    yield keeper
    await keeper.stop()
    await keeping


def stage_all(folder, models):
    """Writes the file of a receiver that took every version, and returns its layout."""
    store = StagedStore(folder, len(models))
    for version, model in enumerate(models):
        tensors = served_tensors(model)
        manifest = manifest_of(version, tensors)
        store.set_layout(manifest.layout)
        slot = store.begin(Transfer.full(version, manifest.layout, 2**20))
        parts = [tensors[spec.name].contiguous().flatten() for spec in manifest.layout.tensors]
        slot.data.copy_(torch.cat([part.view(torch.uint8) for part in parts]))
        store.complete(slot, manifest)
        store.release(version)
    store.close()
    return manifest.layout


async def receiver_of(state):
    url = (await state.receivers())["receiver-0"]
    return ReceiverClient("receiver-0", url, KEY)


@pytest.fixture
async def publish(tmp_path, state, models):
    """Makes a version visible at the run's receiver, which takes it from a peer."""
    layout = await asyncio.to_thread(stage_all, tmp_path / "origin", models)
    spec = replace(receiver_spec("origin", tmp_path), num_slots=len(models))
    peer = ReceiverProcess(spec, tmp_path / "origin.log")
    url = await peer.start()

    async def publish(version):
        client = await receiver_of(state)
        await client.catch_up(version, [url], layout, timeout_s=20)
        await client.close()

    yield publish
    await peer.stop()


@pytest.fixture
async def life(tmp_path, spec, state, keeper, models):
    engine = SGLangEngine(
        engine_spec(tmp_path / "model-0", tmp_path / "engine.log", max_restarts=1)
    )
    life = EngineLife(engine, config=spec.weight_sync, key=KEY, state=state)
    await life.start()
    yield life
    await life.stop()


def part(pid, name):
    """The "scheduler" or "detokenizer" of an SGLang server."""
    family = {child.pid for child in psutil.Process(pid).children(recursive=True)}
    children = [p for p in psutil.process_iter(["cmdline"]) if p.pid in family]
    (found,) = [child for child in children if name in " ".join(child.info["cmdline"] or [])]
    return found


async def test_engine_whose_parts_stall_or_die_restarts_and_is_given_up_while_versions_come(
    life, state, publish, models
):
    engine = life.engine
    url, key = engine.info.url, engine.spec.key
    worker = SGLangClient("engine-0", url, key=key, request_timeout_s=60)

    async def samples_are_of(version):
        """Whether a client that has known the engine from the start gets that version's tokens."""
        ends = await sample(worker, 4, max_new_tokens=24)
        assert {span.version for end in ends for span in end.version_spans} == {version}
        assert worst_difference(models[version], ends, 1.0) < 1e-4

    assert await state.engine_versions() == {}  # it has started, but serves nothing yet
    await publish(0)
    await serves(state, {"engine-0": 0}, START_S)
    await samples_are_of(0)

    await publish(1)
    await serves(state, {"engine-0": 1}, START_S)
    stopped = part(engine.info.pid, "scheduler")
    stopped.suspend()
    assert await worker.responds(10)  # the HTTP process goes on
    await serves(state, {}, START_S)  # though nothing is published that it could fail to take
    await publish(2)
    await serves(state, {"engine-0": 2}, START_S)
    await samples_are_of(2)
    assert not stopped.is_running()

    detokenizer = part(engine.info.pid, "detokenizer")
    detokenizer.kill()
    async with asyncio.timeout(60):
        why = await life.wait_given_up()
    assert why.startswith("died (exit code 1), after 1 restarts (rollout.engine.max_restarts=1)")
    line = f"sglang::detokenizer (process {detokenizer.pid}) died (exit code -9)"
    assert line in engine.log_tail().splitlines()
    assert await state.engine_versions() == {}
    recorded = await records(state, "weights_event")
    assert {e["who"] for e in recorded} == {"engine-0"}
    assert [e["event"] for e in recorded] == ["engine_lost", "engine_restarted", "engine_lost"]
    assert [e["detail"].split(" ")[0] for e in recorded] == ["did", "did", "died"]
    await worker.close()


async def test_dead_receiver_returns_with_its_staged_versions_and_leaves_nothing(
    spec, keeper, state, publish
):
    stage = Path(f"/dev/shm/leash-{spec.run}-{spec.stage_token}")
    leftovers = list_path(Path(spec.run_dir), "receiver-0")
    assert leftovers.read_text() == f"{stage}\n" and stage.stat().st_mode & 0o077 == 0
    await publish(1)
    client = await receiver_of(state)
    os.kill((await client.status(timeout_s=60)).pid, signal.SIGKILL)
    await client.close()
    async with asyncio.timeout(60):
        while (await state.receivers()).get("receiver-0") in (None, client.url):
            await asyncio.sleep(0.05)
    client = await receiver_of(state)
    newest = await client.newest(-1, timeout_s=60)
    assert newest.version == 1 and Path(newest.path).is_relative_to(stage)
    pid = (await client.status(timeout_s=60)).pid
    await client.close()
    assert [(e["event"], e["who"]) for e in await records(state, "weights_event")] == [
        ("receiver_restarted", "receiver-0")
    ]
    await keeper.stop()
    assert not stage.exists() and not leftovers.exists()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
