"""Our own path: the real checkpoint engine in trainer processes, real receivers, a board in memory.

A round is one publish, from `send` until the version is available: every byte has arrived at all
receivers, lies in its place in a file on tmpfs and agrees with its checksum.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchmarks import KEY
from benchmarks.team import Round, Team
from benchmarks.weights.bounds import Stage, join_gloo
from configs.run_files import Scalar
from configs.schema import WeightSyncConfig
from tensors.layout import Layout
from weight_sync.checkpoint_engine import CheckpointEngine, OpenBoard
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import ReceiverSpec

_PUBLISH_S = 120.0
_PARTS = ("encode_s", "wire_s", "verify_s")
"""The parts that the record of a publish has."""


class MemoryBoard:
    """A run's record of its weights, for one process; no engine takes them."""

    def __init__(self, receivers: dict[str, str]) -> None:
        self._receivers = receivers
        self._available: int | None = None
        self._changed = threading.Condition()
        self.available_at = 0.0
        """The time by `time.perf_counter`."""
        self.publishes: dict[int, Mapping[str, Scalar]] = {}
        self.events: list[Mapping[str, Scalar]] = []

    async def receivers(self) -> dict[str, str]:
        return self._receivers

    async def engine_versions(self) -> dict[str, int]:
        return {}

    async def record_staged(self, receiver: str, version: int) -> None:
        return None

    async def mark_available(self, version: int) -> None:
        with self._changed:
            self._available, self.available_at = version, time.perf_counter()
            self._changed.notify_all()

    async def wait_engines_at(self, version: int, timeout_s: float) -> Mapping[str, int]:
        raise TimeoutError("no engine takes part")

    async def append_metrics(self, record: Mapping[str, Scalar], kind: str) -> None:
        if kind == "weights_event":
            self.events.append(record)
        elif "wire_s" in record:
            with self._changed:
                self.publishes[int(record["version"])] = record
                self._changed.notify_all()

    async def close(self) -> None:
        return None

    def wait_for(self, version: int) -> None:
        """Until a receiver has it whole."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._available == version, _PUBLISH_S):
                raise TimeoutError(
                    f"version {version} is not available: {self._available}, {self.events}"
                )

    def record_of(self, version: int) -> Mapping[str, Scalar]:
        """The record of the publish, which comes some moments later."""
        with self._changed:
            assert self._changed.wait_for(lambda: version in self.publishes, _PUBLISH_S)
            return self.publishes[version]


def checkpoint_engine(
    layout: Layout,
    config: WeightSyncConfig,
    *,
    run: str,
    open_board: OpenBoard,
    rank: int = 0,
    uses_gpu: bool = False,
) -> CheckpointEngine:
    return CheckpointEngine(
        layout,
        config,
        rank=rank,
        run=run,
        host="127.0.0.1",
        key=KEY,
        uses_gpu=uses_gpu,
        open_board=open_board,
        control_timeout_s=60.0,
    )


def receiver_in(
    folder: Path, name: str, config: WeightSyncConfig, device: str = "cpu"
) -> ReceiverProcess:
    spec = ReceiverSpec(
        name=name,
        host="127.0.0.1",
        folder=str(folder / name),
        num_slots=config.num_staged,
        num_buffers=config.num_buffers,
        timeout_s=config.timeout_s,
        min_bandwidth=config.min_bandwidth,
        device=device,
        key=KEY,
    )
    return ReceiverProcess(spec, folder / f"{name}.log")


class _TrainerRank:
    def __init__(
        self, stage: Stage, name: str, rank: int, num_ranks: int, receivers: dict[str, str]
    ) -> None:
        join_gloo(stage, name, rank, num_ranks)
        weights = stage.weights
        layout = weights.spread_over(num_ranks)
        self._board = MemoryBoard(receivers)
        self._shards = weights.shards(rank, num_ranks)
        start = sum(layout.stream_bytes(r) for r in range(rank))
        self._source = weights.open()[start : start + layout.stream_bytes(rank)]
        self._copy = torch.zeros_like(self._source)
        self._is_first = rank == 0
        self._version = -1
        self._engine = checkpoint_engine(
            layout,
            WeightSyncConfig(bucket_bytes=stage.bucket_bytes),
            run=name,
            open_board=self._open_board,
            rank=rank,
        )

    async def _open_board(self) -> MemoryBoard:
        return self._board

    def work(self, num_rounds: int) -> tuple[float, float, float, float, dict[str, float]]:
        """Seconds of the last round: memcpy of these shards, `send`, the transfer, of that this
        process's CPU, the transfer's parts."""
        for _ in range(num_rounds):
            self._version += 1
            began = time.perf_counter()
            self._copy.copy_(self._source)
            copied = time.perf_counter()
            dist.barrier()
            before = time.perf_counter()
            self._engine.send(self._version, self._shards)
            after, cpu_before = time.perf_counter(), time.process_time()
            parts = {}
            if self._is_first:
                self._board.wait_for(self._version)
                record = self._board.record_of(self._version)
                parts = {part: float(record[part]) for part in _PARTS}
            dist.barrier()
        cpu_s = time.process_time() - cpu_before
        return copied - began, after - before, self._board.available_at - after, cpu_s, parts


@dataclass(kw_only=True, slots=True, frozen=True)
class Publish(Round):
    """Its seconds, also those of the CPU, are those of the transfer, behind the snapshot."""

    memcpy_s: float
    """At the slowest rank, as publish_s."""
    publish_s: float
    parts: dict[str, float]
    """The transfer's seconds by part."""

    def with_snapshot(self) -> Round:
        return replace(self, seconds=self.seconds + self.publish_s)


class OurTeam:
    """Plays as `Team` does."""

    def __init__(self, stage: Stage, num_ranks: int) -> None:
        name = f"ours-{num_ranks}-{stage.num_receivers}"
        self._runner = asyncio.Runner()
        self._receivers = [
            receiver_in(stage.folder, f"{name}-{number}", WeightSyncConfig())
            for number in range(stage.num_receivers)
        ]
        urls = self._runner.run(_start_all(self._receivers))
        self._team = Team(
            [partial(_TrainerRank, stage, name, rank, num_ranks, urls) for rank in range(num_ranks)]
        )

    def play(self, num_groups: int) -> Publish:
        before = self._receivers_cpu_s()
        memcpy_s, publish_s, transfer_s, cpu_s, parts = zip(
            *self._team.play(num_groups).results, strict=True
        )
        return Publish(
            num_groups=num_groups,
            seconds=transfer_s[0],
            producer_cpu_s=sum(cpu_s),
            consumer_cpu_s=self._receivers_cpu_s() - before,
            memcpy_s=max(memcpy_s),
            publish_s=max(publish_s),
            parts=parts[0] | {"rest_s": transfer_s[0] - sum(parts[0].values())},
        )

    def _receivers_cpu_s(self) -> float:
        times = [psutil.Process(each.pid).cpu_times() for each in self._receivers]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        self._team.close()
        for each in self._receivers:
            self._runner.run(each.stop())
        self._runner.close()


async def _start_all(receivers: list[ReceiverProcess]) -> dict[str, str]:
    """Their URLs, by name."""
    await asyncio.gather(*(each.start() for each in receivers))
    return {each.spec.name: each.url for each in receivers}
