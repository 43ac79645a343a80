"""Groups to push, and buffers that check all invariants after each of their verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from buffer.connect import Buffer, buffer_on
from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from configs.schema import BufferConfig
from tests.support.invariants import find_violations

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


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[BufferRedis]:
    """A connection to the server beside those of the buffers."""
    client = await connect(redis_url)
    yield client
    await client.aclose()


CHECKED_VERBS = (
    *("admit", "abandon", "begin", "fail", "reclaim", "push", "take_retry", "renew_credits"),
    "keep_tokens",
    *("lease", "validate", "consume", "ack", "nack", "renew", "reconcile", "publish_version"),
    *("release", "discard", "sweep", "change_settings"),
)


def check_verbs(buffer: Any) -> None:
    """From now on each verb of the buffer asserts that no group was lost or doubled."""

    def checked(verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await verb(*args, **kwargs)
            stats = await buffer.stats()
            assert stats.is_conserved, stats
            assert await find_violations(buffer) == []
            return result

        return call

    for name in CHECKED_VERBS:
        setattr(buffer, name, checked(getattr(buffer, name)))


@pytest.fixture
async def checked_buffer(
    redis_url: str, run_name: str
) -> AsyncIterator[Callable[..., Awaitable[Buffer]]]:
    """Like `buffer_factory`, with the law checked after every verb."""
    opened: list[Buffer] = []

    async def make(groups_per_step: int = 4, **settings: Any) -> Buffer:
        config = BufferConfig(**settings)
        buffer = buffer_on(await connect(redis_url), run_name, config)
        check_verbs(buffer)
        opened.append(buffer)
        await buffer.open(config, groups_per_step)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()
