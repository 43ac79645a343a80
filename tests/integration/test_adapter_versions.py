"""A real SGLang server that serves versions of an adapter beside each other.

CI plays 8 versions under a crowd of requests; LEASH_SOAK_ADAPTER_VERSIONS=500 the long form.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import pytest_asyncio

from buffer.types import SamplingParams
from processes import tree
from rollout_pool.engines.sglang.models import WITH_ADAPTERS, check_adapters
from tests.soak.crash.size import size
from tests.support.adapters import (
    ATTENTION,
    LAYERS,
    AdaptedModel,
    Crowd,
    adapter_server,
    build,
    loaded_versions,
)
from tests.support.sglang_model import make_sample, sample, worst_difference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(0),  # every wait has a bound
    pytest.mark.asyncio(loop_scope="session"),
]

NUM_VERSIONS = size("ADAPTER_VERSIONS", 8)
NUM_SLOTS = 6
NUM_IN_FLIGHT = 16
ENDS_PER_VERSION = 6
"""So a request lives for three versions, and few for more than there are slots."""
NUM_RESCORED = 300
MOST_GROWTH_BYTES = 12 * 2**20
"""Half of what 375 adapters that are never freed would take. Some comes from the KV cache, whose
pages are touched as it fills."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(sglang_folder, models):
    server = adapter_server(sglang_folder, NUM_SLOTS, max_running=8)
    await server.start()
    yield server
    await server.close()
    await server.engine.stop()


@pytest.fixture(scope="module")
def adapted(models):
    return AdaptedModel(models["a"])


async def publish(server, adapted):
    report = await server.publish_tensors(adapted.tensors(server.newest + 1))
    assert (report.version, report.strategy) == (server.newest, "adapter")
    assert report.pause_s == report.stop_s == 0 < report.load_s
    assert await server.engine.client.served_version() == server.newest
    return report.version


async def test_logprobs_are_those_of_the_adapter_of_each_version(server, adapted, models):
    for _ in range(2):
        version = await publish(server, adapted)
        ends = await sample(server.engine.client, 8, max_new_tokens=48)
        assert {span.version for end in ends for span in end.version_spans} == {version}
        assert adapted.worst_difference(ends) < 1e-5
        assert worst_difference(models["a"], ends, 1.0) > 0.1


@pytest.mark.parametrize("served_by", sorted(WITH_ADAPTERS - {"Qwen3ForCausalLM"}))
async def test_logprobs_of_each_class_are_those_of_all_layers_of_its_adapter(served_by, tmp_path):
    """Qwen 3 is that of all other tests here."""
    model = build(served_by, tmp_path / "a")
    layers = ATTENTION if hasattr(model.config, "num_experts_per_tok") else LAYERS
    check_adapters("a", layers, model, layers)
    adapted, server = AdaptedModel(model, layers), adapter_server(tmp_path, 3, 8, layers)
    ends = []
    try:
        await server.start()
        for _ in range(2):
            await publish(server, adapted)
            ends += await sample(server.engine.client, 6, max_new_tokens=32)
        await server.close()
    finally:
        await server.engine.stop()
    assert adapted.worst_difference(ends) < 1e-4
    # It would be seen if the engine left one of them out.
    for adapted.without in layers:
        assert adapted.worst_difference(ends) > 1e-2, adapted.without


async def test_requests_end_under_the_version_that_they_began_with(server, adapted):
    """While others come, and every third is aborted: slots and memory stay as they are."""
    crowd, first, sizes = Crowd(server.engine.client, NUM_IN_FLIGHT), server.newest, []
    for _ in range(NUM_VERSIONS):
        for _ in range(ENDS_PER_VERSION):
            await asyncio.wait_for(crowd.turn.acquire(), timeout=60)
        await publish(server, adapted)
        assert len(await loaded_versions(server)) <= NUM_SLOTS
        sizes.append(num_bytes(server))
    await crowd.leave()
    versions = {span.version for end in crowd.ended for span in end.version_spans}
    assert len(versions) > NUM_VERSIONS / 2 and min(versions) == first
    assert crowd.num_aborted > 0
    kept = sum(len(end.version_spans) == 1 for end in crowd.ended)
    growth = max(sizes[-len(sizes) // 4 :]) - max(sizes[: len(sizes) // 4 + 1])
    print(
        f"{NUM_VERSIONS} versions: {len(crowd.ended)} requests ended, {kept} of them under one, "
        f"{crowd.num_aborted} were aborted; the server's memory grew by {growth / 2**20:.1f} MiB"
    )
    assert kept > 0.9 * len(crowd.ended)
    assert adapted.worst_difference(crowd.ended[-NUM_RESCORED:]) < 1e-5
    assert growth < MOST_GROWTH_BYTES or NUM_VERSIONS < 100
    for _ in range(2):  # no request uses those before, not even one that was aborted in the queue
        await publish(server, adapted)
    assert await loaded_versions(server) == {server.newest - 1, server.newest}


def num_bytes(server):
    family = tree.family(server.engine.info.pid)
    return sum(process.memory_info().rss for process in family)


@dataclass(kw_only=True, slots=True, frozen=True)
class Endless(SamplingParams):
    """No token ends the answer, which holds its version's slot until it has its length."""

    ignore_eos: bool = True


async def test_requests_of_the_oldest_version_are_sent_again_where_slots_would_run_out(
    server, adapted
):
    client, calls, ends = server.client(1), [], []
    await publish(server, adapted)
    async with asyncio.timeout(120):
        for index in range(NUM_SLOTS + 2):
            end, begun = make_sample(index, max_new_tokens=1000), asyncio.Event()
            end.sampling = Endless()
            ends.append(end)
            calls.append(asyncio.create_task(client.generate_tokens(end, f"{index}", begun.set)))
            await begun.wait()
            await publish(server, adapted)
        await asyncio.gather(*calls)
    await client.close()
    moved = [len(end.version_spans) > 1 for end in ends]
    assert moved[0] and not moved[-1], [end.version_spans for end in ends]
    assert adapted.worst_difference(ends) < 1e-5
