"""Checkpoints on disk: each is complete or absent, whenever a process is killed.

    checkpoints/
      .writing-step-000100/     being written; the next checkpoint removes one that a crash left
      step-000050/
        state.json              step and version of the run
        rank-00.safetensors ... every rank's shards, and layout.json, which describes them
        groups.dump             the buffer's groups, for a resume with an empty Redis
        checksums.json          sizes and CRC-32 of the others; the dump has its own inside
      latest                    names the newest complete one
      version                   the newest number that was announced for weights
      best                      the one that the controller has found the best by trainer.keep_best

Written, synced to disk, renamed, and only then named by `latest`: after `commit` returns, the
checkpoint survives a crash of the machine, and its groups may be acknowledged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from buffer.types import PromptRef
from configs.run_files import read_json, read_text
from host.machine import sync
from tensors.layout import Count

GROUPS_FILE = "groups.dump"
_STATE_FILE = "state.json"
_CHECKSUMS_FILE = "checksums.json"
_LATEST_FILE = "latest"
_VERSION_FILE = "version"
_BEST_FILE = "best"
_NAME = re.compile(r"step-(\d{6,})")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_BLOCK_BYTES = 4 * 2**20


@dataclass(kw_only=True, slots=True, frozen=True)
class Checksum:
    """Tells a file from another one, or from a damaged copy."""

    num_bytes: Count
    crc32: Count


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainState:
    """State of a run at a checkpoint."""

    step: Count
    """Completed steps."""
    version: Count
    """Version of the weights in the checkpoint."""
    num_updates: Count
    """Updates of the optimizer."""
    lineage: str
    """Identifies the chain of checkpoints; a resume starts a new one."""
    consumed_group_ids: tuple[str, ...]
    """Groups trained on since the last checkpoint."""
    task_positions: dict[Count, Count]
    """Each rollout worker's position in its prompts."""
    critic_updates: Count = 0
    """Updates of a critic's optimizer."""
    untrained_prompts: tuple[PromptRef, ...]
    """Prompts before these positions that are not trained: all that a resume with an empty Redis
    has to run again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Best:
    """The best checkpoint so far."""

    step: Count
    metric: str
    value: float


class CheckpointStore:
    """A run's checkpoints. Rank 0 calls `begin` and `commit` or `discard`; in between all ranks
    write to `writing_folder`.

    Example:

        store.begin(50)
        ...                               # each rank writes to store.writing_folder(50)
        store.commit(state)               # durable, as checkpoints/step-000050
        folder, state = store.latest()
    """

    def __init__(self, folder: Path, *, num_kept: int = 2, keep_every: int | None = None) -> None:
        """Keeps the newest `num_kept`, and those of every `keep_every` steps for ever."""
        self.folder = folder
        self._num_kept = num_kept
        self._keep_every = keep_every

    def writing_folder(self, step: int) -> Path:
        """The folder of the shards of `step` until the checkpoint is committed."""
        return self.folder / f".writing-step-{step:06d}"

    def begin(self, step: int) -> None:
        """Create an empty folder to write to; removes what an interrupted checkpoint left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(stat.S_IMODE(self.folder.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        self.writing_folder(step).mkdir()

    def commit(self, state: TrainState, known: Mapping[str, Checksum] | None = None) -> Path:
        """Make the written checkpoint durable and the latest; removes old ones.

        `known`: checksums by file name, which were taken as the files were written. The other files
        are read for theirs.
        """
        written = self.writing_folder(state.step)
        (written / _STATE_FILE).write_text(json.dumps(asdict(state), indent=1))
        files = [path for path in sorted(written.rglob("*")) if path.is_file()]
        names = {path.relative_to(written).as_posix(): path for path in files}
        known = known or {}
        sums = {n: asdict(known.get(n) or checksum_of(path)) for n, path in names.items()}
        sums.pop(GROUPS_FILE, None)
        (written / _CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1))
        _close_to_others(written)
        for path in (*written.rglob("*"), written):
            sync(path)
        final = self._final_folder(state.step)
        if final.exists():
            # Only for a step repeated after a rollback: `latest` is older than this folder.
            shutil.rmtree(final)
        written.rename(final)
        sync(self.folder)
        self._put(_LATEST_FILE, final.name)
        self._prune(state.step)
        return final

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed; never raises."""
        shutil.rmtree(self.writing_folder(step), ignore_errors=True)

    def latest(self) -> tuple[Path, TrainState] | None:
        """The newest complete checkpoint with its state; None if there is none.

        Raises ValueError if `latest` names a folder that is not a checkpoint, or that another user
        could have written to.
        """
        pointer = self.folder / _LATEST_FILE
        if not pointer.exists():
            return None
        name = read_text(pointer).strip()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{pointer} names {name[:80]!r}, which is not a checkpoint")
        folder = self.folder / name
        for path in (self.folder, pointer):
            _refuse_of_others(path)
        refuse_foreign(folder)
        try:
            return folder, read_state(folder)
        except ValueError as error:
            raise ValueError(
                f"{pointer} names {folder}, which is not a readable checkpoint ({error}); "
                f"write the name of a complete one into {pointer}"
            ) from error

    def note_version(self, version: int) -> None:
        """Make durable that `version` names weights, before anybody gets them. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _VERSION_FILE
        is_new = not path.exists()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            # In place: it needs no room on a full disk, and a sector is written whole or not.
            os.pwrite(file, b"%020d\n" % version, 0)
            os.fsync(file)
        finally:
            os.close(file)
        if is_new:
            sync(self.folder)

    def noted_version(self) -> int:
        """The newest that was noted; -1 before the first. Raises ValueError if it is damaged."""
        path = self.folder / _VERSION_FILE
        try:
            text = read_text(path)
        except FileNotFoundError:
            return -1
        if not re.fullmatch(r"\d{20}\n", text):
            raise ValueError(
                f"{path} is damaged: it does not hold 20 digits; write a number there that is "
                "larger than any version that the run has published"
            )
        return int(text)

    def best(self) -> Best | None:
        """The one that is kept as the best; None if none is. Raises ValueError if it is damaged."""
        try:
            return read_json(self.folder / _BEST_FILE, Best)
        except FileNotFoundError:
            return None

    def note_best(self, one: Best) -> bool | None:
        """Keeps the checkpoint of `one` if it is the best so far. Returns False if it is gone, or
        could not be written, and None if it is not written yet: until then the former stays.

        A repeated step, after a rollback, has other weights than before and replaces itself. Raises
        ValueError and OSError.
        """
        before, newest, steps = self.best(), self.latest(), self.steps()
        is_other = before is not None and before.metric == one.metric and before.step != one.step
        if before is not None and is_other and before.step in steps and before.value >= one.value:
            return True
        if newest is None or newest[1].step < one.step:
            return None
        if one.step not in steps:
            return False
        self._put(_BEST_FILE, json.dumps(asdict(one)))
        return True

    def _put(self, name: str, line: str) -> None:
        draft = self.folder / f".{name}"
        draft.write_text(line + "\n")
        _close_to_others(draft)
        sync(draft)
        draft.replace(self.folder / name)
        sync(self.folder)

    def _prune(self, newest: int) -> None:
        # After a rollback there are later ones, of steps that were undone. They must not count: the
        # one just written would be removed as older than they are.
        steps = [step for step in self.steps() if step <= newest]
        try:
            best = self.best()
        except ValueError:
            return  # which one is to be kept is unknown until the file is restored or removed
        for step in steps[: -self._num_kept]:
            if best is not None and step == best.step:
                continue
            if self._keep_every is None or step % self._keep_every:
                # If it fails, the next one tries again.
                shutil.rmtree(self._final_folder(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints; other folders beside them do not count."""
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")]
        return sorted(int(name[1]) for name in names if name)

    def _final_folder(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"


def read_state(folder: Path) -> TrainState:
    """The state in the checkpoint `folder`, all of whose files have the size that was written.
    Raises ValueError naming the file that is not as it was written."""
    sums = _read_checksums(folder)
    for name, expected in sums.items():
        _check_size(folder / name, expected)
    if _STATE_FILE not in sums:
        raise ValueError(f"{folder / _CHECKSUMS_FILE} does not list {_STATE_FILE}")
    check_file(folder / _STATE_FILE, sums[_STATE_FILE])
    return read_json(folder / _STATE_FILE, TrainState)


def check_checkpoint(folder: Path, part: int = 0, num_parts: int = 1) -> None:
    """Read the files of the checkpoint `folder`, or those of one part of them, of about the same
    size each. Raises ValueError naming one that is not as it was written."""
    sums = _read_checksums(folder)
    by_size = sorted(sums, key=lambda name: (-sums[name].num_bytes, name))
    try:
        for name in by_size[part::num_parts]:
            check_file(folder / name, sums[name])
    except ValueError as error:
        raise ValueError(
            f"{error}; restore the file, or write the name of another checkpoint into "
            f"{folder.parent / _LATEST_FILE}"
        ) from error


def checksum_of(path: Path) -> Checksum:
    """Raises OSError."""
    size, running = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            size, running = size + len(block), crc32(block, running)
    return Checksum(num_bytes=size, crc32=running)


def check_file(path: Path, expected: Checksum) -> None:
    """Raises ValueError if a file is not as it was written."""
    _check_size(path, expected)
    try:
        found = checksum_of(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        raise ValueError(f"{path} is damaged: its CRC-32 is not that of what was written")


def _check_size(path: Path, expected: Checksum) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if status.st_size != expected.num_bytes:
        raise ValueError(
            f"{path} is damaged: it has {status.st_size} bytes, and {expected.num_bytes} were "
            "written"
        )


def _read_checksums(folder: Path) -> dict[str, Checksum]:
    try:
        return read_json(folder / _CHECKSUMS_FILE, dict[str, Checksum])
    except FileNotFoundError as error:
        raise ValueError(f"{folder / _CHECKSUMS_FILE} is not there") from error


def refuse_foreign(folder: Path) -> None:
    """Raises ValueError unless only this user can have written the folder and its content."""
    for path in (folder, *folder.rglob("*")):
        _refuse_of_others(path)


def _refuse_of_others(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return  # `latest` reports it
    if stat.S_ISLNK(status.st_mode):
        why, fix = "is a symbolic link", "replace it with the files"
    elif not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        why, fix = "is not a regular file", "replace it with one"
    elif status.st_uid != os.geteuid():
        why, fix = f"belongs to user {status.st_uid}, not to you ({os.geteuid()})", "chown it"
    elif status.st_mode & _WRITABLE_BY_OTHERS:
        why, fix = "can be written by others", "chmod -R go-w"
    else:
        return
    raise ValueError(
        f"{path} {why}: it may not be what this run has written. If you trust it, {fix}"
    )


def _close_to_others(folder: Path) -> None:
    """Remove write access of other users, which a lax umask may have granted."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
