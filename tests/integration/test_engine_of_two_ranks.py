"""A real SGLang server of two ranks, each with half of every layer, which commit together."""

from __future__ import annotations

import pytest
import pytest_asyncio

from configs.choices import PauseMode
from rollout_pool.engines.read_back import ReadBack
from tests.support.sglang_model import (
    Server,
    manifest_of,
    sample,
    served_tensors,
    worst_difference,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(sglang_folder, models):
    server = Server(sglang_folder, "engine-of-two", PauseMode.resubmit, tp_size=2)
    await server.start()
    yield server
    await server.close()
    await server.engine.stop()


async def test_all_ranks_take_each_version(server, models):
    read_back = ReadBack(server.engine.client, 60)
    for model in (models["b"], models["a"]):
        await server.publish(model)
        await read_back.read(manifest_of(server.newest, served_tensors(model)))
        ends = await sample(server.engine.client, 8, max_new_tokens=32)
        assert worst_difference(model, ends, 1.0) < 1e-4
        assert {span.version for end in ends for span in end.version_spans} == {server.newest}
