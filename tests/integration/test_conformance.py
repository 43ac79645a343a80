"""The buffer's verbs, end to end, on every server program found and on a cluster of three.

Programs are those on PATH, the one of the pip package, and those that the environment variable
LEASH_TEST_SERVERS names (paths, joined by ':').
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis as blocking_redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from buffer.connect import Buffer
from buffer.errors import NotOwnerError
from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.redis.server import EmbeddedServer, ServerStartError, find_binary
from buffer.results import Lease, PushResult
from buffer.run_state import RunState
from buffer.types import PromptRef, Rerun
from configs.schema import BufferConfig
from tests.support.buffer.groups import lease_batch, make_group, next_retry
from tests.support.controller.buffers import opened
from tests.support.invariants import find_violations

HOST = "127.0.0.1"
PASSWORD = "of-every-node"
NUM_NODES = 3
GROUPS_PER_STEP = 6
OpenBuffer = Callable[..., Awaitable[Buffer]]


def _programs() -> list[Path]:
    on_path = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    named = os.environ.get("LEASH_TEST_SERVERS", "").split(":")
    found = [Path(name) for name in [*on_path, *named] if name]
    try:
        found.append(find_binary())
    except ServerStartError:
        assert found, "no server program to test with"
    return list({program.resolve(): program for program in found}.values())


@pytest.fixture(scope="module", params=_programs(), ids=lambda path: path.name)
def program(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture(scope="module")
def url(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    server = EmbeddedServer.start(folder, BufferConfig(), HOST, folder / "log", binary=program)
    yield server.url
    server.stop(timeout_s=60)


@pytest.fixture(scope="module")
def cluster(
    program: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EmbeddedServer]]:
    """Three nodes with a third of the slots each."""
    nodes: list[EmbeddedServer] = []
    try:
        for _ in range(NUM_NODES):
            nodes.append(_start_node(tmp_path_factory.mktemp("node"), program))
        _join(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.stop(timeout_s=60)


def _start_node(folder: Path, program: Path) -> EmbeddedServer:
    extra = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": "1000",
        "cluster-require-full-coverage": "no",
        "masterauth": PASSWORD,
        "repl-diskless-sync-delay": "0",
    }
    return EmbeddedServer.start(
        folder,
        BufferConfig(),
        HOST,
        folder / "log",
        password=PASSWORD,  # one for all nodes, as users and passwords are in any cluster
        extra=extra,
        binary=program,
    )


def _join(nodes: list[EmbeddedServer]) -> None:
    clients = [blocking_redis.Redis.from_url(node.url, decode_responses=True) for node in nodes]
    size = REDIS_CLUSTER_HASH_SLOTS // NUM_NODES + 1
    for number, client in enumerate(clients):
        last = min((number + 1) * size, REDIS_CLUSTER_HASH_SLOTS) - 1
        client.execute_command("CLUSTER ADDSLOTSRANGE", number * size, last)
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        clients[0].execute_command("CLUSTER MEET", HOST, urlsplit(node.url).port)
    deadline = time.monotonic() + 120
    while not all(_is_complete(client) for client in clients):
        assert time.monotonic() < deadline, "the nodes did not form a cluster"
        time.sleep(0.05)
    for client in clients:
        client.close()


def _is_complete(client: blocking_redis.Redis) -> bool:
    info = client.execute_command("CLUSTER INFO")
    text = info if isinstance(info, dict) else dict(x.split(":") for x in info.split())
    return (
        text["cluster_state"] == "ok"
        and text["cluster_known_nodes"] == str(NUM_NODES)
        and len(client.execute_command("CLUSTER SLOTS")) == NUM_NODES
    )


def _run_on_all_nodes(purpose: str) -> str:
    """A run's name whose three shards land on different nodes."""
    size = REDIS_CLUSTER_HASH_SLOTS // NUM_NODES + 1
    for number in count():
        run = f"{purpose}-{number}"
        slots = [key_slot(Keys(run, shard).prefix.encode()) for shard in range(NUM_NODES)]
        if len({slot // size for slot in slots}) == NUM_NODES:
            return run
    raise AssertionError("unreachable")


@pytest.fixture
async def open_buffer() -> AsyncIterator[OpenBuffer]:
    """`open_buffer(url, run, max_staleness=1)`; closed at the end."""
    async with AsyncExitStack() as closing:

        async def make(url: str, run: str, **settings: object) -> Buffer:
            buffer = opened(url, run, GROUPS_PER_STEP, wait_timeout_s=60, **settings)
            return await closing.enter_async_context(buffer)

        yield make


async def _produce(buffer: Buffer, name: str, version: int, number: int) -> list[str]:
    """Admits, keeps alive and pushes; the ids."""
    credits = [await buffer.admit(f"{name}-{index}", 60) for index in range(number)]
    ids = [credit.group_id for credit in credits]
    assert await buffer.renew_credits(ids) == number
    for index, group_id in enumerate(ids):
        group = make_group(group_id, version, index=index)
        assert await buffer.push(group) is PushResult.stored
        assert await buffer.push(group) is PushResult.duplicate
    return ids


async def _lease(buffer: Buffer, step: int, version: int) -> list[Lease]:
    """The leases of two ranks."""
    return [
        await buffer.lease(
            step=step,
            version=version,
            num_groups=GROUPS_PER_STEP,
            share=share,
            num_shares=2,
            timeout_s=60,
        )
        for share in range(2)
    ]


async def _train(buffer: Buffer, step: int, version: int) -> frozenset[str]:
    """A whole step; ids of what was trained."""
    leases = await _lease(buffer, step, version)
    assert leases[0].group_ids == leases[1].group_ids
    mine = [group.group_id for lease in leases for group in lease.groups]
    assert sorted(mine) == sorted(leases[0].group_ids)
    assert await buffer.renew(leases[0]) == GROUPS_PER_STEP
    valid = await buffer.validate(leases[0], version)
    assert await buffer.consume(leases[0], valid) == len(valid) == GROUPS_PER_STEP
    assert await buffer.consume(leases[0], valid) == len(valid)  # a retry counts nothing twice
    await buffer.announce_version(version + 1)
    return valid


async def _scenario(buffer: Buffer, other: Buffer) -> None:
    """`buffer` is the trainer's, `other` a rollout worker's."""
    # A lease waits for what a producer pushes a moment later.
    waiting = asyncio.create_task(_train(buffer, 0, 0))
    await asyncio.sleep(0.1)
    first = await _produce(other, "first", 0, GROUPS_PER_STEP)
    assert await waiting == frozenset(first)

    # A group is stopped, and its prompt runs again.
    credit = await other.admit("stopped", 60)
    await other.abandon(credit.group_id, "stale", Rerun.as_stale, PromptRef(task="sums", index=7))
    retry = await next_retry(other)
    assert retry is not None and (retry.index, retry.attempt) == (7, 1)

    # A batch goes back, and is leased again.
    second = await _produce(other, "second", 1, GROUPS_PER_STEP)
    lost = (await _lease(buffer, 1, 1))[0]
    assert await buffer.nack(lost, "test") == GROUPS_PER_STEP
    assert await buffer.consume(lost, lost.group_ids) == 0
    assert await buffer.validate(lost, 1) == frozenset()
    assert await _train(buffer, 1, 1) == frozenset(second)

    # A trainer restores the checkpoint of step 0: what came after it is trained again.
    reconciled = await other.reconcile("lineage-b", step=0, version=1, resume_version=3)
    assert (reconciled.acked, reconciled.requeued) == (GROUPS_PER_STEP, GROUPS_PER_STEP)
    with pytest.raises(NotOwnerError):
        await buffer.ack(1, "lineage-a")
    assert await _train(other, 1, 3) == frozenset(second)
    assert await other.ack(1, "lineage-b") == GROUPS_PER_STEP

    # The leash gets shorter: what is too old is dropped.
    await _produce(other, "third", 3, 2)
    assert (await other.stats()).by_staleness == {1: 2}
    await other.change_settings({"max_staleness": 0})
    assert (await buffer.get_leash()).max_staleness == 0
    assert await other.sweep() == 2

    stats = await other.stats()
    assert stats.is_conserved
    assert (stats.pushed, stats.acked) == (2 * GROUPS_PER_STEP + 2, 2 * GROUPS_PER_STEP)
    assert (stats.ready, stats.leased, stats.consumed, stats.dropped["stale"]) == (0, 0, 0, 2)
    assert await find_violations(other) == []
    told = [event.event for event in await other.events(second[0])]
    assert told[:3] == ["admitted", "pushed", "leased"] and told[-1] == "acked"
    assert await other.flush(timeout_s=60)


@pytest.mark.parametrize("shards", [1, 3])
async def test_every_verb_works_on_one_server(
    url: str, shards: int, open_buffer: OpenBuffer
) -> None:
    run = f"conformance-{shards}"
    settings = {"shards": shards, "max_staleness": 2, "lease_timeout_s": 60.0}
    trainer = await open_buffer(url, run, **settings)
    worker = await open_buffer(url, run, **settings)
    await asyncio.wait_for(_scenario(trainer, worker), 180)


async def test_poison_goes_to_quarantine_and_comes_back(url: str, open_buffer: OpenBuffer) -> None:
    buffer = await open_buffer(url, "poison", max_attempts=1)
    ids = await _produce(buffer, "bad", 0, GROUPS_PER_STEP)
    await buffer.nack((await _lease(buffer, 0, 0))[0], "test")
    assert {group.group_id for group in await buffer.quarantined()} == set(ids)
    assert await buffer.discard(ids[0])
    assert await buffer.release(ids[1])
    stats = await buffer.stats()
    assert (stats.ready, stats.quarantined) == (1, GROUPS_PER_STEP - 2)
    assert await find_violations(buffer) == []


async def test_every_verb_works_on_a_cluster(
    cluster: list[EmbeddedServer], open_buffer: OpenBuffer
) -> None:
    run = _run_on_all_nodes("verbs")
    settings = {"shards": NUM_NODES, "max_staleness": 2, "lease_timeout_s": 60.0}
    trainer = await open_buffer(cluster[1].url, run, **settings)
    worker = await open_buffer(cluster[2].url, run, **settings)
    await asyncio.wait_for(_scenario(trainer, worker), 180)
    for node in cluster:  # each has its part
        with blocking_redis.Redis.from_url(node.url) as client:
            assert client.keys(f"{{leash:{run}*") != []


async def test_run_state_works_on_a_cluster(
    cluster: list[EmbeddedServer], open_buffer: OpenBuffer
) -> None:
    run = _run_on_all_nodes("notes")
    await open_buffer(cluster[0].url, run, shards=NUM_NODES)
    state = RunState(await connect(cluster[2].url), run, shards=NUM_NODES)
    await state.record_commits({"engine-0": 0})
    await state.append_metrics({"loss": 1.0}, "train")
    assert [entry.record for entry in await state.read_metrics("0-0", 1)] == [{"loss": 1.0}]
    assert await state.engine_versions() == {"engine-0": 0}
    await state.set_phase("testing")
    assert await state.phase() == "testing"
    await state.close()


async def test_killed_node_that_returns_loses_nothing(
    cluster: list[EmbeddedServer], open_buffer: OpenBuffer
) -> None:
    run = _run_on_all_nodes("restart")
    for node in cluster:  # with `everysec` a node that waits for its disk answers before it writes
        with blocking_redis.Redis.from_url(node.url) as client:
            client.config_set("appendfsync", "always")
    settings = {"shards": NUM_NODES, "max_staleness": 20, "lease_timeout_s": 60.0}
    trainer = await open_buffer(cluster[0].url, run, **settings)
    worker = await open_buffer(cluster[1].url, run, **settings)
    num_steps = 8

    async def produce() -> None:
        for step in range(num_steps):
            for index in range(GROUPS_PER_STEP):
                name = f"group-{step}-{index}"
                credit = await worker.admit(name, 60)
                await worker.push(make_group(credit.group_id, credit.version, index=index), 60)
            await asyncio.sleep(0.1)

    async def train() -> list[frozenset[str]]:
        trained = []
        for step in range(num_steps):
            lease = await lease_batch(trainer, step, GROUPS_PER_STEP, version=step, timeout_s=60)
            valid = await trainer.validate(lease, step)
            assert await trainer.consume(lease, valid) == len(valid)
            assert await trainer.ack(step) == len(valid)
            await trainer.announce_version(step + 1)
            trained.append(valid)
        return trained

    async def kill_one() -> None:
        for node in cluster:
            await asyncio.sleep(0.2)
            os.kill(node.pid, signal.SIGKILL)
            await asyncio.to_thread(node.wait, 60)
            await asyncio.to_thread(node.restart)

    _, trained, _ = await asyncio.wait_for(asyncio.gather(produce(), train(), kill_one()), 300)
    ids = [group_id for step in trained for group_id in step]
    assert len(ids) == len(set(ids))
    assert not await worker.flush(timeout_s=60)  # servers were restarted: it cannot say so
    assert await worker.flush(timeout_s=60)
    stats = await trainer.stats()
    assert stats.is_conserved
    assert stats.pushed == num_steps * GROUPS_PER_STEP
    assert await find_violations(trainer) == []


@pytest.mark.slow
async def test_prompts_survive_a_primary_whose_replica_takes_over(
    cluster: list[EmbeddedServer],
    open_buffer: OpenBuffer,
    program: Path,
    tmp_path: Path,
) -> None:
    replica = _start_node(tmp_path, program)
    try:
        run = _run_on_all_nodes("failover")
        lost = cluster[0]
        await asyncio.to_thread(_follow, replica, lost)
        worker = await open_buffer(cluster[1].url, run, shards=NUM_NODES, max_staleness=20)
        await worker.announce_version(0)
        ids = [(await worker.admit(f"0-{index}", 60)).group_id for index in range(60)]
        for index, group_id in enumerate(ids):
            await worker.begin(group_id, PromptRef(task="sums", index=index), 0, index)
        await asyncio.to_thread(_wait_for_replica, lost)
        # What is pushed now does not reach it: 13 MB do not fit into the sockets' buffers.
        os.kill(replica.pid, signal.SIGSTOP)
        groups = [
            make_group(name, num_tokens=40_000, index=index) for index, name in enumerate(ids)
        ]
        assert set(await asyncio.gather(*map(worker.push, groups))) == {PushResult.stored}
        os.kill(lost.pid, signal.SIGKILL)
        os.kill(replica.pid, signal.SIGCONT)
        assert not await worker.flush(timeout_s=60)
        stats = await worker.stats()
        assert stats.running > 0 and stats.ready + stats.running == 60 and stats.is_conserved
        assert await worker.reclaim(0) == stats.running
        prompts = [await next_retry(worker) for _ in range(stats.running)]
        assert all(prompt is not None and prompt.reruns == 0 for prompt in prompts)
        assert await find_violations(worker) == []
    finally:
        replica.stop(timeout_s=60)


def _follow(replica: EmbeddedServer, primary: EmbeddedServer) -> None:
    with (
        blocking_redis.Redis.from_url(replica.url, decode_responses=True) as client,
        blocking_redis.Redis.from_url(primary.url, decode_responses=True) as leader,
    ):
        client.execute_command("CLUSTER MEET", HOST, urlsplit(primary.url).port)
        leader_id = leader.execute_command("CLUSTER MYID")
        deadline = time.monotonic() + 120
        while True:
            try:
                client.execute_command("CLUSTER REPLICATE", leader_id)
                return
            except blocking_redis.ResponseError:  # does not know it yet
                assert time.monotonic() < deadline, "the replica did not meet its primary"
                time.sleep(0.05)


def _wait_for_replica(primary: EmbeddedServer) -> None:
    """Until it has all that was written so far."""
    with blocking_redis.Redis.from_url(primary.url) as client:
        written = client.info("replication")["master_repl_offset"]
        deadline = time.monotonic() + 120
        while client.info("replication").get("slave0", {}).get("offset", -1) < written:
            assert time.monotonic() < deadline, "the replica did not follow"
            time.sleep(0.05)
