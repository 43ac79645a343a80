"""How much the benchmark measures, the server that it measures, and clients of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from buffer.redis.connection import connect
from buffer.redis.server import EmbeddedServer
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Lease
from configs.schema import BufferConfig

_WAIT_S = 120.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    groups_1k: int = 1_920
    groups_16k: int = 192
    rounds: int = 5
    depth: int = 1_000_000
    latency_rounds: int = 1_500
    wake_rounds: int = 100
    idle_s: float = 15.0
    memory_groups: int = 1_000
    tiny_groups: int = 20_000
    settle_s: float = 1.0
    """Until clients' buffers have shrunk and what was unlinked is freed."""


SHORT = Sizes(
    groups_1k=0,  # the same code as for the longer ones
    groups_16k=32,
    rounds=1,
    depth=2_000,
    latency_rounds=10,
    wake_rounds=3,
    idle_s=0.5,
    memory_groups=50,
    tiny_groups=500,
    settle_s=0.1,
)


class Stage:
    """The server that is measured; one of our own unless a URL is given."""

    def __init__(self, url: str | None, folder: Path) -> None:
        self._server = None
        if url is None:
            self._server = EmbeddedServer.start(
                folder, BufferConfig(), "127.0.0.1", folder / "server.log"
            )
        self.url = url or self._server.url  # type: ignore[union-attr]

    def cpu_s(self) -> float:
        """CPU time of the server so far; 0 for one that is not ours."""
        if self._server is None:
            return 0.0
        times = psutil.Process(self._server.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        if self._server is not None:
            self._server.stop(timeout_s=30)


async def open_buffer(
    url: str, run: str, groups_per_step: int, config: BufferConfig
) -> ReplayBuffer:
    """One more client of the run, which is opened if it is new."""
    buffer = ReplayBuffer(await connect(url), run, config)
    await buffer.open(config, groups_per_step)
    return buffer


async def lease(
    buffer: ReplayBuffer, step: int, num_groups: int, *, share: int = 0, num_shares: int = 1
) -> Lease:
    """This share of the step's batch, under version 0."""
    return await buffer.lease(
        step=step,
        version=0,
        num_groups=num_groups,
        share=share,
        num_shares=num_shares,
        timeout_s=_WAIT_S,
    )
