"""Copies of the training state in host memory, from which ranks go on after one has died.

    /dev/shm/leash-copies-RUN-ab12cd34/
      step-000012/
        layout.json               the whole tensors
        rank-00.safetensors       this machine's ranks, and those of the machine before it
        rank-00.rng.json
        rank-00.json              written last, with checksums: the rank's copy is whole

A rank copies its state here before the next step. Then a thread sends it to the next machine, so
that the loss of one loses nothing. Older steps are removed once a newer one is whole everywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from isal.isal_zlib import crc32

from configs.run_files import parse_json, read_bytes
from tensors.layout import Count, Layout
from tensors.snapshots import Shard
from trainer_pool.collectives import Collectives
from trainer_pool.state.checkpoint import (
    Checksum,
    TrainState,
    check_file,
    checksum_of,
    refuse_foreign,
)
from trainer_pool.state.shards import (
    LAYOUT_FILE,
    capture_rng,
    rng_file,
    shard_file,
    write_layout,
    write_pieces,
)

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 256 * 2**20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(kw_only=True, slots=True, frozen=True)
class Copy:
    """One rank's copy of a step that all ranks have."""

    folder: Path
    state: TrainState
    unsaved: list[tuple[int, tuple[str, ...]]]
    """On rank 0: steps that were in no durable checkpoint, with their groups."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Note:
    """The content of `rank-00.json`, behind its own CRC-32."""

    state: TrainState
    unsaved: list[tuple[Count, tuple[str, ...]]]
    checksums: dict[str, Checksum]
    """Checksums of the rank's other files, by name."""


class PeerCopies:
    """One rank's part in the copies. All ranks make the same calls in the same order.

    Example:

        copies = PeerCopies(folder, policy.state.layout(), ranks, timeout_s=600)
        copies.save(state, unsaved, policy.state.shards())   # after a step
        ...
        found = copies.newest(after=8)                       # in the ranks that follow
    """

    def __init__(
        self, folder: Path, layout: Layout, ranks: Collectives, *, timeout_s: float
    ) -> None:
        """`folder` is in host memory, and the same path on every machine. Raises ValueError if
        other users could have written to it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_foreign(folder)
        self._folder = folder
        self._layout = layout
        self._ranks = ranks
        self._hosts = ranks.gather_texts(_identity(folder))
        # Beside the training's own: this is used by a thread, and for host memory.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self, state: TrainState, unsaved: list[tuple[int, tuple[str, ...]]], shards: Iterable[Shard]
    ) -> str | None:
        """Copy this rank's state. Returns why there is no copy: one is still being sent, or memory
        is full on a machine."""
        if before := self._joined(self._not_ready()):
            return before
        folder, why = self._step_folder(state.step), ""
        try:
            folder.mkdir(exist_ok=True)
            self._write(folder, state, unsaved, shards)
        except OSError as error:
            why = f"trainer-{self._ranks.rank}: {error}"
        if failed := self._joined(why):
            shutil.rmtree(folder, ignore_errors=True)
            return failed
        if len(set(self._hosts)) == 1:
            self._remove_all_but(state.step)
            return None
        self._thread = threading.Thread(
            target=self._send, args=(state.step,), name="peer-copies", daemon=True
        )
        self._thread.start()
        return None

    def newest(self, after: int) -> Copy | None:
        """The newest step later than `after` that all ranks have a copy of, brought to this
        machine; None if there is none."""
        mine = {step: self._present(step) for step in self._steps() if step > after}
        steps = sorted(
            {s for text in self._ranks.gather_texts(json.dumps([*mine])) for s in json.loads(text)}
        )
        for step in reversed(steps):
            own = mine.get(step, {})
            lineages = [own.get(rank, "") for rank in range(self._ranks.num_ranks)]
            held = [json.loads(t) for t in self._ranks.gather_texts(json.dumps(lineages))]
            holders = [_holder(rank, held, self._hosts) for rank in range(self._ranks.num_ranks)]
            if None in holders or len({name for row in held for name in row if name}) > 1:
                continue
            self._fetch(step, [holder for holder in holders if holder is not None])
            if (found := self._checked(step)) is not None:
                return found
        return None

    def _checked(self, step: int) -> Copy | None:
        """None if the files of a rank are not as they were written."""
        folder, rank = self._step_folder(step), self._ranks.rank
        note, why = None, ""
        try:
            note = _read_note(folder, rank)
            for name, expected in note.checksums.items():
                check_file(folder / name, expected)
        except (OSError, ValueError) as error:
            why = f"trainer-{rank}: {error}"
        if damaged := self._joined(why):
            log.warning("the copy of step %d in memory is not used: %s", step, damaged)
            return None
        assert note is not None
        return Copy(folder=folder, state=note.state, unsaved=note.unsaved)

    def clear(self, kept: Copy | None) -> None:
        """Remove all others: later ones are of steps that are undone now."""
        self._remove_all_but(None if kept is None else kept.state.step)
        self._ranks.barrier()

    def _not_ready(self) -> str:
        error, self._error = self._error, None
        if self._thread is not None and self._thread.is_alive():
            return "the copy before is still being sent"
        return "" if error is None else f"trainer-{self._ranks.rank} could not send: {error}"

    def _joined(self, text: str) -> str:
        """The texts of all ranks, equal ones once; collective."""
        return "; ".join(dict.fromkeys(filter(None, self._ranks.gather_texts(text[:500]))))

    def _write(
        self,
        folder: Path,
        state: TrainState,
        unsaved: list[tuple[int, tuple[str, ...]]],
        shards: Iterable[Shard],
    ) -> None:
        rank = self._ranks.rank
        _state_file(folder, rank).unlink(missing_ok=True)
        write_layout(folder, self._layout)
        sums = {
            shard_file(folder, rank).name: write_pieces(
                folder, self._layout, rank, (shard.tensor for shard in shards)
            )
        }
        rng_file(folder, rank).write_text(capture_rng())
        for file in (folder / LAYOUT_FILE, rng_file(folder, rank)):
            sums[file.name] = checksum_of(file)
        note = msgspec.json.encode(_Note(state=state, unsaved=unsaved, checksums=sums))
        file = _state_file(folder, rank)
        part = file.with_name(f".{file.name}.part")
        part.write_bytes(b"%08x%b" % (crc32(note), note))
        part.replace(file)

    # Between machines ----------------------------------------------------------------------------

    def _send(self, step: int) -> None:
        """To the next machine, and what comes from the one before; on a thread."""
        try:
            for rank in range(len(self._hosts)):
                self._transfer(step, rank, _next_host(rank, self._hosts), rank)
            dist.barrier(group=self._group)
            self._remove_all_but(step)
        except (RuntimeError, OSError) as error:
            # A rank has died, or memory is full here: what was there before is still there.
            self._error = error

    def _fetch(self, step: int, holders: list[int]) -> None:
        """Give each rank that lacks it its copy."""
        self._step_folder(step).mkdir(exist_ok=True)
        for rank, holder in enumerate(holders):
            if self._hosts[holder] != self._hosts[rank]:
                self._transfer(step, holder, rank, rank)
        dist.barrier(group=self._group)

    def _transfer(self, step: int, source: int, target: int, owner: int) -> None:
        """The files of rank `owner`, from one rank to another, the state file last."""
        me, folder = self._ranks.rank, self._step_folder(step)
        if me not in (source, target):
            return
        for file in (
            shard_file(folder, owner),
            rng_file(folder, owner),
            _state_file(folder, owner),
        ):
            if me == source:
                self._send_file(file, target)
            else:
                self._receive_file(file, source)
        if me == target:
            write_layout(folder, self._layout)

    def _send_file(self, file: Path, target: int) -> None:
        data = np.empty(0, np.uint8)
        if file.stat().st_size:
            data = np.memmap(file, np.uint8, "c")  # copy-on-write: torch wants a writable array
        dist.send(torch.tensor([len(data)]), target, group=self._group)
        for start in range(0, len(data), _MESSAGE_BYTES):
            part = torch.from_numpy(data[start : start + _MESSAGE_BYTES])
            dist.send(part, target, group=self._group)

    def _receive_file(self, file: Path, source: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        buffer = torch.empty(min(_MESSAGE_BYTES, int(size)), dtype=torch.uint8)
        part = file.with_name(f".{file.name}.part")
        with part.open("wb") as out:
            for start in range(0, int(size), _MESSAGE_BYTES):
                piece = buffer[: min(_MESSAGE_BYTES, int(size) - start)]
                dist.recv(piece, source, group=self._group)
                out.write(piece.numpy().data)
        part.replace(file)

    # Files ---------------------------------------------------------------------------------------

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _steps(self) -> Iterator[int]:
        return (int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*"))

    def _present(self, step: int) -> Mapping[int, str]:
        """The ranks whose copies are whole on this machine, with the lineage of each."""
        folder = self._step_folder(step)
        lineages = {}
        for rank in range(self._ranks.num_ranks):
            with contextlib.suppress(OSError, ValueError):  # missing or damaged
                lineages[rank] = _read_note(folder, rank).state.lineage
        return lineages

    def _remove_all_but(self, kept: int | None) -> None:
        for step in list(self._steps()):
            if step != kept:
                shutil.rmtree(self._step_folder(step), ignore_errors=True)


def _state_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:02d}.json"


def _read_note(folder: Path, rank: int) -> _Note:
    """Raises ValueError if it is damaged, and OSError."""
    file = _state_file(folder, rank)
    data = read_bytes(file)
    if data[:8] != b"%08x" % crc32(data[8:]):
        raise ValueError(f"{file} is damaged: its CRC-32 is not that of what was written")
    return parse_json(data[8:], _Note, str(file))


def _identity(folder: Path) -> str:
    """The same on all ranks that share the folder."""
    status = os.stat(folder)
    return f"{BOOT_ID.read_text().strip()}/{status.st_dev}/{status.st_ino}"


def _next_host(rank: int, hosts: list[str]) -> int:
    """The rank on another machine that holds the copy of this one too."""
    others = (other % len(hosts) for other in range(rank + 1, rank + len(hosts)))
    return next(other for other in others if hosts[other] != hosts[rank])


def _holder(rank: int, held: list[list[str]], hosts: list[str]) -> int | None:
    """A rank from which `rank` gets its copy: itself, if its machine has it."""
    if held[rank][rank]:
        return rank
    return next((other for other, row in enumerate(held) if row[rank]), None)
