"""Buffers on a real server for the commands on a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from buffer.connect import Buffer, buffer_on
from buffer.redis.connection import connect
from configs.schema import BufferConfig
from tests.support.buffer.groups import lease_batch, make_group

Command = Callable[..., str]
"""The fixture `leash`."""


@asynccontextmanager
async def opened(
    url: str, run: str, groups_per_step: int = 4, **settings: object
) -> AsyncIterator[Buffer]:
    """The buffer of `run`, open for the length of a block; `settings` are of BufferConfig."""
    config = BufferConfig(**settings)  # type: ignore[arg-type]
    buffer = buffer_on(await connect(url), run, config)
    try:
        await buffer.open(config, groups_per_step=groups_per_step)
        yield buffer
    finally:
        await buffer.close()


async def fill(url: str, run: str, *, pushed: int = 0, leased: int = 0, **settings: object) -> None:
    """Opens the buffer, pushes group-0, group-1, ... and leases the first of them."""
    async with opened(url, run, max(leased, 4), **settings) as buffer:
        for number in range(pushed):
            await buffer.push(make_group(f"group-{number}"))
        if leased:
            await lease_batch(buffer, num_groups=leased)
