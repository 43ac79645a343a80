from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from tests.support.endpoint_scene import Scene


@pytest.fixture(scope="session", autouse=True)
def first_client():
    """The first client of a process takes seconds to make, which are no test's."""
    AsyncOpenAI(api_key="none")


@pytest.fixture
async def make_scene():
    made = []

    async def make(**settings):
        scene = Scene(**settings)
        made.append(scene)
        await scene.open()
        return scene

    yield make
    for scene in made:
        await scene.close()


@pytest.fixture
async def scene(make_scene):
    return await make_scene()
