"""Records a share of the groups in the run's folder as they were sampled, for `make show` and `make
groups`.

    rollouts/worker-0.jsonl      a line per group; when full it becomes worker-0.jsonl.1,
    rollouts/worker-0.jsonl.1    that one .2, ... and the oldest is removed

Whether a group is recorded depends on its id alone, so it is known beforehand. A failing disk only
loses lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from buffer.wire.codec import encode_group
from buffer.wire.header import Count
from configs.run_files import open_bytes, read_bytes
from host.line_log import MAX_FILE_BYTES, NUM_FILES, LineLog, is_chosen, parts_of
from rollout_pool.episodes.conversation import Conversations, Message
from rollout_pool.episodes.template import as_openai_message

FOLDER = "rollouts"
_PIECE = 4096
"""Numbers formatted at a time: other threads can run in between."""
_START, _END = b'{"group_id":', b"}}]}"
"""How a complete line begins and ends."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Recorded:
    group: TrajectoryGroup
    text: str
    at: float
    """Unix time."""
    worker: str
    messages: Mapping[int, list[dict[str, Any]]]
    """The conversations of its episodes in OpenAI's format; none in lines of older versions."""


class RolloutLog(LineLog):
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
        super().__init__(folder / FOLDER / f"{worker}.jsonl", max_file_bytes, num_files)
        self._worker = worker
        self._rate = rate
        self._seed = seed

    def wants(self, group_id: str) -> bool:
        return is_chosen(group_id, self._rate, self._seed)

    async def write(
        self, group: TrajectoryGroup, prompt_text: str, messages: Conversations
    ) -> None:
        """Records the group if its id is chosen. Never raises for a disk error."""
        if self.wants(group.group_id):
            await asyncio.to_thread(self._write, group, prompt_text, messages)

    def _write(self, group: TrajectoryGroup, text: str, messages: Conversations) -> None:
        # A conversation is the environment's too, and may hold what JSON does not.
        self.append(lambda: _line(group, text, messages, time.time(), self._worker))


def read_recorded(folder: Path, group_id: str | None) -> Recorded | None:
    """The recorded group with this id, or the newest one of all workers.

    Lines that a full disk or a kill has cut off are passed over. Raises ValueError with the number
    of a line that is damaged otherwise.
    """
    newest: Recorded | None = None
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        for part in parts_of(path):
            found = _read(part, group_id)
            if found is not None:
                if newest is None or found.at > newest.at:
                    newest = found
                break  # earlier files are older
    return newest


def all_recorded(folder: Path, damaged: list[str] | None = None) -> Iterator[Recorded]:
    """All recorded groups, those of a worker in the order in which they ended. See `read_recorded`
    for cut and damaged lines; with a list, messages about the latter are appended to it instead of
    raised."""
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        with ExitStack() as files:
            # All are open before the first is read, the newest first: a live run's rotation would
            # put others in their places.
            parts = dict[int, tuple[Path, BinaryIO]]()
            for part in parts_of(path):
                with suppress(FileNotFoundError):
                    file = files.enter_context(open_bytes(part))
                    parts.setdefault(os.fstat(file.fileno()).st_ino, (part, file))
            for part, file in reversed(parts.values()):
                for number, line in enumerate(file.read().split(b"\n"), start=1):
                    try:
                        if _is_complete(line, f"{part}:{number}"):
                            yield parse_line(line, f"{part}:{number}")
                    except ValueError as error:
                        if damaged is None:
                            raise
                        damaged.append(str(error))


def recorded_files(folder: Path) -> list[Path]:
    """Files of a run that there are, of each worker the newest first."""
    workers = sorted((folder / FOLDER).glob("*.jsonl"))
    return [part for path in workers for part in parts_of(path) if part.exists()]


def _read(path: Path, group_id: str | None) -> Recorded | None:
    """The last complete line with this id."""
    wanted = _START + (b"" if group_id is None else json.dumps(group_id).encode() + b",")
    last: tuple[bytes, str] | None = None
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return None
    for number, line in enumerate(data.split(b"\n"), start=1):
        if _is_complete(line, where := f"{path}:{number}") and line.startswith(wanted):
            last = line, where
    return None if last is None else parse_line(*last)


def _is_complete(line: bytes, where: str) -> bool:
    """Raises ValueError for one that does not begin as a recorded group."""
    if not line.startswith(_START[: len(line)]):
        raise ValueError(f"{where} is damaged: it is no recorded group; remove the line")
    return line.endswith(_END)


# One line ------------------------------------------------------------------------------------


class _Column(Struct):
    dtype: Literal[
        "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "float32", "float64",
    ]  # fmt: skip
    shape: tuple[Count, ...]
    values: NDArray[Any]


class _Trajectory(Struct):
    episode: Count
    reward: float
    reward_parts: dict[str, float]
    finish_reason: str
    prompt_length: Count
    version_spans: list[tuple[Count, Count, Count]]
    loss_mask_runs: list[Count]
    """The first run is of zeros and may be empty."""
    tokens: NDArray[Any]
    logprobs: NDArray[Any]
    role: str = ""
    columns: dict[str, _Column] = {}  # older lines have none; the last field, see _END


class _Line(Struct, kw_only=True):
    group_id: str
    at: float
    worker: str
    prompt: PromptRef
    text: str
    sampling: SamplingParams
    messages: dict[int, list[dict[str, Any]]] = {}  # older lines have none
    trajectories: list[_Trajectory]


def _line(
    group: TrajectoryGroup, text: str, messages: Conversations, at: float, worker: str
) -> bytes:
    line = _Line(
        group_id=group.group_id,
        at=at,
        worker=worker,
        prompt=group.prompt,
        text=text,
        sampling=group.sampling,
        messages={episode: [*map(_as_json, said)] for episode, said in messages.items()},
        trajectories=[
            _Trajectory(
                episode=one.episode,
                role=one.role,
                reward=one.reward,
                reward_parts=dict(one.reward_parts),
                finish_reason=one.finish_reason,
                prompt_length=one.prompt_length,
                version_spans=[(span.version, span.start, span.end) for span in one.version_spans],
                loss_mask_runs=_runs(one.loss_mask),
                tokens=one.tokens,
                logprobs=one.rollout_logprobs,
                columns={
                    name: _Column(column.dtype.name, column.shape, column.reshape(-1))  # type: ignore[arg-type]
                    for name, column in one.columns.items()
                },
            )
            for one in group.trajectories
        ],
    )
    return msgspec.json.encode(line, enc_hook=_numbers) + b"\n"


def _as_json(message: Message) -> dict[str, Any]:
    """In OpenAI's format; pictures by their sources, as a data file names them."""
    written, sources = as_openai_message(message), iter(message.pictures)
    for part in written["content"] if message.pictures else ():
        if part["type"] == "image":
            part["image"] = next(sources)
    return written


def _numbers(numbers: NDArray[Any]) -> Raw:
    """Text from which they can be read exactly in their dtype."""
    # Nine digits identify a float32 and are half as long as those of a float64.
    is_short = numbers.dtype in (np.float16, np.float32)
    text = "{:.9g}".format if is_short else str if numbers.dtype.kind in "iu" else json.dumps
    texts = map(text, numbers.tolist())
    pieces = []
    while piece := ",".join(islice(texts, _PIECE)):
        pieces.append(piece)
    return Raw(f"[{','.join(pieces)}]".encode())


def _runs(mask: NDArray[np.uint8]) -> list[int]:
    changes = np.flatnonzero(np.diff(mask, prepend=0)).tolist()
    return np.diff([0, *changes, len(mask)]).tolist()  # type: ignore[no-any-return]


def parse_line(data: bytes, where: str) -> Recorded:
    """Raises ValueError for a line that was not written by `_line`."""
    try:
        line = msgspec.json.decode(data, type=_Line, dec_hook=lambda _, numbers: np.array(numbers))
        group = TrajectoryGroup(
            group_id=line.group_id,
            prompt=line.prompt,
            trajectories=tuple(map(_parse_trajectory, line.trajectories)),
            sampling=line.sampling,
        )
        encode_group(group)  # which checks it
    except (ValueError, TypeError, OverflowError, AssertionError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error!r}; remove the line") from error
    return Recorded(
        group=group, text=line.text, at=line.at, worker=line.worker, messages=line.messages
    )


def _parse_trajectory(line: _Trajectory) -> Trajectory:
    runs = line.loss_mask_runs
    if sum(runs) != len(line.tokens):  # or a few digits would ask for any amount of memory
        raise ValueError(f"a loss mask of {sum(runs)} for {len(line.tokens)} tokens")
    return Trajectory(
        tokens=_exactly(line.tokens, "int32"),
        loss_mask=np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8),
        rollout_logprobs=_exactly(line.logprobs, "float32"),
        version_spans=tuple(
            VersionSpan(version=v, start=start, end=end) for v, start, end in line.version_spans
        ),
        prompt_length=line.prompt_length,
        reward=line.reward,
        finish_reason=line.finish_reason,
        reward_parts=line.reward_parts,
        episode=line.episode,
        role=line.role,
        columns={
            name: _exactly(column.values, column.dtype).reshape(column.shape)
            for name, column in line.columns.items()
        },
    )


def _exactly(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Raises TypeError or ValueError for what the dtype does not hold."""
    if np.dtype(dtype).kind == "u" and numbers.dtype.kind == "i":
        found = numbers.astype(dtype)  # a number that does not fit becomes another
    else:
        found = numbers.astype(dtype, casting="same_kind")
    if found.dtype.kind != "f" and (found != numbers).any():
        raise ValueError(f"{numbers.max()} is no {dtype}")
    return found
