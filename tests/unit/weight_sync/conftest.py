from collections.abc import AsyncIterator, Iterator
from unittest.mock import patch

import pytest
import pytest_asyncio

from tests.support.weights.forked_receivers import ForkedChild
from tests.support.weights.scene import Receivers
from weight_sync.receiver import process


@pytest.fixture(scope="module", autouse=True)
def fork_receivers() -> Iterator[None]:
    with patch.object(process, "Child", ForkedChild):
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receivers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Receivers]:
    receivers = Receivers(tmp_path_factory.mktemp("receivers"))
    yield receivers
    await receivers.close()
