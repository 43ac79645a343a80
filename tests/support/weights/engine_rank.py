"""One of several trainer ranks with a checkpoint engine; runs in a process of its own.

Told through a pipe what to do; answers with what came of it, or with the error's text. On rank 0
the board is here, too.
"""

from __future__ import annotations

import os
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from configs.choices import Backend
from configs.schema import WeightSyncConfig
from tests.support.weights.known_weights import BUCKET_BYTES, scene_layout, scene_shards
from tests.support.weights.memory_board import MemoryBoard
from tests.support.weights.receiver_specs import KEY
from tests.support.weights.scene import WaitingStaging
from weight_sync.checkpoint_engine import CheckpointEngine
from weight_sync.types import WeightSyncError

LIMIT_S = 60.0


class EngineRank:
    """The verbs of the pipe are its methods."""

    def __init__(
        self, rank: int, num_ranks: int, num_chains: int, timeout_s: float, full_every: int
    ) -> None:
        self._rank = rank
        self._board = MemoryBoard()
        self._layout = scene_layout(num_ranks)
        self._engine = CheckpointEngine(
            self._layout,
            WeightSyncConfig(
                backend=Backend.gloo,
                bucket_bytes=BUCKET_BYTES,
                num_chains=num_chains,
                timeout_s=timeout_s,
                full_every=full_every,
            ),
            rank=rank,
            run="ranks",
            host="127.0.0.1",
            key=KEY,
            uses_gpu=False,
            open_board=self._open_board,
            control_timeout_s=timeout_s,
        )

    async def _open_board(self) -> MemoryBoard:
        return self._board

    def register(self, name: str, url: str) -> None:
        self._board.registered[name] = url

    def commit(self, engine: str, version: int) -> None:
        self._board.set_engine(engine, version)

    def publish(self, version: int) -> int:
        shards = scene_shards(self._layout, self._rank, version)
        return self._engine.send(version, shards).version

    def halt(self) -> None:
        """On a rank other than 0: send some buckets of the next version, and then wait."""
        commands = self._engine._commands
        assert commands is not None
        self._halting = commands._sending._sender.group_thread.staging = WaitingStaging()

    def halted(self) -> bool:
        return self._halting.came.wait(LIMIT_S)

    def go_on(self) -> None:
        self._halting.go_on.set()

    def published(self, version: int, timeout_s: float) -> list[int]:
        self._board.set_engine("engine", version)
        self._engine.wait_committed(version, timeout_s)
        self._engine.drain(version, timeout_s)
        return self._board.available

    def records(self, kind: str) -> list[dict[str, Any]]:
        return self._board.of_kind(kind)

    def close(self) -> None:
        self._engine.close()


def serve(
    rank: int,
    num_ranks: int,
    num_chains: int,
    port: int,
    timeout_s: float,
    full_every: int,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    engine = EngineRank(rank, num_ranks, num_chains, timeout_s, full_every)
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(engine, verb)(*arguments))
        except WeightSyncError as error:
            pipe.send(str(error))
