"""What a group costs at the server beyond its payload."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import uuid4

from redis.asyncio import Redis

from benchmarks.groups import GroupMaker
from benchmarks.leash_rate import open_buffer
from buffer.connect import Buffer
from configs.schema import BufferConfig

_AT_ONCE = 32


@dataclass(kw_only=True, slots=True, frozen=True)
class Footprint:
    num_groups: int
    payload_bytes: int
    used_bytes: int
    """Growth of used_memory: with the server's own tables, which used_memory_dataset leaves out."""
    dataset_bytes: int

    @property
    def beyond_payload(self) -> float:
        """Bytes a group."""
        return (self.used_bytes - self.payload_bytes) / self.num_groups

    @property
    def ratio(self) -> float:
        """Of what may be used: 1.1 times the payload and 400 bytes a group."""
        return self.used_bytes / (1.1 * self.payload_bytes + 400 * self.num_groups)


async def footprint(url: str, num_groups: int, num_tokens: int, size: int) -> Footprint:
    """Without the audit stream, which has a bound of its own however many groups there are."""
    config = BufferConfig(audit_length=0)
    buffer = await open_buffer(url, f"memory-{uuid4().hex[:8]}", 8, config)
    redis = Redis.from_url(url)
    maker = GroupMaker(num_tokens, size)
    await _push_all(buffer, maker, 64)  # scripts, connections and the first tables
    used, dataset = await _memory(redis)
    payload = (await buffer.stats()).bytes
    await _push_all(buffer, maker, num_groups)
    used_after, dataset_after = await _memory(redis)
    footprint = Footprint(
        num_groups=num_groups,
        payload_bytes=(await buffer.stats()).bytes - payload,
        used_bytes=used_after - used,
        dataset_bytes=dataset_after - dataset,
    )
    await buffer.close()
    await redis.aclose()
    return footprint


async def _push_all(buffer: Buffer, maker: GroupMaker, num_groups: int) -> None:
    numbers = iter(range(num_groups))

    async def one_after_the_other() -> None:
        for _ in numbers:
            # As long as the ids that a rollout worker gives.
            await buffer.push(maker.make(f"{uuid4().hex[:12]}-0-{uuid4().hex[:4]}"))

    await asyncio.gather(*(one_after_the_other() for _ in range(_AT_ONCE)))


async def _memory(redis: Redis) -> tuple[int, int]:
    """used_memory without clients' and the append-only file's buffers, and used_memory_dataset."""
    await asyncio.sleep(1.0)  # buffers shrink and what was unlinked is freed
    memory = await redis.info("memory")
    buffers = sum(int(memory.get(name, 0)) for name in ("mem_clients_normal", "mem_aof_buffer"))
    return int(memory["used_memory"]) - buffers, int(memory["used_memory_dataset"])
