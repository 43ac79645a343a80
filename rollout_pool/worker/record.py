"""Records a share of the groups in the run's folder as they were sampled, for `make show`.

    rollouts/worker-0.jsonl      a line per group; when full it becomes worker-0.jsonl.1,
    rollouts/worker-0.jsonl.1    that one .2, ... and the oldest is removed

Whether a group is recorded depends on its id alone, so it is known beforehand. A failing disk only
loses lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan

log = logging.getLogger(__name__)

FOLDER = "rollouts"
MAX_FILE_BYTES = 64 * 2**20
NUM_FILES = 4
_PIECE = 4096
"""Numbers formatted at a time: other threads can run in between."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Recorded:
    group: TrajectoryGroup
    text: str
    at: float
    """Unix time."""
    worker: str


class RolloutLog:
    """The log of one worker. `write` may be called concurrently."""

    def __init__(
        self,
        folder: Path,
        worker: str,
        rate: float,
        seed: int,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        num_files: int = NUM_FILES,
    ) -> None:
        """`folder`: the run's. `rate`: share of the groups to record (rollout.log_rate)."""
        self.path = folder / FOLDER / f"{worker}.jsonl"
        self._worker = worker
        self._rate = rate
        self._seed = seed
        self._max_file_bytes = max_file_bytes
        self._num_files = num_files
        self._lock = threading.Lock()
        self.num_lost = 0
        """Lines that could not be written."""

    def wants(self, group_id: str) -> bool:
        digest = sha256(f"{self._seed}:{group_id}".encode()).digest()
        return int.from_bytes(digest[:6], "big") < self._rate * 2**48

    async def write(self, group: TrajectoryGroup, prompt_text: str) -> None:
        """Records the group if its id is chosen. Never raises for a disk error."""
        if self.wants(group.group_id):
            await asyncio.to_thread(self._write, group, prompt_text)

    def _write(self, group: TrajectoryGroup, text: str) -> None:
        try:
            line = "".join(_line(group, text, time.time(), self._worker)).encode()
            with self._lock:
                self._append(line)
        except OSError as error:
            self._lose(f"{self.path}: {error}")

    def _append(self, line: bytes) -> None:
        if len(line) > self._max_file_bytes:
            self._lose(f"a group of {len(line)} bytes exceeds the size limit of {self.path}")
            return
        self.path.parent.mkdir(exist_ok=True)
        with open(self.path, "ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size + 1 + len(line) > self._max_file_bytes:
                self._rotate()
            elif size:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a line was truncated, by a full disk or a kill
                    line = b"\n" + line
        with open(self.path, "ab") as file:
            file.write(line)

    def _rotate(self) -> None:
        files = _files(self.path, self._num_files)
        for newer, older in reversed([*pairwise(files)]):
            if newer.exists():
                newer.replace(older)
        self.path.unlink(missing_ok=True)  # if there is only one file

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            log.warning("a group is not recorded, and perhaps others: %s", why)


def read_recorded(folder: Path, group_id: str | None) -> Recorded | None:
    """The recorded group with this id, or the newest one of all workers."""
    newest: Recorded | None = None
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        for part in _files(path, NUM_FILES):
            found = _read(part, group_id)
            if found is not None:
                if newest is None or found.at > newest.at:
                    newest = found
                break  # earlier files are older
    return newest


def _files(path: Path, number: int) -> list[Path]:
    """Newest first."""
    return [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, number))]


def _read(path: Path, group_id: str | None) -> Recorded | None:
    """The last complete line with this id."""
    start = b'{"group_id":' + (b"" if group_id is None else json.dumps(group_id).encode() + b",")
    try:
        with open(path, "rb") as file:
            lines = [line for line in file if line.startswith(start)]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return _parse(json.loads(line))
        except (ValueError, KeyError):  # truncated, by a full disk or a kill
            continue
    return None


# One line ------------------------------------------------------------------------------------


def _line(group: TrajectoryGroup, text: str, at: float, worker: str) -> Iterator[str]:
    head = {
        "group_id": group.group_id,
        "at": at,
        "worker": worker,
        "prompt": asdict(group.prompt),
        "text": text,
        "sampling": asdict(group.sampling),
    }
    yield json.dumps(head, separators=(",", ":"))[:-1] + ',"trajectories":['
    for place, trajectory in enumerate(group.trajectories):
        yield "," * (place > 0)
        yield from _trajectory(trajectory)
    yield "]}\n"


def _trajectory(trajectory: Trajectory) -> Iterator[str]:
    line = {
        "episode": trajectory.episode,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "finish_reason": trajectory.finish_reason,
        "prompt_length": trajectory.prompt_length,
        "version_spans": [[s.version, s.start, s.end] for s in trajectory.version_spans],
        "loss_mask_runs": _runs(trajectory.loss_mask),
    }
    yield json.dumps(line, separators=(",", ":"))[:-1]
    yield from _numbers("tokens", trajectory.tokens)
    yield from _numbers("logprobs", trajectory.rollout_logprobs)
    yield ',"columns":{'
    for place, (name, column) in enumerate(trajectory.columns.items()):
        form = {"dtype": column.dtype.name, "shape": list(column.shape)}
        yield "," * (place > 0) + f"{json.dumps(name)}:{json.dumps(form)[:-1]}"
        yield from _numbers("values", column.reshape(-1))
        yield "}"
    yield "}}"


def _numbers(name: str, numbers: NDArray[Any]) -> Iterator[str]:
    yield f',"{name}":['
    for start in range(0, len(numbers), _PIECE):
        yield ("," if start else "") + _piece(numbers[start : start + _PIECE])
    yield "]"


def _piece(numbers: NDArray[Any]) -> str:
    """Formats numbers so that they can be read back exactly in their dtype."""
    if numbers.dtype in (np.float16, np.float32) and np.isfinite(numbers).all():
        # Nine digits identify a float32 and are half as long as those of a float64.
        return ",".join([f"{number:.9g}" for number in numbers.tolist()])
    return json.dumps(numbers.tolist(), separators=(",", ":"))[1:-1]


def _runs(mask: NDArray[np.uint8]) -> list[int]:
    """Run lengths; the first run is of zeros and may be empty."""
    changes = np.flatnonzero(np.diff(mask, prepend=0)).tolist()
    return np.diff([0, *changes, len(mask)]).tolist()  # type: ignore[no-any-return]


def _parse(line: Mapping[str, Any]) -> Recorded:
    group = TrajectoryGroup(
        group_id=line["group_id"],
        prompt=PromptRef(**line["prompt"]),
        trajectories=tuple(map(_parse_trajectory, line["trajectories"])),
        sampling=SamplingParams(**line["sampling"]),
    )
    return Recorded(group=group, text=line["text"], at=line["at"], worker=line["worker"])


def _parse_trajectory(line: Mapping[str, Any]) -> Trajectory:
    runs = line["loss_mask_runs"]
    return Trajectory(
        tokens=np.array(line["tokens"], np.int32),
        loss_mask=np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8),
        rollout_logprobs=np.array(line["logprobs"], np.float32),
        version_spans=tuple(
            VersionSpan(version=v, start=start, end=end) for v, start, end in line["version_spans"]
        ),
        prompt_length=line["prompt_length"],
        reward=line["reward"],
        finish_reason=line["finish_reason"],
        reward_parts=line["reward_parts"],
        episode=line["episode"],
        columns={
            name: np.array(column["values"], column["dtype"]).reshape(column["shape"])
            for name, column in line.get("columns", {}).items()  # older lines have none
        },
    )
