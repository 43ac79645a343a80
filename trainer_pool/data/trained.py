"""Records what the loss had of the recorded groups: their advantages, and the log-probabilities of
their tokens by the trainer.

    trained/rank-0.jsonl    a line per group of `rollouts/` that this rank trained

A line is joined to its group by the id. Numbers are copied at the end of a step, and formatted and
written while the next one goes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from buffer.types import TrajectoryGroup
from configs.run_files import open_bytes
from host.line_log import LineLog, is_chosen

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_pool.data.packing import MicroBatch, Row

FOLDER = "trained"
DIGITS = 6
HEAD_BYTES = 4096
_VERSION = re.compile(rb'"step":\d+,"version":(\d+),"at":')
WAIT_S = 10.0
"""For the lines of the last step, which then are lost: a disk hangs."""


class TrainedTrajectory(msgspec.Struct, omit_defaults=True):
    place: int
    """Its index in the group."""
    advantage: float
    """The mean over its trained tokens, without the corrections of the loss."""
    logprobs: list[float | None]
    """[T] by the trainer, in the pass whose gradient was taken; None: not trained."""
    advantages: list[float | None] | None = None
    """[T] if they differ by token."""


class Trained(msgspec.Struct):
    """A group as it was trained in one step."""

    group_id: str
    step: int
    version: int
    """The policy's, before the step."""
    at: float
    trajectories: list[TrainedTrajectory]


class TrainedLog(LineLog):
    """The log of one rank.

    log.note(group_ids, rows, micro_batch, trainer_N)   # each micro-batch; keeps references alone
    log.write(step=3, version=2)                        # after the step
    """

    def __init__(self, folder: Path, rank: int, rate: float, seed: int) -> None:
        """`folder`: the run's; `rate`, `seed`: those by which its groups are recorded."""
        super().__init__(folder / FOLDER / f"rank-{rank}.jsonl")
        self._rate, self._seed = rate, seed
        self._noted: dict[str, list[tuple[Row, Tensor]]] = {}
        self._thread = ThreadPoolExecutor(1, "trained")
        self._writing = set[Future[None]]()
        self._hangs = False
        """The disk did, at the last step: the next ones do not wait for it."""

    def note(
        self, group_ids: Sequence[str], rows: Sequence[Row], batch: MicroBatch, trainer_N: Tensor
    ) -> None:
        """`group_ids`: those of the whole step; `rows`: those of which `batch`, in host memory, has
        some; `trainer_N`: its [N] log-probabilities."""
        edges = np.searchsorted(batch.segment_ids_N.numpy(), np.arange(len(batch.rows) + 1))
        for number, start, stop in zip(batch.rows, edges[:-1], edges[1:], strict=True):
            name = group_ids[rows[number].group]
            if is_chosen(name, self._rate, self._seed):
                own_N = trainer_N.detach()[start:stop]
                self._noted.setdefault(name, []).append((rows[number], own_N))

    def write(self, *, step: int, version: int) -> None:
        """Writes the groups that were noted. Never raises for a disk error."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        waited = wait(self._writing, 0 if self._hangs else WAIT_S)
        self._hangs = bool(waited.not_done)
        if self._hangs:
            self.lose(f"{self.path} takes no lines")
            return
        at, self._writing = time.time(), set[Future[None]]()
        for name, rows in noted.items():
            copied = [(row, own_N.float().cpu().numpy()) for row, own_N in rows]
            make = partial(_line, name, step, version, at, copied)
            self._writing.add(self._thread.submit(self.append, make))

    def close(self) -> None:
        """Waits for the last lines."""
        wait(self._writing, WAIT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)


def _line(
    name: str, step: int, version: int, at: float, rows: Sequence[tuple[Row, NDArray[np.float32]]]
) -> bytes:
    line = Trained(name, step, version, at, [_trajectory(*of_row) for of_row in rows])
    return msgspec.json.encode(line) + b"\n"


def _trajectory(row: Row, own_N: NDArray[np.float32]) -> TrainedTrajectory:
    logprobs = np.full(len(row.tokens), np.nan)
    logprobs[row.is_scored] = own_N
    is_trained = row.loss_mask != 0
    advantages = np.zeros(len(row.tokens)) if row.advantages is None else row.advantages
    own = advantages[is_trained]
    are_equal = not own.size or own.min() == own.max()
    return TrainedTrajectory(
        place=row.trajectory,
        advantage=round(float(own.mean()), DIGITS) if own.size else 0.0,
        logprobs=_numbers(logprobs),
        advantages=None if are_equal else _numbers(np.where(is_trained, advantages, np.nan)),
    )


def _numbers(values: NDArray[Any]) -> list[float | None]:
    known = np.isfinite(values)
    rounded = np.round(values.astype(np.float64), DIGITS).tolist()
    return [x if is_known else None for x, is_known in zip(rounded, known, strict=True)]


def read_trained(
    folder: Path, group: TrajectoryGroup, max_staleness: int = 2**31
) -> Trained | None:
    """The record of the group when it was last trained, in the run's `folder`; None if it has none,
    or one that a full disk or a kill has cut off. It looks at the lines of steps that may have
    trained it, by `max_staleness`, alone: all of them may be gigabytes."""
    begin = b'{"group_id":' + msgspec.json.encode(group.group_id) + b","
    versions, lines = group.tokens_by_version or {0: 0}, list[Trained]()
    for path in (folder / FOLDER).glob("*.jsonl*"):
        with (
            suppress(FileNotFoundError, ValueError),  # it may be empty
            open_bytes(path) as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as data,
        ):
            stop = _first_line(data, max(versions) + max_staleness + 1)
            if (start := data.rfind(begin, _first_line(data, min(versions)), stop)) >= 0:
                data.seek(start)
                lines.append(msgspec.json.decode(data.readline(), type=Trained))
    return max(lines, key=lambda line: line.at, default=None)


def _first_line(data: mmap, version: int) -> int:
    """Where the first line begins of this version or a later one: they only grow."""
    low, high = 0, len(data)
    while low < high:
        middle = (low + high) // 2
        start = data.rfind(b"\n", 0, middle) + 1
        found = _VERSION.search(data, start, start + HEAD_BYTES)
        if found and int(found[1]) >= version:
            high = start
        else:
            low = data.find(b"\n", middle) + 1 or len(data)
    return low


def by_place(trained: Trained | None, number: int) -> list[TrainedTrajectory | None]:
    """The record of each of a group's trajectories; None for one that was not trained."""
    found = {one.place: one for one in trained.trajectories} if trained else {}
    return [*map(found.get, range(number))]
