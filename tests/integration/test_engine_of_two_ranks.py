"""A real SGLang server of two ranks, each with half of every layer, which commit together."""

from __future__ import annotations

import pytest
import pytest_asyncio

from configs.choices import CommitStrategy, PauseMode
from tests.support.sglang_model import Server, sample, worst_difference

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(sglang_folder, models):
    server = Server(sglang_folder, "engine-of-two", PauseMode.resubmit, tp_size=2)
    await server.start()
    yield server
    await server.close()
    await server.engine.stop()


@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_all_ranks_take_each_version(server, models, choice):
    for model in (models["b"], models["a"]):
        await server.publish(model, choice)
        ends = await sample(server.engine.client, 8, max_new_tokens=32)
        assert worst_difference(model, ends, 1.0) < 1e-4
        assert {span.version for end in ends for span in end.version_spans} == {server.newest}
