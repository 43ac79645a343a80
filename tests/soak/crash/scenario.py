"""The parameters of one soak, shared by all its processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from buffer.connect import Buffer, connect_buffer
from configs.choices import OnStale
from configs.schema import BufferConfig
from tests.support.blocking import BlockingReplayBuffer


@dataclass(kw_only=True, slots=True, frozen=True)
class Scenario:
    url: str
    run: str
    folder: Path
    """Checkpoints, the producers' notes, sockets and the processes' output."""
    num_producers: int = 8
    num_ranks: int = 4
    groups_per_step: int = 32
    checkpoint_every: int = 4
    max_staleness: int = 2
    on_stale: OnStale = OnStale.requeue
    capacity_groups: int | None = None
    shards: int = 1
    groups_per_producer: int = 0
    """Acknowledged pushes after which each producer ends."""
    in_flight: int = 8
    """Groups that a producer generates concurrently."""
    generate_s: float = 0.01
    """Mean time that one group takes."""
    lease_timeout_s: float = 10.0
    wait_timeout_s: float = 60.0
    batch_timeout_s: float = 1.0
    """How long a rank waits for a batch before it checks whether the run is over."""

    def at(self, url: str) -> Scenario:
        """The same scenario with another address of the server."""
        return replace(self, url=url)

    @property
    def settings(self) -> BufferConfig:
        return BufferConfig(
            url=self.url,
            shards=self.shards,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            capacity_groups=self.capacity_groups,
            lease_timeout_s=self.lease_timeout_s,
            wait_timeout_s=self.wait_timeout_s,
            remember_s=86_400,  # the tombstones are the evidence
            audit_length=10_000,
        )

    def blocking_buffer(self) -> BlockingReplayBuffer:
        """A client of a process that may start while the server is down."""
        return BlockingReplayBuffer(self.url, self.run, self.settings, waits=True)

    async def buffer(self) -> Buffer:
        """The same for a coroutine."""
        return await connect_buffer(self.url, self.run, self.settings, waits=True)
