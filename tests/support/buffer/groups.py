"""Small groups to push, and whole batches for the only rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from buffer.results import Lease, read_prompt
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan


def make_group(
    group_id: str,
    version: int = 0,
    *,
    newest: int | None = None,
    num_tokens: int = 8,
    prompt_length: int = 3,
    size: int = 2,
    index: int = 0,
    attempt: int = 0,
) -> TrajectoryGroup:
    """A valid group of equal trajectories, sampled wholly by that version.

    With `newest` the last two tokens of each trajectory are by that version.
    """
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt_length] = 0
    spans = [VersionSpan(version=version, start=prompt_length, end=num_tokens)]
    if newest is not None and newest != version:
        spans = [
            VersionSpan(version=version, start=prompt_length, end=num_tokens - 2),
            VersionSpan(version=newest, start=num_tokens - 2, end=num_tokens),
        ]
    trajectory = Trajectory(
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_spans=tuple(spans),
        prompt_length=prompt_length,
        reward=1.0,
        finish_reason="stop",
    )
    prompt = PromptRef(task="sums", index=index, attempt=attempt)
    trajectories = tuple(replace(trajectory, episode=i) for i in range(size))
    return TrajectoryGroup(group_id=group_id, prompt=prompt, trajectories=trajectories)


async def lease_batch(
    buffer: Any,
    step: int = 0,
    num_groups: int = 1,
    *,
    version: int = 0,
    share: int = 0,
    num_shares: int = 1,
    min_groups: int | None = None,
    timeout_s: float = 0.0,
) -> Lease:
    """Leases a whole batch for the only rank, or the share of one of several."""
    lease: Lease = await buffer.lease(
        step=step,
        version=version,
        num_groups=num_groups,
        share=share,
        num_shares=num_shares,
        timeout_s=timeout_s,
        min_groups=min_groups,
    )
    return lease


async def train_batch(buffer: Any, step: int = 0, num_groups: int = 1, version: int = 0) -> Lease:
    """Leases and consumes a whole batch."""
    lease = await lease_batch(buffer, step, num_groups, version=version)
    assert await buffer.consume(lease, lease.group_ids) == num_groups
    return lease


async def next_retry(buffer: Any) -> PromptRef | None:
    """Takes the prompt that has waited longest to run again from the buffer; None if none waits."""
    for shard in getattr(buffer, "shards", [buffer]):
        if (text := await shard._redis.lpop(shard.keys("retries"))) is not None:
            return read_prompt(text.decode())
    return None
