"""`make tune`: changes a live setting of a running job through its Redis."""

from __future__ import annotations

import asyncio

from configs.load import read_config
from configs.schema import BufferConfig
from controller.buffer_access import BufferAddress, opened
from controller.run_dir import RunDir, RunDirError


def set_max_staleness(run_dir: RunDir, max_staleness: int) -> None:
    """Takes effect at the next lease and the next admission. Raises RunDirError or ValueError."""
    BufferConfig(max_staleness=max_staleness)  # rejects what a launch would
    url = run_dir.read_redis_url()
    if url is None or not run_dir.read_record().is_alive:
        raise RunDirError(f"{run_dir.name} is not running, so there is nothing to tune")
    settings = read_config(run_dir.path / "config.yaml").buffer
    address = BufferAddress(url=url, run=run_dir.name, settings=settings)
    before = asyncio.run(_set(address, max_staleness))
    print(f"{run_dir.name}: max_staleness {before} -> {max_staleness}")


async def _set(address: BufferAddress, value: int) -> int:
    async with opened(address) as buffer:
        before = await buffer.get_max_staleness()
        await buffer.set_max_staleness(value)
        return before
