"""One trainer rank in a process of its own, which publishes what it is told and notes when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.weights.bounds import prepare
from benchmarks.weights.model import SharedWeights
from benchmarks.weights.ours import checkpoint_engine
from buffer.run_state import RunState
from configs.schema import BufferConfig, WeightSyncConfig
from tensors.layout import Layout

_COMMITTED_S = 160.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Moved:
    """One publish, by `time.perf_counter`, which all processes of a machine share."""

    version: int
    began: float
    """`send` was called."""
    visible: float
    """Every receiver has it; no engine has begun to take it."""


class _TimedBoard(RunState):
    """Notes when a version becomes visible."""

    visible_at = 0.0

    async def mark_available(self, version: int) -> None:
        self.visible_at = time.perf_counter()
        await super().mark_available(version)


class TrainerRank:
    """Version v has the weights of file v modulo their number; each is one of SharedWeights."""

    def __init__(
        self, url: str, run: str, config: WeightSyncConfig, layout: Layout, files: list[Path]
    ) -> None:
        prepare()
        self._url, self._run = url, run
        self._variants = [SharedWeights(path=path, layout=layout).shards(0, 1) for path in files]
        self._engine = checkpoint_engine(layout, config, run=run, open_board=self._open_board)

    async def _open_board(self) -> _TimedBoard:
        board = await _TimedBoard.connect(self._url, self._run, BufferConfig())
        assert isinstance(board, _TimedBoard)
        self._board = board
        return board

    def work(self, version: int) -> Moved:
        """Returns when every live engine serves it."""
        began = time.perf_counter()
        self._engine.send(version, self._variants[version % len(self._variants)])
        self._engine.wait_committed(version, _COMMITTED_S)
        return Moved(version=version, began=began, visible=self._board.visible_at)
