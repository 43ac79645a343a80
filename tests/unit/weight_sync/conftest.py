"""Receiver processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.weights.scene import Receivers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receivers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Receivers]:
    receivers = Receivers(tmp_path_factory.mktemp("receivers"))
    yield receivers
    await receivers.close()
