"""Our own path: the real checkpoint engine in trainer processes, real receivers, a board in memory.

A round is one publish, from `publish` until the version is released: every byte has arrived at all
receivers, lies in its place in a file on tmpfs and agrees with its checksum.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.team import Round, Team
from benchmarks.weights_model import map_file
from benchmarks.weights_wires import Stage, join_gloo
from configs.schema import WeightSyncConfig
from weight_sync.engine import CheckpointEngine
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.sender.snapshot import Shard
from weight_sync.types import ReceiverSpec, Record

KEY = "k3y-of-the-benchmark"
_PUBLISH_S = 120.0
_PARTS = ("encode_s", "wire_s", "verify_s")
"""Of the record that a publish leaves."""
_NUM_TIMES = 3 + len(_PARTS)


class MemoryBoard:
    """What a run keeps about its weights, for one process; no engine takes them."""

    def __init__(self, receivers: dict[str, str]) -> None:
        self._receivers = receivers
        self._published: int | None = None
        self._changed = threading.Condition()
        self.published_at = 0.0
        """By `time.perf_counter`."""
        self.publishes: dict[int, Record] = {}
        self.events: list[Record] = []

    async def receivers(self) -> dict[str, str]:
        return self._receivers

    async def engine_versions(self) -> dict[str, int]:
        return {}

    async def record_staged(self, receiver: str, version: int) -> None:
        return None

    async def publish_weights(self, version: int) -> None:
        with self._changed:
            self._published, self.published_at = version, time.perf_counter()
            self._changed.notify_all()

    async def published_weights(self) -> int | None:
        return self._published

    async def wait_engines_at(self, version: int, timeout_s: float) -> Mapping[str, int]:
        raise TimeoutError("no engine takes part")

    async def append_metrics(self, record: Record, kind: str) -> None:
        if kind == "weights_event":
            self.events.append(record)
        elif "wire_s" in record:
            with self._changed:
                self.publishes[int(record["version"])] = record
                self._changed.notify_all()

    async def close(self) -> None:
        return None

    def wait_for(self, version: int) -> None:
        """Until it is published."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._published == version, _PUBLISH_S):
                raise TimeoutError(
                    f"version {version} was not published: {self._published}, {self.events}"
                )

    def record_of(self, version: int) -> Record:
        """What the publish says of itself, some moments later."""
        with self._changed:
            assert self._changed.wait_for(lambda: version in self.publishes, _PUBLISH_S)
            return self.publishes[version]


@dataclass(kw_only=True, slots=True)
class MakeTrainerRank:
    stage: Stage
    name: str
    rank: int
    num_ranks: int
    receivers: dict[str, str]

    def __call__(self) -> _TrainerRank:
        join_gloo(self.stage, self.name, self.rank, self.num_ranks)
        return _TrainerRank(self)


class _TrainerRank:
    def __init__(self, spec: MakeTrainerRank) -> None:
        weights, rank, num_ranks = spec.stage.weights, spec.rank, spec.num_ranks
        layout = weights.spread_over(num_ranks)
        self._board = MemoryBoard(spec.receivers)
        self._shards = [
            Shard(name=tensor.name, tensor=owned)
            for tensor, owned in weights.shards(rank, num_ranks)
        ]
        start = sum(layout.stream_bytes(r) for r in range(rank))
        self._source = weights.open()[start : start + layout.stream_bytes(rank)]
        self._copy = torch.zeros_like(self._source)
        self._times = times_of(spec.stage, spec.name)[rank]
        self._is_first = rank == 0
        self._version = -1
        self._engine = CheckpointEngine(
            layout,
            WeightSyncConfig(bucket_bytes=spec.stage.bucket_bytes),
            rank=rank,
            run=spec.name,
            host="127.0.0.1",
            key=KEY,
            uses_gpu=False,
            open_board=self._open_board,
            control_timeout_s=60.0,
        )

    async def _open_board(self) -> MemoryBoard:
        return self._board

    def work(self, num_rounds: int) -> None:
        """Notes what the last round took: memcpy of these shards, `publish`, the transfer."""
        for _ in range(num_rounds):
            self._version += 1
            began = time.perf_counter()
            self._copy.copy_(self._source)
            copied = time.perf_counter()
            dist.barrier()
            before = time.perf_counter()
            self._engine.publish(self._version, self._shards)
            after = time.perf_counter()
            if self._is_first:
                self._board.wait_for(self._version)
                record = self._board.record_of(self._version)
                self._times[3:] = torch.tensor([float(record[part]) for part in _PARTS])
            dist.barrier()
            self._times[0] = copied - began
            self._times[1] = after - before
            self._times[2] = self._board.published_at - after


def times_of(stage: Stage, name: str) -> torch.Tensor:
    """[ranks, times] seconds, shared between a team's processes and its owner."""
    path = stage.folder / f"{name}-times"
    return map_file(path, 8 * 8 * _NUM_TIMES).view(torch.float64).view(8, _NUM_TIMES)


class OurTeam:
    """Plays as `Team` does; a round's seconds are those of the transfer, behind the snapshot."""

    def __init__(self, stage: Stage, num_ranks: int) -> None:
        name = f"ours-{num_ranks}-{stage.num_receivers}"
        self._num_ranks = num_ranks
        self._times = times_of(stage, name)
        self._runner = asyncio.Runner()
        self._receivers = [
            ReceiverProcess(_receiver_spec(stage, f"{name}-{number}"), stage.folder / f"{name}.log")
            for number in range(stage.num_receivers)
        ]
        urls = {}
        for each in self._receivers:
            info = self._runner.run(each.start())
            urls[info.name] = info.url
        self._team = Team(
            [
                MakeTrainerRank(
                    stage=stage, name=name, rank=rank, num_ranks=num_ranks, receivers=urls
                )
                for rank in range(num_ranks)
            ],
            lambda: 0.0,
        )
        self.stalls: list[tuple[float, float]] = []
        """Of each round: the seconds of `publish` and of memcpy, at the slowest rank."""
        self.parts: list[dict[str, float]] = []
        """Of each round: where the transfer's seconds went."""

    def play(self, num_groups: int) -> Round:
        played = self._team.play(num_groups)
        ranks = self._times[: self._num_ranks]
        self.stalls.append((ranks[:, 1].max().item(), ranks[:, 0].max().item()))
        seconds, *parts = ranks[0, 2:].tolist()
        self.parts.append(dict(zip(_PARTS, parts, strict=True)) | {"rest_s": seconds - sum(parts)})
        return replace(played, seconds=seconds)

    def close(self) -> None:
        self._team.close()
        for each in self._receivers:
            self._runner.run(each.stop())
        self._runner.close()


def _receiver_spec(stage: Stage, name: str) -> ReceiverSpec:
    config = WeightSyncConfig()
    return ReceiverSpec(
        name=name,
        host="127.0.0.1",
        folder=str(stage.folder / name),
        num_slots=config.num_staged,
        num_buffers=config.num_buffers,
        timeout_s=config.timeout_s,
        min_bandwidth=config.min_bandwidth,
        key=KEY,
    )
