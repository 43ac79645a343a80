"""Restarts of a real engine and its receiver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from buffer.redis.connection import connect
from buffer.run_state import STREAM_START, RunState
from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig
from processes.leftovers import list_path
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.engine import SGLangEngine
from rollout_pool.engines.lifecycle import EngineLife
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.types import RolloutSpec
from tests.support.sglang_model import (
    build_model,
    engine_spec,
    sample,
    served_tensors,
    worst_difference,
)
from weight_sync.checksums import staged_checksums
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.receiver.store import StagedStore
from weight_sync.types import ReceiverSpec, TensorSpec

pytestmark = pytest.mark.slow

KEY = "k3y-of-the-weights"


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
    return RolloutSpec(
        config=RolloutConfig(),
        task=TaskConfig(),
        weight_sync=WeightSyncConfig(commit_timeout_s=10, timeout_s=10),
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
async def keeper(spec, state):
    """The node's receiver, kept running."""
    keeper = ReceiverKeeper(spec, "receiver-0", "127.0.0.1")
    keeping = asyncio.create_task(keeper.run())
    await keeper.wait_ready()
    yield keeper
    await keeper.stop()
    await keeping


def layout_of(model):
    return Layout.of(
        [
            TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape))
            for name, tensor in served_tensors(model).items()
        ],
        num_ranks=2,
    )


def stage_all(folder, models):
    """What a receiver that took every version would hold; its layout."""
    layout = layout_of(models[0])
    store = StagedStore(folder, len(models))
    store.set_layout(layout)
    for version, model in enumerate(models):
        tensors = served_tensors(model)
        slot = store.begin(
            Transfer(
                version=version,
                base_version=None,
                layout_digest=layout.digest,
                wire_bytes=tuple(layout.stream_bytes(rank) for rank in range(2)),
                bucket_bytes=2**20,
            )
        )
        parts = [tensors[spec.name].contiguous().flatten() for spec in layout.tensors]
        slot.data.copy_(torch.cat([part.view(torch.uint8) for part in parts]))
        sums = staged_checksums(layout, slot.data)
        store.complete(slot, Manifest(version=version, layout=layout, checksums=sums))
        store.release(version)
    store.close()
    return layout


class Publisher:
    """Makes a version visible at the run's receiver, which takes it from a peer."""

    def __init__(self, state, peer_url, layout):
        self.state = state
        self.peer_url = peer_url
        self.layout = layout

    async def publish(self, version):
        url = (await self.state.receivers())["receiver-0"]
        client = ReceiverClient("receiver-0", url, KEY)
        await client.catch_up(version, [self.peer_url], self.layout, timeout_s=20)
        await client.close()


@pytest.fixture
async def publisher(tmp_path, state, models):
    layout = await asyncio.to_thread(stage_all, tmp_path / "origin", models)
    peer = ReceiverProcess(
        ReceiverSpec(
            name="origin",
            host="127.0.0.1",
            folder=str(tmp_path / "origin"),
            num_slots=3,
            num_buffers=2,
            timeout_s=20,
            min_bandwidth=1e6,
            key=KEY,
        ),
        tmp_path / "origin.log",
    )
    info = await peer.start()
    yield Publisher(state, info.url, layout)
    await peer.stop()


@pytest.fixture
async def life(tmp_path, spec, state, keeper, models):
    engine = SGLangEngine(
        engine_spec(tmp_path / "model-0", tmp_path / "engine.log", max_restarts=1)
    )
    life = EngineLife(engine, config=spec.weight_sync, key=KEY, state=state)
    life.engine = engine
    await life.start()
    yield life
    await life.stop()


async def until(state, wanted, timeout_s=240.0):
    async with asyncio.timeout(timeout_s):
        seen = await state.engine_versions()
        while seen != wanted:
            seen = await state.wait_engines_changed(seen, 5.0)


async def events(state):
    entries = await state.read_metrics(STREAM_START, block_s=0)
    return [e.record for e in entries if e.kind == "weights_event"]


def part(pid, name):
    """The "scheduler" or "detokenizer" of an SGLang server."""
    children = psutil.Process(pid).children(recursive=True)
    (found,) = [child for child in children if name in " ".join(child.cmdline())]
    return found


async def test_engine_whose_parts_stall_or_die_restarts_and_is_given_up_while_versions_come(
    life, state, publisher, models
):
    engine = life.engine
    worker = SGLangClient(
        "engine-0",
        engine.info.url,
        key=engine.spec.key,
        request_timeout_s=60,
    )

    async def serves(version):
        """Whether a client that has known the engine from the start gets that version's tokens."""
        ends = await sample(worker, 4, max_new_tokens=24)
        assert {span.version for end in ends for span in end.version_spans} == {version}
        assert worst_difference(models[version], ends, 1.0) < 1e-4

    assert await state.engine_versions() == {}  # it has started, but serves nothing yet
    await publisher.publish(0)
    await until(state, {"engine-0": 0})
    await serves(0)

    await publisher.publish(1)
    await until(state, {"engine-0": 1})
    stopped = part(engine.info.pid, "scheduler")
    stopped.suspend()
    assert await worker.answers(10)  # the HTTP process goes on
    await until(state, {})  # though nothing is published that it could fail to take
    await publisher.publish(2)
    await until(state, {"engine-0": 2})
    await serves(2)
    assert not stopped.is_running()

    detokenizer = part(engine.info.pid, "detokenizer")
    detokenizer.kill()
    async with asyncio.timeout(15):
        why = await life.wait_given_up()
    assert why.startswith("died (exit code 1), after 1 restarts (rollout.engine.max_restarts=1)")
    line = f"sglang::detokenizer (process {detokenizer.pid}) died (exit code -9)"
    assert line in engine.log_tail().splitlines()
    assert await state.engine_versions() == {}
    recorded = await events(state)
    assert {e["who"] for e in recorded} == {"engine-0"}
    assert [e["event"] for e in recorded] == ["engine_lost", "engine_restarted", "engine_lost"]
    assert [e["detail"].split(" ")[0] for e in recorded] == ["did", "did", "died"]
    await worker.close()


async def test_dead_receiver_returns_with_its_staged_versions_and_leaves_nothing(
    spec, keeper, state, publisher
):
    stage = Path(f"/dev/shm/leash-{spec.run}-{spec.stage_token}")
    leftovers = list_path(Path(spec.run_dir), "receiver-0")
    assert leftovers.read_text() == f"{stage}\n" and stage.stat().st_mode & 0o077 == 0
    await publisher.publish(1)
    url = (await state.receivers())["receiver-0"]
    client = ReceiverClient("receiver-0", url, KEY)
    os.kill((await client.status(timeout_s=10)).pid, signal.SIGKILL)
    await client.close()
    async with asyncio.timeout(60):
        while (await state.receivers()).get("receiver-0") in (None, url):
            await asyncio.sleep(0.05)
    client = ReceiverClient("receiver-0", (await state.receivers())["receiver-0"], KEY)
    newest = await client.newest(-1, timeout_s=20)
    assert newest.version == 1 and Path(newest.path).is_relative_to(stage)
    pid = (await client.status(timeout_s=10)).pid
    await client.close()
    assert [(e["event"], e["who"]) for e in await events(state)] == [
        ("receiver_restarted", "receiver-0")
    ]
    await keeper.stop()
    assert not stage.exists() and not leftovers.exists()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
