"""`make tune`: changes a live setting of a running job through its Redis."""

from __future__ import annotations

import asyncio

from buffer.connection import connect
from buffer.replay_buffer import ReplayBuffer
from controller.run_dir import RunDir, RunDirError


def set_max_staleness(run_dir: RunDir, value: int) -> None:
    """Takes effect at the next lease and the next admission. Raises RunDirError or ValueError."""
    url = run_dir.read_redis_url()
    if url is None or not run_dir.read_record().is_alive:
        raise RunDirError(f"{run_dir.name} does not run, so there is nothing to tune")
    before = asyncio.run(_set(url, run_dir.name, value))
    print(f"{run_dir.name}: max_staleness {before} -> {value}")


async def _set(url: str, run: str, value: int) -> int:
    redis = await connect(url)
    buffer = ReplayBuffer(redis, run, lease_timeout_s=1.0)  # it leases nothing
    try:
        before = await buffer.get_max_staleness()
        await buffer.set_max_staleness(value)
        return before
    finally:
        await buffer.close()
