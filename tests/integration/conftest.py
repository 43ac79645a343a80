"""Two real SGLang servers that all tests of a session share, and the models that they serve."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from configs.choices import PauseMode
from tests.support.sglang_model import Server, build_model


@pytest.fixture(scope="session")
def sglang_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def models(sglang_folder):
    return {name: build_model(sglang_folder / name, seed) for seed, name in enumerate("ab")}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(sglang_folder, models):
    """The first has a prefix cache. What they serve, if anything, earlier tests left."""
    modes = (PauseMode.resubmit, PauseMode.retract)
    both = [Server(sglang_folder, f"engine-{i}", mode) for i, mode in enumerate(modes)]
    await asyncio.gather(*(server.start() for server in both))
    yield both
    for server in both:
        await server.close()
    await asyncio.gather(*(server.engine.stop() for server in both))
