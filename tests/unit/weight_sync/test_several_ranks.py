"""Several trainer ranks, each a process with its own shards, publish together to two receivers."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from tests.support.weights import engine_rank
from tests.support.weights.known_weights import cast_weights, scene_layout
from tests.support.weights.memory_board import MemoryBoard
from tests.support.weights.scene import Node, Receivers
from weight_sync.group import open_store

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

LIMIT_S = 60.0


class Ranks:
    """The processes, by their pipes."""

    def __init__(self, num_ranks: int, num_chains: int, timeout_s: float, full_every: int) -> None:
        self.store = open_store("127.0.0.1", LIMIT_S)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([engine_rank.__name__])
        self.processes = []
        self._pipes = []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe()
            place = (rank, num_ranks, num_chains, self.store.port)
            arguments = (*place, timeout_s, full_every, theirs)
            process = context.Process(target=engine_rank.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(mine)

    async def ask(self, rank: int, verb: str, *arguments: object) -> Any:
        return (await self._ask([rank], verb, *arguments))[0]

    async def ask_all(self, verb: str, *arguments: object) -> list[Any]:
        return await self._ask(range(len(self._pipes)), verb, *arguments)

    async def _ask(self, ranks: range | list[int], verb: str, *arguments: object) -> list[Any]:
        for rank in ranks:
            self._pipes[rank].send((verb, *arguments))
        for rank in ranks:
            assert await asyncio.to_thread(self._pipes[rank].poll, LIMIT_S), (rank, verb)
        return [self._pipes[rank].recv() for rank in ranks]

    def close(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


@contextlib.asynccontextmanager
async def scene_of(
    receivers: Receivers, num_ranks: int, *, full_every: int = 1, num_chains: int = 1
) -> AsyncIterator[tuple[Ranks, list[Node]]]:
    ranks = Ranks(num_ranks, num_chains, 10.0, full_every)
    nodes = [Node(await receivers.get(name, 10.0), MemoryBoard()) for name in ("a", "b")]
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        for node in nodes:
            await ranks.ask(0, "register", node.name, node.process.url)
        yield ranks, nodes
    finally:
        ranks.close()
        await asyncio.gather(*(node.close() for node in nodes))


@pytest.mark.parametrize("num_chains", [1, 2])
async def test_shards_of_all_ranks_make_up_each_version(
    receivers: Receivers, num_chains: int
) -> None:
    num_ranks = 3
    layout = scene_layout(num_ranks)
    async with scene_of(receivers, num_ranks, full_every=2, num_chains=num_chains) as (
        ranks,
        nodes,
    ):
        for version in range(3):
            assert await ranks.ask_all("publish", version) == [version] * num_ranks
            await ranks.ask(0, "published", version, LIMIT_S)
            for node in nodes:
                found, expected = await node.weights(version), cast_weights(layout, version)
                assert found.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(found[name], tensor), name
        records = await ranks.ask(0, "records", "publish")
        assert [record["mode"] for record in records] == ["full", "delta", "full"]
        for record in records:
            assert record["num_chains"] == num_chains
            assert 0 < record["fastest_chain_s"] <= record["slowest_chain_s"] <= record["wire_s"]
        assert await ranks.ask_all("close") == [None] * num_ranks


async def test_versions_in_quick_succession_keep_the_ranks_together(receivers: Receivers) -> None:
    async with scene_of(receivers, 2) as (ranks, nodes):
        for version in range(8):
            await ranks.ask_all("publish", version)
        published = await ranks.ask(0, "published", 7, LIMIT_S)
        assert published == sorted(set(published)) and published[-1] == 7
        for node in nodes:
            found, expected = await node.weights(7), cast_weights(scene_layout(2), 7)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def test_rank_that_died_is_named_to_the_others(receivers: Receivers) -> None:
    async with scene_of(receivers, 2) as (ranks, nodes):
        await ranks.ask_all("publish", 0)
        await ranks.ask(0, "published", 0, LIMIT_S)
        await asyncio.gather(*(node.weights(0) for node in nodes))
        ranks.processes[1].kill()
        ranks.processes[1].join()
        error = await ranks.ask(0, "published", 1, LIMIT_S)
        assert "weights cannot be sent: trainer rank 0, sending to rank 1: it is gone" in error
        assert await ranks.ask(0, "publish", 1) == error
        assert (await nodes[0].status()).newest == 0


async def test_rank_that_dies_in_its_chain_publishes_nothing_and_holds_up_no_receiver(
    receivers: Receivers,
) -> None:
    async with scene_of(receivers, 3, num_chains=2) as (ranks, nodes):
        await ranks.ask_all("publish", 0)
        await ranks.ask(0, "published", 0, LIMIT_S)
        await ranks.ask(1, "halt")
        await ranks.ask_all("publish", 1)
        assert await ranks.ask(1, "halted")
        ranks.processes[1].kill()
        error = await ranks.ask(0, "published", 1, LIMIT_S)
        assert "rank 1: it is gone" in error
        for node in nodes:
            status = await node.status()
            assert (status.newest, status.complete) == (0, (0,))
    async with scene_of(receivers, 3, num_chains=2) as (ranks, nodes):
        assert await ranks.ask_all("publish", 2) == [2] * 3
        assert await ranks.ask(0, "published", 2, LIMIT_S) == [2]
        for node in nodes:
            found, expected = await node.weights(2), cast_weights(scene_layout(3), 2)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def test_receiver_that_dies_in_two_chains_costs_the_other_one_epoch(
    receivers: Receivers,
) -> None:
    async with scene_of(receivers, 3, num_chains=2) as (ranks, (victim, survivor)):
        await ranks.ask(1, "halt")
        await ranks.ask_all("publish", 0)
        assert await ranks.ask(1, "halted")
        await victim.die()
        await ranks.ask(1, "go_on")
        assert await ranks.ask(0, "published", 0, LIMIT_S) == [0]
        found, expected = await survivor.weights(0), cast_weights(scene_layout(3), 0)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        (record,) = await ranks.ask(0, "records", "publish")
        assert (record["epoch"], record["num_receivers"]) == (2, 1)


async def test_loss_of_rank_0_publishes_nothing_and_is_reported_by_the_others(
    receivers: Receivers,
) -> None:
    async with scene_of(receivers, 2) as (ranks, nodes):
        await ranks.ask_all("publish", 0)
        await ranks.ask(0, "published", 0, LIMIT_S)
        await asyncio.gather(*(node.weights(0) for node in nodes))
        ranks.processes[0].kill()
        ranks.processes[0].join()
        error = await ranks.ask(1, "publish", 1)
        assert "rank 0: it is gone, or was silent for" in error
        assert [(await node.status()).newest for node in nodes] == [0, 0]
