"""Plays verl's message queue: an asyncio Ray actor with a deque of pickled groups.

Producers and consumers are Ray actors too. As in verl (verl/experimental/fully_async_policy) a
group is a dict of padded int64 tensors made by cloudpickle, many groups are put at once, and a
consumer gets one after the other (`get_sample_sync` in a loop). A `lean` queue holds our own groups
of numpy arrays instead, an eighth of the bytes or so, and its consumers ask for many at once: the
best that such a queue can be made to do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import numpy as np
import ray

from benchmarks.replay_buffer.groups import GroupMaker
from benchmarks.team import IN_FLIGHT, Round, in_flight
from buffer.types import TrajectoryGroup

_ROUND_S = 300.0


class _Queue:
    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self._arrived = asyncio.Condition()

    async def put(self, item: bytes) -> None:
        async with self._arrived:
            self._items.append(item)
            self._arrived.notify()

    async def get(self) -> bytes:
        async with self._arrived:
            while not self._items:
                await self._arrived.wait()
            return self._items.popleft()

    async def cpu_s(self) -> float:
        return time.process_time()


class _Client:
    def __init__(self, queue: Any, num_tokens: int) -> None:
        self._queue = queue
        self._maker = GroupMaker(num_tokens)
        self._tensors = _padded_tensors(self._maker.make("group"))

    async def produce(self, num_groups: int, is_lean: bool) -> float:
        async def put(number: int) -> None:
            group = self._maker.make(f"group-{number}") if is_lean else self._tensors
            await self._queue.put.remote(ray.cloudpickle.dumps(group))

        before = time.process_time()
        await in_flight(put, num_groups)
        return time.process_time() - before

    async def consume(self, num_groups: int, is_lean: bool) -> float:
        async def get(number: int) -> None:
            assert ray.cloudpickle.loads(await self._queue.get.remote())

        before = time.process_time()
        await in_flight(get, num_groups, IN_FLIGHT if is_lean else 1)
        return time.process_time() - before


def _padded_tensors(group: TrajectoryGroup) -> dict[str, Any]:
    """The group as verl's agent loop hands it on: [n, T] tensors of 8 bytes a number."""
    import torch  # takes seconds, and only clients of Ray's queue need it

    tokens = torch.stack([torch.from_numpy(t.tokens.astype(np.int64)) for t in group.trajectories])
    mask = torch.stack([torch.from_numpy(t.loss_mask.astype(np.int64)) for t in group.trajectories])
    logprobs = torch.stack([torch.from_numpy(t.rollout_logprobs) for t in group.trajectories])
    prompt_length = group.trajectories[0].prompt_length
    return {
        "prompts": tokens[:, :prompt_length].clone(),
        "responses": tokens[:, prompt_length:].clone(),
        "response_mask": mask[:, prompt_length:].clone(),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(tokens.shape[1]).repeat(len(tokens), 1),
        "rollout_log_probs": logprobs[:, prompt_length:].clone(),
        "rm_scores": torch.zeros_like(logprobs[:, prompt_length:]),
    }


class RayTeam:
    """Like `Team`, for the Ray queue. Wants a Ray that is started."""

    def __init__(self, queue: Any, clients: list[Any], *, is_lean: bool) -> None:
        self._queue, self._clients, self._is_lean = queue, clients, is_lean

    def play(self, num_groups: int) -> Round:
        middle = ray.get(self._queue.cpu_s.remote())
        began = time.perf_counter()
        share = (num_groups // 2, self._is_lean)
        calls = [each.produce.remote(*share) for each in self._clients[:2]]
        calls += [each.consume.remote(*share) for each in self._clients[2:]]
        cpu_s = ray.get(calls, timeout=_ROUND_S)
        seconds = time.perf_counter() - began
        return Round(
            num_groups=num_groups,
            seconds=seconds,
            producer_cpu_s=sum(cpu_s[:2]),
            consumer_cpu_s=sum(cpu_s[2:]),
            middle_cpu_s=ray.get(self._queue.cpu_s.remote()) - middle,
        )

    def close(self) -> None:
        for actor in [*self._clients, self._queue]:
            ray.kill(actor)


def ray_teams(num_tokens: int) -> dict[str, RayTeam]:
    """Both kinds of queue, which take turns with the same actors."""
    queue = ray.remote(_Queue).options(num_cpus=0, max_concurrency=1000).remote()
    client = ray.remote(_Client).options(num_cpus=0, max_concurrency=1000)
    clients = [client.remote(queue, num_tokens) for _ in range(4)]
    return {
        "ray queue": RayTeam(queue, clients, is_lean=False),
        "lean ray queue": RayTeam(queue, clients, is_lean=True),
    }
