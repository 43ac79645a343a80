"""Whether containers of bubblewrap start here: some machines forbid namespaces."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from configs.container_schema import ContainerConfig
from rollout_pool.sandbox.containers import Container, ContainerError


def skip_without_bubblewrap() -> None:
    if obstacle := _obstacle():
        pytest.skip(obstacle)


@cache
def _obstacle() -> str:
    async def start() -> None:
        container = Container(ContainerConfig(), "")
        try:
            await container.start()
            if (ran := await container.run("python3 -c ''")).exit_code:  # what its tests run
                raise ContainerError(ran.text)
        finally:
            await container.close()

    try:
        asyncio.run(start())
    except ContainerError as error:
        return str(error)
    return ""
