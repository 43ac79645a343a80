"""Fixtures that start real servers; shared by the tests of all packages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from buffer.connect import Buffer, connect_buffer
from buffer.redis.server import EmbeddedServer
from configs.schema import BufferConfig

BufferFactory = Callable[..., Awaitable[Buffer]]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that share something to one worker: a file, the launches, the SGLang servers.

    The launches come first, since they are the longest group.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            shares_servers = "servers" in getattr(item, "fixturenames", ())
            group = "servers" if shares_servers else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _is_launch(item))


def _is_launch(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("xdist_group")
    return marker is not None and marker.args == ("launches",)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server that all tests of a session or worker share; use a run of your own."""
    folder: Path = tmp_path_factory.mktemp("redis")
    server = EmbeddedServer.start(folder, BufferConfig(), "127.0.0.1", folder / "redis.log")
    yield server.url
    server.stop(timeout_s=10)


@pytest.fixture
def run_name() -> str:
    """A run that no other test uses."""
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
async def buffer_factory(redis_url: str, run_name: str) -> AsyncIterator[BufferFactory]:
    """Opens buffers of this test's run: `await buffer_factory(groups_per_step=4, max_staleness=1)`.

    Keywords are groups_per_step and the fields of BufferConfig. A second call in the same test is
    another client of the same run.
    """
    opened: list[Buffer] = []

    async def make(groups_per_step: int = 4, **settings: object) -> Buffer:
        config = BufferConfig(**settings)  # type: ignore[arg-type]
        buffer = await connect_buffer(redis_url, run_name, config)
        opened.append(buffer)
        await buffer.open(config, groups_per_step)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()
