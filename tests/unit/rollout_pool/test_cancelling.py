"""How tasks are ended."""

from __future__ import annotations

import asyncio

from rollout_pool.cancelling import end_tasks


async def test_task_that_swallows_a_cancellation_is_still_ended():
    async def swallow():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks({task}, again_s=0.05)
    assert task.cancelled()
