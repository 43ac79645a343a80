import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio

from weight_sync.receiver import process

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside the tests

from forked import ForkedChild
from scene import Receivers


@pytest.fixture(scope="module", autouse=True)
def fork_receivers() -> Iterator[None]:
    with patch.object(process, "Child", ForkedChild):
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receivers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Receivers]:
    receivers = Receivers(tmp_path_factory.mktemp("receivers"))
    yield receivers
    await receivers.close()
