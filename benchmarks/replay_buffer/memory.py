"""Part MEMORY: what a group costs at the server beyond its payload.

Without the audit stream, which has a bound of its own however many groups there are.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

from redis.asyncio import Redis

from benchmarks.replay_buffer.groups import GroupMaker
from benchmarks.replay_buffer.stage import Sizes, Stage, open_buffer
from benchmarks.report import Report
from benchmarks.team import in_flight
from buffer.replay_buffer import ReplayBuffer
from configs.schema import BufferConfig


def measure_memory(report: Report, stage: Stage, sizes: Sizes) -> None:
    report.say("memory")

    async def measure() -> float:
        return max(
            await _ratio(report, stage, sizes, sizes.memory_groups, num_tokens=1024, size=8),
            await _ratio(report, stage, sizes, sizes.tiny_groups, num_tokens=8, size=1),
        )

    report.target(
        "memory_ratio",
        asyncio.run(measure()),
        "<=",
        1,
        "used_memory over 1.1 x payload + 400 B a group, worst of both",
    )


async def _ratio(
    report: Report, stage: Stage, sizes: Sizes, num_groups: int, *, num_tokens: int, size: int
) -> float:
    """Used memory over what may be used: 1.1 times the payload and 400 bytes a group.

    used_memory has the server's own tables in it, which used_memory_dataset leaves out.
    """
    run = f"memory-{uuid4().hex[:8]}"
    buffer = await open_buffer(stage.url, run, 8, BufferConfig(audit_length=0))
    redis = Redis.from_url(stage.url)
    maker = GroupMaker(num_tokens, size)
    await _push_all(buffer, maker, 64)  # scripts, connections and the first tables
    before = await _bytes(buffer, redis, sizes.settle_s)
    await _push_all(buffer, maker, num_groups)
    after = await _bytes(buffer, redis, sizes.settle_s)
    await buffer.close()
    await redis.aclose()
    payload, used, dataset = (b - a for a, b in zip(before, after, strict=True))
    ratio = used / (1.1 * payload + 400 * num_groups)
    report.row(
        f"{num_groups} groups of {size} x {num_tokens} tokens: payload bytes a group; used beyond "
        "it; used_memory_dataset beyond it; used over what may be",
        f"{payload / num_groups:.0f}; {(used - payload) / num_groups:.0f}; "
        f"{(dataset - payload) / num_groups:.0f}; {ratio:.3f}",
    )
    return ratio


async def _push_all(buffer: ReplayBuffer, maker: GroupMaker, num_groups: int) -> None:
    async def push(number: int) -> None:
        # As long as the ids that a rollout worker gives.
        await buffer.push(maker.make(f"{uuid4().hex[:12]}-0-{uuid4().hex[:4]}"))

    await in_flight(push, num_groups)


async def _bytes(buffer: ReplayBuffer, redis: Redis, settle_s: float) -> tuple[int, int, int]:
    """Returns the bytes of the payloads; used_memory without the buffers of clients and of the
    append-only file; and used_memory_dataset."""
    await asyncio.sleep(settle_s)
    memory = await redis.info("memory")
    buffers = sum(int(memory.get(name, 0)) for name in ("mem_clients_normal", "mem_aof_buffer"))
    used, dataset = int(memory["used_memory"]) - buffers, int(memory["used_memory_dataset"])
    return (await buffer.stats()).bytes, used, dataset
