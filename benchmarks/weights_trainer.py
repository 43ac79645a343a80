"""One trainer rank in a process of its own, which publishes what it is told and notes when."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.weights_model import SharedWeights
from buffer.run_state import RunState
from configs.schema import BufferConfig, WeightSyncConfig
from weight_sync.engine import CheckpointEngine
from weight_sync.layout import Layout
from weight_sync.sender.snapshot import Shard

_CONTEXT = multiprocessing.get_context("spawn")
_ANSWER_S = 180.0


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSpec:
    url: str
    run: str
    key: str
    config: WeightSyncConfig
    layout: Layout
    variants: tuple[Path, ...]
    """Files of SharedWeights: version v has the weights of file v modulo their number."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Moved:
    """One publish, by `time.perf_counter`, which all processes of a machine share."""

    version: int
    began: float
    """`publish` was called."""
    visible: float
    """Every receiver has it; no engine has begun to take it."""


class TimedBoard(RunState):
    """Notes when a version becomes visible."""

    visible: dict[int, float]

    async def publish_weights(self, version: int) -> None:
        self.visible[version] = time.perf_counter()
        await super().publish_weights(version)


class Trainer:
    """The process, seen from outside."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._channel, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(spec, theirs), daemon=True)
        self._process.start()
        self._answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def publish(self, version: int) -> Moved:
        """Returns when every live engine serves it."""
        self._channel.send(version)
        moved = self._answer()
        assert isinstance(moved, Moved)
        return moved

    def close(self) -> None:
        self._channel.close()
        self._process.join(20)
        self._process.kill()

    def _answer(self) -> Any:
        if not self._channel.poll(_ANSWER_S):
            raise TimeoutError(f"the trainer did not answer within {_ANSWER_S:g} s")
        answer = self._channel.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(spec: TrainerSpec, channel: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    visible: dict[int, float] = {}

    async def open_board() -> TimedBoard:
        board = await TimedBoard.connect(spec.url, spec.run, BufferConfig())
        assert isinstance(board, TimedBoard)
        board.visible = visible
        return board

    try:
        engine = CheckpointEngine(
            spec.layout,
            spec.config,
            rank=0,
            run=spec.run,
            host="127.0.0.1",
            key=spec.key,
            uses_gpu=False,
            open_board=open_board,
            control_timeout_s=60.0,
        )
        variants = [
            [
                Shard(name=tensor.name, tensor=data)
                for tensor, data in SharedWeights(path=path, layout=spec.layout).shards(0, 1)
            ]
            for path in spec.variants
        ]
        channel.send(None)
        while True:
            version = channel.recv()
            began = time.perf_counter()
            engine.publish(version, variants[version % len(variants)])
            engine.wait_committed(version, _ANSWER_S - 20)
            channel.send(Moved(version=version, began=began, visible=visible[version]))
    except EOFError:
        engine.close()
    except BaseException:
        channel.send(traceback.format_exc())
