"""One slot of a `StagedStore`: its files, and what is known of them. Not thread-safe.

    model.safetensors   the bytes; made once, then written over by version after version
    manifest.json       is there exactly if they are those of a whole version
    released            is there if that version may be served
    holds.json          who reads it, and until when

A first write to a page of tmpfs makes the page: many times slower than writing to it again. So the
file is given all its pages when it is made, and keeps them.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weight_sync.checksums import staged_checksums
from weight_sync.manifest import Layout, Manifest, Transfer, mismatches
from weight_sync.types import WeightSyncError

_WEIGHTS = "model.safetensors"
"""The only file that an engine looks at: it loads every *.safetensors of the folder."""


@dataclass(kw_only=True, slots=True, eq=False)
class Place:
    """A slot: empty, or with a version that arrives or is whole. Times are of the store's clock."""

    folder: Path
    data: Tensor | None = None
    """Flat uint8, shared with the file; None as long as it is not made or not mapped."""
    version: int | None = None
    transfer: Transfer | None = None
    """While the version arrives."""
    manifest: Manifest | None = None
    """Once it is whole."""
    is_released: bool = False
    is_copying: bool = False
    """The base of a delta is being copied into it: nobody else may write there."""
    _holds: dict[tuple[int, str], float] = field(default_factory=dict)
    """Until when who reads which version. They outlive the version that they were for."""

    def recover(self) -> None:
        """Takes over what an earlier process left. Raises ValueError if that is damaged."""
        (self.folder / "holds.draft").unlink(missing_ok=True)
        (self.folder / "manifest.draft").unlink(missing_ok=True)
        for version, who, until in _read_note(self._holds_path) or []:
            self._holds[int(version), str(who)] = float(until)
        fields = _read_note(self._manifest_path)
        if fields is None:
            return
        manifest = Manifest.from_json(fields)
        if not _has_weights(self.folder, manifest.layout):
            raise ValueError("the file is not of its manifest's layout")
        data = _map_weights(self.folder, manifest.layout)
        found = staged_checksums(manifest.layout, data)
        if found != manifest.checksums:
            names = mismatches(manifest.layout, manifest.checksums, found)
            raise ValueError(f"checksums differ: {', '.join(names)}")
        self.data, self.version, self.manifest = data, manifest.version, manifest
        self.is_released = self._released_path.exists()

    def make(self, layout: Layout) -> None:
        """Maps the file of this layout, a new one if there is none. OSError: no room for it."""
        if self.data is None:
            if not _has_weights(self.folder, layout):
                _make_weights(self.folder, layout)
            self.data = _map_weights(self.folder, layout)

    def drop_for(self, layout: Layout) -> None:
        """Forgets its version; keeps a file that a version of the new layout can be written to."""
        if _has_weights(self.folder, layout):
            self.forget()
        else:
            self.remove_file()

    def remove_file(self) -> None:
        """Gives its bytes back to the file system, once nobody has them mapped any more."""
        self.forget()
        self.data = None
        (self.folder / _WEIGHTS).unlink(missing_ok=True)

    def forget(self) -> None:
        """Its version is no more; its bytes may be written."""
        # In this order: a mark that outlived its manifest would release the slot's next version.
        self._released_path.unlink(missing_ok=True)
        self._manifest_path.unlink(missing_ok=True)
        self.version = self.transfer = self.manifest = None
        self.is_released = False

    def complete(self, manifest: Manifest) -> None:
        """The version that arrives is whole. Raises OSError if there is no room for the note."""
        _write_note(self._manifest_path, manifest.to_json())
        self.transfer, self.manifest = None, manifest

    def release(self) -> None:
        """Raises OSError if there is no room for the mark."""
        self._released_path.touch()
        self.is_released = True

    def hold(self, version: int, who: str, until: float) -> None:
        self._holds[version, who] = until
        self._note_holds()

    def let_go(self, version: int, who: str) -> None:
        if self._holds.pop((version, who), None) is not None:
            self._note_holds()

    def holders(self, now: float) -> list[str]:
        """Who reads it, in words."""
        self._holds = {key: until for key, until in self._holds.items() if until > now}
        return [
            f"version {version} is held by {who}"
            + ("" if until == math.inf else f" for {until - now:.0f} s more")
            for (version, who), until in self._holds.items()
        ]

    def _note_holds(self) -> None:
        """For the next process, if this one is killed while an engine reads."""
        holds = [[*key, until] for key, until in self._holds.items() if until < math.inf]
        with suppress(OSError):  # a full file system may not keep an engine from its weights
            _write_note(self._holds_path, holds)

    @property
    def _manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def _released_path(self) -> Path:
        return self.folder / "released"

    @property
    def _holds_path(self) -> Path:
        return self.folder / "holds.json"


def own_folder(folder: Path) -> int:
    """A lock on the folder that ends with this process, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WeightSyncError(
            f"{folder} is in use by another receiver: end it, or set weight_sync.stage_dir"
        ) from None
    return descriptor


def file_bytes(layout: Layout) -> int:
    return len(layout.file_header) + layout.num_bytes


def _make_weights(folder: Path, layout: Layout) -> None:
    """A new file with its header and all its pages. Raises OSError if there is no room for it.

    What lay there goes with the last process that has it mapped; cutting it would kill that one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _WEIGHTS
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without this a full tmpfs would show as SIGBUS at some write to the mapping.
        os.posix_fallocate(descriptor, 0, file_bytes(layout))
        os.pwrite(descriptor, layout.file_header, 0)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _has_weights(folder: Path, layout: Layout) -> bool:
    """Whether a file of just this layout lies there; says nothing of its data."""
    header = layout.file_header
    try:
        with (folder / _WEIGHTS).open("rb") as file:
            is_whole = os.fstat(file.fileno()).st_size == file_bytes(layout)
            return is_whole and file.read(len(header)) == header
    except FileNotFoundError:
        return False


def _map_weights(folder: Path, layout: Layout) -> Tensor:
    """The file's data as flat uint8, shared with the file; every page is in reach at once."""
    with (folder / _WEIGHTS).open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), file_bytes(layout))
    data = torch.frombuffer(mapping, dtype=torch.uint8)[len(layout.file_header) :]
    data[:: mmap.PAGESIZE].bitwise_or_(0)  # writes to every page, and changes nothing
    return data


def _write_note(path: Path, content: Any) -> None:
    """JSON that is there whole or not at all. Raises OSError if there is no room for it."""
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(json.dumps(content))
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _read_note(path: Path) -> Any:
    """None if there is none. Raises ValueError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
