"""Groups to push, and buffers that check the law of conservation after each of their verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from buffer.connection import connect
from buffer.replay_buffer import ReplayBuffer
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.schema import BufferConfig

GroupMaker = Callable[..., TrajectoryGroup]


def _group(
    group_id: str,
    version: int = 0,
    *,
    num_tokens: int = 8,
    prompt_length: int = 3,
    size: int = 2,
    index: int = 0,
    attempt: int = 0,
) -> TrajectoryGroup:
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt_length] = 0
    trajectory = Trajectory(
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_spans=(VersionSpan(version=version, start=prompt_length, end=num_tokens),),
        prompt_length=prompt_length,
        reward=1.0,
        finish_reason="stop",
    )
    prompt = PromptRef(task="sums", index=index, attempt=attempt)
    return TrajectoryGroup(group_id=group_id, prompt=prompt, trajectories=(trajectory,) * size)


@pytest.fixture(scope="session")
def make_group() -> GroupMaker:
    """`make_group("id", version)`: a small valid group sampled wholly by that version."""
    return _group


def _checked(verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(self: ReplayBuffer, *args: Any, **kwargs: Any) -> Any:
        result = await verb(self, *args, **kwargs)
        stats = await self.stats()
        assert stats.is_conserved, stats
        return result

    return call


class CheckedBuffer(ReplayBuffer):
    """Asserts after each verb that no group was lost or doubled."""

    admit = _checked(ReplayBuffer.admit)
    abandon = _checked(ReplayBuffer.abandon)
    push = _checked(ReplayBuffer.push)
    take_retry = _checked(ReplayBuffer.take_retry)
    lease = _checked(ReplayBuffer.lease)
    validate = _checked(ReplayBuffer.validate)
    consume = _checked(ReplayBuffer.consume)
    ack = _checked(ReplayBuffer.ack)
    nack = _checked(ReplayBuffer.nack)
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
        redis = await connect(redis_url)
        buffer = CheckedBuffer(redis, run_name, lease_timeout_s=config.lease_timeout_s)
        opened.append(buffer)
        await buffer.open(config, groups_per_step)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()
