"""Groups to push, and buffers that check all invariants after each of their verbs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.redis.connection import connect
from buffer.replay_buffer import ReplayBuffer
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.schema import BufferConfig
from tests.support.invariants import find_violations

sys.path.insert(0, str(Path(__file__).parent))  # for plain_buffer

GroupMaker = Callable[..., TrajectoryGroup]


def _group(
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
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt_length] = 0
    spans = [VersionSpan(version=version, start=prompt_length, end=num_tokens)]
    if newest is not None and newest != version:  # the last two tokens, after a commit
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


@pytest.fixture(scope="session")
def make_group() -> GroupMaker:
    """`make_group("id", version)`: a small valid group sampled wholly by that version.

    With `newest=` the last two tokens of each trajectory are by that version.
    """
    return _group


def _checked(verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(self: ReplayBuffer, *args: Any, **kwargs: Any) -> Any:
        result = await verb(self, *args, **kwargs)
        stats = await self.stats()
        assert stats.is_conserved, stats
        assert await find_violations(self) == []
        return result

    return call


class CheckedBuffer(ReplayBuffer):
    """Asserts after each verb that no group was lost or doubled."""

    admit = _checked(ReplayBuffer.admit)
    abandon = _checked(ReplayBuffer.abandon)
    begin = _checked(ReplayBuffer.begin)
    fail = _checked(ReplayBuffer.fail)
    reclaim = _checked(ReplayBuffer.reclaim)
    push = _checked(ReplayBuffer.push)
    take_retry = _checked(ReplayBuffer.take_retry)
    lease = _checked(ReplayBuffer.lease)
    validate = _checked(ReplayBuffer.validate)
    consume = _checked(ReplayBuffer.consume)
    ack = _checked(ReplayBuffer.ack)
    nack = _checked(ReplayBuffer.nack)
    renew = _checked(ReplayBuffer.renew)
    renew_credits = _checked(ReplayBuffer.renew_credits)
    reconcile = _checked(ReplayBuffer.reconcile)
    release = _checked(ReplayBuffer.release)
    discard = _checked(ReplayBuffer.discard)
    sweep = _checked(ReplayBuffer.sweep)
    publish_version = _checked(ReplayBuffer.publish_version)
    set_max_staleness = _checked(ReplayBuffer.set_max_staleness)


@pytest.fixture
async def checked_buffer(
    redis_url: str, run_name: str
) -> AsyncIterator[Callable[..., Awaitable[CheckedBuffer]]]:
    """Like `buffer_factory`, with the law checked after every verb."""
    opened: list[CheckedBuffer] = []

    async def make(groups_per_step: int = 4, **settings: Any) -> CheckedBuffer:
        config = BufferConfig(**settings)
        buffer = CheckedBuffer(
            await connect(redis_url),
            run_name,
            lease_timeout_s=config.lease_timeout_s,
            shards=config.shards,
            wait_timeout_s=config.wait_timeout_s,
            compress=config.compress,
        )
        opened.append(buffer)
        await buffer.open(config, groups_per_step)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()
