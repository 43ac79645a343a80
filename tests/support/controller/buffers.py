"""Buffers on a real server for the commands on a run, and small groups to push to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from buffer.connect import Buffer, buffer_on
from buffer.redis.connection import connect
from buffer.results import Lease
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.schema import BufferConfig

Command = Callable[..., str]
"""The fixture `leash`."""


def small_group(group_id: str, version: int = 0, num_tokens: int = 8) -> TrajectoryGroup:
    """Two equal trajectories sampled wholly by one version."""
    mask = np.ones(num_tokens, np.uint8)
    mask[:3] = 0
    trajectory = Trajectory(
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_spans=(VersionSpan(version=version, start=3, end=num_tokens),),
        prompt_length=3,
        reward=1.0,
        finish_reason="stop",
    )
    prompt = PromptRef(task="sums", index=0)
    both = (trajectory, replace(trajectory, episode=1))
    return TrajectoryGroup(group_id=group_id, prompt=prompt, trajectories=both)


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


async def lease(buffer: Buffer, step: int = 0, num_groups: int = 1) -> Lease:
    """A whole batch for the only rank."""
    return await buffer.lease(
        step=step, version=0, num_groups=num_groups, share=0, num_shares=1, timeout_s=60
    )


async def fill(url: str, run: str, *, pushed: int = 0, leased: int = 0, **settings: object) -> None:
    """Opens the buffer, pushes group-0, group-1, ... and leases the first of them."""
    async with opened(url, run, max(leased, 4), **settings) as buffer:
        for number in range(pushed):
            await buffer.push(small_group(f"group-{number}"))
        if leased:
            await lease(buffer, num_groups=leased)
