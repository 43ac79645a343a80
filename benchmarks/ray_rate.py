"""What verl's message queue is: an asyncio Ray actor with a deque of pickled groups.

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

import ray

from benchmarks.groups import GroupMaker, padded_tensors
from benchmarks.team import IN_FLIGHT, Round

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
    def __init__(self, queue: Any, num_tokens: int, is_lean: bool) -> None:
        self._queue = queue
        self._gets_in_flight = IN_FLIGHT if is_lean else 1
        self._is_lean = is_lean
        self._maker = GroupMaker(num_tokens)
        self._tensors = padded_tensors(self._maker.make("group"))

    async def ready(self) -> None:
        return None

    async def produce(self, num_groups: int) -> float:
        async def put(number: int) -> None:
            group = self._maker.make(f"group-{number}") if self._is_lean else self._tensors
            await self._queue.put.remote(ray.cloudpickle.dumps(group))

        return await _in_flight(put, num_groups, IN_FLIGHT)

    async def consume(self, num_groups: int) -> float:
        async def get(number: int) -> None:
            assert ray.cloudpickle.loads(await self._queue.get.remote())

        return await _in_flight(get, num_groups, self._gets_in_flight)


async def _in_flight(call: Any, num_groups: int, at_once: int) -> float:
    """CPU seconds of so many calls."""
    before = time.process_time()
    numbers = iter(range(num_groups))

    async def one_after_the_other() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return time.process_time() - before


class RayTeam:
    """Like `Team`, for the Ray queue. Wants a Ray that is started."""

    def __init__(self, num_tokens: int, *, is_lean: bool) -> None:
        self._queue = ray.remote(_Queue).options(num_cpus=0, max_concurrency=1000).remote()
        client = ray.remote(_Client).options(num_cpus=0, max_concurrency=1000)
        self._clients = [client.remote(self._queue, num_tokens, is_lean) for _ in range(4)]
        ray.get([each.ready.remote() for each in self._clients], timeout=_ROUND_S)

    def play(self, num_groups: int) -> Round:
        middle = ray.get(self._queue.cpu_s.remote())
        began = time.perf_counter()
        calls = [each.produce.remote(num_groups // 2) for each in self._clients[:2]]
        calls += [each.consume.remote(num_groups // 2) for each in self._clients[2:]]
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
