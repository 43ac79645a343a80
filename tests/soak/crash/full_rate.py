"""Producers and a trainer that run at full rate and clean up after themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from threading import BrokenBarrierError
from typing import Any
from uuid import uuid4

import numpy as np

from buffer.connect import Buffer
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from tests.soak.crash.scenario import Scenario

NUM_TOKENS = 1024
GROUP_SIZE = 4
_LEASE_S = 60.0


def produce(scenario: Scenario, number: int, is_over: Any) -> None:
    """Runs until `is_over` (a multiprocessing event) is set."""
    asyncio.run(_produce(scenario, number, is_over))


def train(scenario: Scenario, rank: int, barrier: Any, is_over: Any) -> None:
    """One of two ranks; rank 0 consumes and acknowledges. They meet at `barrier` in every step."""
    asyncio.run(_train(scenario, rank, barrier, is_over))


async def _produce(scenario: Scenario, number: int, is_over: Any) -> None:
    buffer = await scenario.buffer()
    trajectory = _trajectory()

    async def one_after_the_other(worker: int) -> None:
        life, count = uuid4().hex[:8], 0
        while not is_over.is_set():
            count += 1
            admission = await buffer.admit(f"{life}-{number}-{worker}-{count}", _LEASE_S)
            await buffer.push(_group(admission.group_id, admission.version, trajectory))

    async with asyncio.TaskGroup() as group:
        for worker in range(scenario.in_flight):
            group.create_task(one_after_the_other(worker))
    await buffer.close()


async def _train(scenario: Scenario, rank: int, barrier: Any, is_over: Any) -> None:
    buffer = await scenario.buffer()
    step = 0
    if rank == 0:
        await buffer.reconcile("rate", step=0, version=0, resume_version=0)
    await asyncio.to_thread(barrier.wait, 60)
    while not is_over.is_set():
        if not await _step(buffer, scenario, rank, step, barrier):
            break
        step += 1
    barrier.abort()  # the other rank may wait in it
    await buffer.close()


async def _step(buffer: Buffer, scenario: Scenario, rank: int, step: int, barrier: Any) -> bool:
    """Whether the ranks are still in step; False if the run ended in the middle of one."""
    try:
        lease = await buffer.lease(
            step=step + 1,
            version=step,
            num_groups=scenario.groups_per_step,
            share=rank,
            num_shares=scenario.num_ranks,
            timeout_s=30.0,
        )
        await asyncio.to_thread(barrier.wait, 60)
        if rank == 0:
            kept = await buffer.validate(lease, step)
            await buffer.consume(lease, kept)
            await buffer.announce_version(step + 1)
            await buffer.ack(step + 1, "rate")
        await asyncio.to_thread(barrier.wait, 60)
    except (TimeoutError, BrokenBarrierError):
        return False
    return True


def _trajectory() -> Trajectory:
    dice = np.random.default_rng(0)
    mask = np.ones(NUM_TOKENS, np.uint8)
    mask[:128] = 0
    return Trajectory(
        tokens=dice.integers(0, 150_000, NUM_TOKENS).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, dice.random(NUM_TOKENS), 0).astype(np.float32),
        version_spans=(VersionSpan(version=0, start=128, end=NUM_TOKENS),),
        prompt_length=128,
        reward=1.0,
        finish_reason="stop",
    )


def _group(group_id: str, version: int, like: Trajectory) -> TrajectoryGroup:
    spans = tuple(replace(span, version=version) for span in like.version_spans)
    return TrajectoryGroup(
        group_id=group_id,
        prompt=PromptRef(task="rate", index=0),
        trajectories=(replace(like, version_spans=spans),) * GROUP_SIZE,
    )
