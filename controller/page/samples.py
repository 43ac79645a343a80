"""Finds recorded groups by reward, length and task, and cuts them into tokens for the page.

A group's line is read once, for the numbers by which it can be found. What is kept is where the
line is: a page of groups and one group are each a few reads, however many there are.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from buffer.types import Trajectory
from configs.run_files import open_bytes
from controller.commands.show import token_texts
from host.printable import printable
from rollout_pool.worker.record import Recorded, parse_line, recorded_files
from trainer_pool.data.trained import Trained, by_place

CHUNK_BYTES = 4 * 2**20
HEAD_BYTES = 64
MAX_TOKENS = 4000
"""Shown of a trajectory at a time."""
PAGE_GROUPS = 50
Decode = Callable[[Sequence[int]], str]


class _Trajectory(msgspec.Struct, gc=False):
    reward: float
    loss_mask_runs: list[int]


class _Prompt(msgspec.Struct, gc=False):
    task: str


class _Line(msgspec.Struct):
    group_id: str
    at: float
    prompt: _Prompt
    trajectories: list[_Trajectory]


class Row(msgspec.Struct, gc=False):
    """One recorded group."""

    group_id: str
    at: float
    task: str
    reward: float
    """Mean of its trajectories."""
    length: float
    """Trained tokens of a trajectory, mean."""
    inode: int
    start: int
    stop: int


@dataclass(kw_only=True, slots=True)
class _File:
    path: Path
    begin: int = 0
    done: int = 0
    """Its bytes between them were read, the last ones first."""
    head: bytes = b""
    """Its first bytes: the number of a file that was removed is given to another one."""
    rows: list[Row] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, frozen=True)
class Filter:
    """Rows of one task, or of all, within bounds: `{"reward": (0.5, 1.0)}`."""

    task: str = ""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def admits(self, row: Row) -> bool:
        if self.task and row.task != self.task:
            return False
        return all(least <= getattr(row, of) <= most for of, (least, most) in self.bounds.items())


class GroupIndex:
    """The recorded groups of a run, the newest first. A file is known by its inode, as a full one
    gets another name.

    index = GroupIndex(Path("runs/night"))
    index.read(seconds=0.5)                     # bytes that are left to be read
    total, rows = index.page(Filter(task="sums"), start=0)
    index.find(rows[0].group_id)                # the group
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _File] = {}
        self._sorted: list[Row] | None = None
        self._decoder = msgspec.json.Decoder(_Line)

    def read(self, seconds: float) -> int:
        """Read on for about `seconds`, the newest first; returns how many bytes are left."""
        until, left = time.monotonic() + seconds, 0
        found = dict[int, _File]()
        for path in sorted(recorded_files(self._folder), key=lambda of: of.suffix != ".jsonl"):
            with suppress(FileNotFoundError), open_bytes(path) as opened:
                status = os.fstat(opened.fileno())
                file = self._files.get(status.st_ino)
                head = opened.read(HEAD_BYTES)
                if file is None or file.done > status.st_size or not head.startswith(file.head):
                    file, self._sorted = _File(path=path), None
                    file.begin = file.done = _last_chunk(opened, status.st_size)
                file.path, file.head = path, head
                # However slow the machine, there is something of the newest to show.
                left += self._read_on(file, opened, status, until if found else math.inf)
                found[status.st_ino] = file
        for inode, file in found.items():
            with suppress(FileNotFoundError), open_bytes(file.path) as opened:
                if os.fstat(opened.fileno()).st_ino == inode:  # or it has another name by now
                    self._read_back(file, opened, inode, until)
                left += file.begin
        if found.keys() != self._files.keys():
            self._sorted = None
        self._files = found
        return left

    def _read_on(self, file: _File, opened: BinaryIO, status: os.stat_result, until: float) -> int:
        size = CHUNK_BYTES
        while file.done < status.st_size and time.monotonic() < until:
            opened.seek(file.done)
            data = opened.read(size)
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) < size:
                return 0  # its last line is being written
            size = CHUNK_BYTES if whole else 2 * size
            file.rows += self._rows(data[:whole], status.st_ino, file.done)
            file.done += whole
            self._sorted = None
        return status.st_size - file.done

    def _read_back(self, file: _File, opened: BinaryIO, inode: int, until: float) -> None:
        size = CHUNK_BYTES
        while file.begin and time.monotonic() < until:
            start = max(0, file.begin - size)
            opened.seek(start)
            data = opened.read(file.begin - start)
            cut = data.find(b"\n", 0, -1) + 1 if start else 0
            if start and not cut:
                size *= 2  # a line of more than this
                continue
            file.rows += self._rows(data[cut:], inode, start + cut)
            file.begin = start + cut
            self._sorted = None

    def _rows(self, data: bytes, inode: int, start: int) -> Iterator[Row]:
        for text in data.split(b"\n")[:-1]:
            stop = start + len(text)
            try:
                line = self._decoder.decode(text)
            except ValueError:  # a line that a full disk or a kill has cut off
                start = stop + 1
                continue
            number = max(1, len(line.trajectories))
            yield Row(
                group_id=line.group_id,
                at=line.at,
                task=line.prompt.task,
                reward=sum(one.reward for one in line.trajectories) / number,
                length=sum(sum(one.loss_mask_runs[1::2]) for one in line.trajectories) / number,
                inode=inode,
                start=start,
                stop=stop,
            )
            start = stop + 1

    @property
    def rows(self) -> Sequence[Row]:
        found = self._sorted
        if found is None:  # another thread may read on meanwhile
            every = [row for file in self._files.values() for row in file.rows]
            self._sorted = found = sorted(every, key=lambda row: -row.at)
        return found

    @property
    def tasks(self) -> list[str]:
        return sorted({row.task for row in self.rows})

    def page(self, wanted: Filter, start: int) -> tuple[int, list[Row]]:
        """How many groups the filter admits, and a page of them."""
        found = self.rows if wanted == Filter() else [*filter(wanted.admits, self.rows)]
        return len(found), list(found[start : start + PAGE_GROUPS])

    def find(self, group_id: str) -> Recorded:
        """Raises KeyError if it is not recorded, or no longer."""
        row = next((row for row in self.rows if row.group_id == group_id), None)
        if row is None or row.inode not in self._files:
            raise KeyError(group_id)
        path = self._files[row.inode].path
        with open_bytes(path) as file:
            file.seek(row.start)
            data = file.read(row.stop - row.start)
        recorded = parse_line(data, f"{path}, byte {row.start}")
        if recorded.group.group_id != group_id:
            raise KeyError(group_id)
        return recorded


def _last_chunk(file: BinaryIO, size: int) -> int:
    """Where the first line begins of the last CHUNK_BYTES; 0 if none does, as in a long one that
    is being written."""
    start = max(0, size - CHUNK_BYTES)
    file.seek(start)
    place = file.read(CHUNK_BYTES).find(b"\n")
    return start + place + 1 if start and place >= 0 else 0


def describe(
    recorded: Recorded,
    place: int,
    start: int,
    decode: Decode | None,
    trained: Trained | None = None,
) -> dict[str, Any]:
    """A group, and the tokens of its trajectory at `place` from `start` on. Raises KeyError if it
    has no such trajectory."""
    group = recorded.group
    if not 0 <= place < len(group.trajectories) or start < 0:
        raise KeyError(group.group_id)
    one = group.trajectories[place]
    of_trainer = by_place(trained, len(group.trajectories))
    own = of_trainer[place]
    part = slice(start, start + MAX_TOKENS)
    return {
        "group_id": group.group_id,
        "task": group.prompt.task,
        "prompt_index": group.prompt.index,
        "temperature": group.sampling.temperature,
        "at": recorded.at,
        "worker": recorded.worker,
        "trajectories": [
            {**_summary(one), "advantage": found and found.advantage}
            for one, found in zip(group.trajectories, of_trainer, strict=True)
        ],
        "trained_step": trained and trained.step,
        "place": place,
        "messages": recorded.messages.get(one.episode, []),
        "start": start,
        "texts": [*_texts(one.tokens[part].tolist(), decode)],
        "versions": one.token_versions()[part].tolist(),
        "mask": one.loss_mask[part].tolist(),
        "logprobs": one.rollout_logprobs[part].tolist(),
        "trainer_logprobs": own and own.logprobs[part],
        "advantages": own and own.advantages and own.advantages[part],
    }


def _summary(one: Trajectory) -> dict[str, Any]:
    return {
        "episode": one.episode,
        "role": one.role,
        "reward": one.reward,
        "parts": dict(one.reward_parts),
        "finish_reason": one.finish_reason,
        "num_tokens": one.num_tokens,
        "num_trained": int(one.loss_mask.sum()),
        "versions": {str(version): n for version, n in one.tokens_by_version.items()},
    }


def _texts(tokens: Sequence[int], decode: Decode | None) -> Iterable[str]:
    """Numbers if there is no tokenizer (any more)."""
    if decode is None:
        return (f"[{token}]" for token in tokens)
    return map(printable, token_texts(decode, tokens))
