"""The staged versions of one receiver: slots on tmpfs, each a file that an engine can load.

                begin             complete           release
    free ───────────────► arriving ───────► whole ───────────► released ─┐
     ▲                       │ discard        │ discard                  │ no longer the newest,
     └───────────────────────┴────────────────┴──────────────────────────┘ and nothing holds it

A slot is a folder:

    model.safetensors   the bytes; created once, then overwritten by version after version
    manifest.json       exists only if they are a whole version
    released            exists if that version may be served
    holds.json          which readers hold it, and until when

Bytes are written to a slot only after the notes of its last version are removed. So a slot that a
killed process leaves behind is either whole or not listed. The next process in the folder takes it
over and verifies it again.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tensors.checksums import mismatches, staged_checksums
from tensors.host_memory import HostMemory
from tensors.layout import Count, Layout
from weight_sync.types import (
    MANIFEST_NAME,
    Manifest,
    Seconds,
    StoreBusyError,
    StoreFullError,
    Transfer,
    UnknownVersion,
    WeightSyncError,
)

_WEIGHTS = "model.safetensors"
"""The only *.safetensors file of the folder: an engine loads all of them."""
_RELEASED, _HOLDS = "released", "holds.json"
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM}
_log = logging.getLogger(__name__)


class StagedStore:
    """Thread-safe. Its lock guards the state of the slots, never their bytes.

    The caller that began a version writes its bytes. A version that is held, or that is the newest
    released one, is never overwritten.

        store = StagedStore(folder, num_slots=2)
        store.set_layout(layout)                   # creates the files
        slot = store.begin(transfer)               # version 7 arrives
        slot.data.copy_(bytes_of_version_7)
        store.complete(slot, manifest)             # whole
        store.release(7)                           # store.newest == 7
        store.hold(7, "engine-0", ttl_s=60.0)      # not overwritten meanwhile
        store.let_go(7, "engine-0")
    """

    def __init__(
        self,
        folder: Path,
        num_slots: int,
        *,
        should_pin: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over the versions that an earlier process left in this folder.

        `should_pin`: a GPU copies into the slots. `clock` must be consistent across processes.
        Raises WeightSyncError if the folder is in use.
        """
        assert num_slots >= 2, "one version is offered while the next arrives"
        self._folder = folder
        self._num_slots = num_slots
        self._should_pin = should_pin
        self._clock = clock
        self._lock = threading.Lock()
        self._setup = threading.Lock()
        """Locked while slots are created, which takes long; acquired before `_lock`."""
        self._layout: Layout | None = None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._owner: int | None = _lock_folder(folder)
        self._slots = self._recover()

    @property
    def layout(self) -> Layout | None:
        """None before the first `set_layout`."""
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Create the slots, which takes a while; a no-op if they have this layout already.

        Drops versions of another layout. Raises StoreFullError, and StoreBusyError if one of them
        is held.
        """
        with self._setup:
            with self._lock:
                self._check_open()
                if self._layout is None or self._layout.digest != layout.digest:
                    self._drop_for(layout)
            self._make_slots(layout)
            with self._lock:
                self._layout = layout

    @property
    def has_room(self) -> bool:
        """True if every slot has its file, as after `set_layout`."""
        return all(slot.is_mapped for slot in self._slots)

    @property
    def obstacle(self) -> str:
        """Why no slot is free for another version, and the fix; empty if one is."""
        with self._lock:
            return self._obstacle() if self._slots else ""

    @property
    def newest(self) -> int | None:
        """The newest released version."""
        with self._lock:
            return self._newest()

    @property
    def complete_versions(self) -> list[int]:
        """Versions that are whole, released or not, in order."""
        with self._lock:
            return sorted(s.version for s in self._slots if s.manifest and s.version is not None)

    def get(self, version: int) -> Slot:
        """Raises UnknownVersion if it is not whole here."""
        with self._lock:
            return self._whole(version)

    def begin(self, transfer: Transfer) -> Slot:
        """A slot for an arriving version, other than that of a delta's base.

        A transfer that has begun already gets its slot again, with the bytes received so far. Any
        other unfinished version is dropped; nothing may still write to its slot. Raises
        StoreBusyError if no slot is free, UnknownVersion if the base is missing, and
        WeightSyncError if the version is whole already or if the transfer has another layout.
        """
        with self._setup:
            if self._layout:
                self._make_slots(self._layout)  # an earlier process may have made fewer
        with self._lock:
            self._check_open()
            digest = self._layout.digest if self._layout else "none"
            if transfer.layout_digest != digest:
                raise WeightSyncError(
                    f"version {transfer.version} is of the layout {transfer.layout_digest[:12]}, "
                    f"the slots are of {digest[:12]}: set the layout first"
                )
            slot = self._find(transfer.version)
            if slot and slot.manifest:
                raise WeightSyncError(f"version {transfer.version} is staged already")
            if slot and slot.transfer == transfer:
                return slot
            base = transfer.base_version
            return self._assign(transfer, None if base is None else self._whole(base))

    def complete(self, slot: Slot, manifest: Manifest) -> None:
        """Make the version of `slot` whole; the caller has verified every byte.

        Raises WeightSyncError if the slot was given to another version meanwhile.
        """
        with self._lock:
            assert self._layout is not None and manifest.layout.digest == self._layout.digest
            assert manifest.version == slot.version
            if slot not in self._slots or slot.transfer is None:
                raise WeightSyncError(f"version {slot.version} was dropped before it was whole")
            with self._room_for(f"the manifest of version {slot.version}"):
                slot.complete(manifest)

    def release(self, version: Count) -> None:
        """Allow the version to be served. Raises UnknownVersion if it is not whole."""
        with self._lock:
            slot = self._whole(version)
            with self._room_for(f"the mark of version {version}"):
                slot.release()

    def discard(self, version: int) -> None:
        """Drop an arriving or unreleased version; an unknown one is no error."""
        with self._lock:
            slot = self._find(version)
            if slot and slot.is_released:
                raise WeightSyncError(f"version {version} is released and cannot be withdrawn")
            if slot:
                self._empty(slot)

    def hold(self, version: Count, who: str, ttl_s: Seconds) -> None:
        """Do not overwrite the version for `ttl_s`; a second call restarts that time.

        Ends the reader's hold of any other version: a reader that died with it has come back.
        Raises UnknownVersion if the version is not whole here (any more).
        """
        with self._lock:
            slot = self._whole(version)
            for other in self._slots:
                other.let_go_but(version, who)
            slot.hold(version, who, self._clock() + ttl_s)

    def let_go(self, version: Count, who: str) -> None:
        """End a hold; an unknown one is no error, because it may have expired."""
        with self._lock:
            for slot in self._slots:
                slot.let_go(version, who)

    def close(self, remove: bool = False) -> None:
        """Give up the folder, or remove it. Slots that were handed out stay mapped."""
        with self._setup, self._lock:
            if self._owner is None:
                return
            self._slots = []
            self._layout = None
            if remove:
                shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner)
            self._owner = None

    def _find(self, version: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.version == version), None)

    def _whole(self, version: int) -> Slot:
        slot = self._find(version)
        if slot is None or slot.manifest is None:
            whole = [s.version for s in self._slots if s.manifest]
            raise UnknownVersion(f"version {version} is not staged here; staged are {whole}")
        return slot

    def _newest(self) -> int | None:
        released = [s.version for s in self._slots if s.is_released and s.version is not None]
        return max(released, default=None)

    def _empty(self, slot: Slot) -> Slot:
        """Replace it by an empty slot: references to the old one are then known as dropped."""
        empty = slot.emptied()
        self._slots[self._slots.index(slot)] = empty
        return empty

    def _assign(self, transfer: Transfer, base: Slot | None) -> Slot:
        """The slot whose version is needed least, emptied for the arriving one."""
        if obstacle := self._obstacle(base):
            raise StoreBusyError(obstacle)
        free = [slot for slot in self._slots if not self._obstacle_at(slot, base)]
        free = [self._empty(slot) if slot.transfer else slot for slot in free]
        slot = min(free, key=lambda s: (s.version is not None, not s.is_released, s.version or 0))
        slot = self._empty(slot)
        slot.version, slot.transfer = transfer.version, transfer
        return slot

    def _obstacle(self, base: Slot | None = None) -> str:
        reasons = [self._obstacle_at(slot, base) for slot in self._slots]
        if not all(reasons):
            return ""
        return (
            f"no slot of {self._folder} is free: {'; '.join(reasons)}. They expire, or raise "
            "weight_sync.num_staged"
        )

    def _obstacle_at(self, slot: Slot, base: Slot | None) -> str:
        """Empty if the slot may be given to another version."""
        if slot is base:
            return f"version {slot.version} is the base"
        if slot.is_released and slot.version == self._newest():
            return f"version {slot.version} is the newest released"
        return ", ".join(slot.holders(self._clock()))

    def _make_slots(self, layout: Layout) -> None:
        missing = [slot for slot in self._slots if not slot.is_mapped]
        size = _file_bytes(layout)
        what = f"{len(missing)} slots of {size} bytes ({len(missing) * size} bytes together)"
        with self._room_for(what):
            try:
                for slot in missing:
                    slot.make_file(layout)
            except OSError:
                for slot in missing:
                    slot.remove_file()
                raise

    @contextmanager
    def _room_for(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise StoreFullError(
                f"weight_sync.stage_dir: no room in {self._folder} for {what}, "
                f"{shutil.disk_usage(self._folder).free} bytes are free ({error.strerror}); "
                "choose a larger file system, or fewer weight_sync.num_staged"
            ) from error

    def _drop_for(self, layout: Layout) -> None:
        """Forget all versions, but no file that the new layout can use again."""
        whole = [slot for slot in self._slots if slot.manifest]
        if holders := [text for slot in whole for text in slot.holders(self._clock())]:
            raise StoreBusyError(f"{self._folder} cannot change its layout: {'; '.join(holders)}")
        self._slots = [slot.emptied() for slot in self._slots]
        for slot in self._slots:
            if not _has_weights(slot.path, layout):
                slot.remove_file()
        self._layout = None

    def _check_open(self) -> None:
        if self._owner is None:
            raise WeightSyncError(f"the store in {self._folder} is closed")

    def _recover(self) -> list[Slot]:
        """The best slots found in the folder, and new ones up to the number wanted."""
        found = [
            _recovered(folder, self._should_pin) for folder in sorted(self._folder.glob("slot-*"))
        ]
        found.sort(key=lambda s: (s.is_released, s.version is not None, s.version or 0))
        found.reverse()
        if found and (best := found[0].manifest):
            self._layout = best.layout
        for number, slot in enumerate(found):
            if slot.manifest and slot.manifest.layout != self._layout:
                found[number] = slot.emptied()
                found[number].remove_file()
        for slot in found[self._num_slots :]:
            shutil.rmtree(slot.path)
        used = {slot.path for slot in found}
        names = (self._folder / f"slot-{number}" for number in itertools.count())
        slots_of = (Slot(path=path, should_pin=self._should_pin) for path in names)
        unused = (slot for slot in slots_of if slot.path not in used)
        slots = list(itertools.islice(itertools.chain(found, unused), self._num_slots))
        for slot in slots:
            if self._layout and not slot.is_mapped and _has_weights(slot.path, self._layout):
                slot.make_file(self._layout)
        return slots


@dataclass(kw_only=True, slots=True, eq=False)
class Slot:
    """One version in its slot, arriving or whole; or an empty slot.

    Not thread-safe: the store changes it under its lock. An object is for one version only; when
    that is dropped, the store creates another object for the same folder.
    """

    path: Path
    """Folder with model.safetensors, as an engine loads it."""
    should_pin: bool = False
    """Pin the file for copies by a GPU."""
    version: int | None = None
    transfer: Transfer | None = None
    """Set while the version arrives."""
    manifest: Manifest | None = None
    """Set once the version is whole."""
    is_released: bool = False
    _data: Tensor | None = None
    """None until the file is created or mapped."""
    _holds: dict[tuple[int, str], float] = field(default_factory=dict)
    """The time on the store's clock until which a reader holds a version. They belong to
    the folder: a hold outlives the version that it was for."""

    @property
    def data(self) -> Tensor:
        """Flat uint8, writable, shared with the file: its data behind the header."""
        assert self._data is not None
        return self._data

    @property
    def is_mapped(self) -> bool:
        return self._data is not None

    def recover(self) -> None:
        """Take over an earlier process's version. Raises ValueError if it is damaged."""
        (self.path / "holds.draft").unlink(missing_ok=True)
        (self.path / "manifest.draft").unlink(missing_ok=True)
        for version, who, until in _read_note(self.path / _HOLDS) or []:
            self._holds[int(version), str(who)] = float(until)
        fields = _read_note(self.path / MANIFEST_NAME)
        if fields is None:
            return
        manifest = Manifest.from_json(fields)
        if not _has_weights(self.path, manifest.layout):
            raise ValueError("the file is not of its manifest's layout")
        data = _map_weights(self.path, manifest.layout, self.should_pin)
        found = staged_checksums(manifest.layout, data)
        if found != manifest.checksums:
            names = mismatches(manifest.layout, manifest.checksums, found)
            raise ValueError(f"checksums differ: {', '.join(names)}")
        self._data, self.version, self.manifest = data, manifest.version, manifest
        self.is_released = (self.path / _RELEASED).exists()

    def make_file(self, layout: Layout) -> None:
        """Map the file, after creating it if there is none. OSError: no room for it."""
        if not _has_weights(self.path, layout):
            _make_weights(self.path, layout)
        self._data = _map_weights(self.path, layout, self.should_pin)

    def remove_file(self) -> None:
        """Return the bytes to the file system, once nothing has them mapped any more."""
        self._data = None
        (self.path / _WEIGHTS).unlink(missing_ok=True)

    def emptied(self) -> Slot:
        """The same slot without its version, whose notes are removed; its bytes may be written."""
        # In this order: a mark that outlived its manifest would release the slot's next version.
        (self.path / _RELEASED).unlink(missing_ok=True)
        (self.path / MANIFEST_NAME).unlink(missing_ok=True)
        return Slot(
            path=self.path, should_pin=self.should_pin, _data=self._data, _holds=self._holds
        )

    def complete(self, manifest: Manifest) -> None:
        """Raises OSError if there is no room for the note."""
        _write_note(self.path / MANIFEST_NAME, manifest.to_json())
        self.transfer, self.manifest = None, manifest

    def release(self) -> None:
        """Raises OSError if there is no room for the mark."""
        (self.path / _RELEASED).touch()
        self.is_released = True

    def hold(self, version: int, who: str, until: float) -> None:
        self._holds[version, who] = until
        self._note_holds()

    def let_go(self, version: int, who: str) -> None:
        if self._holds.pop((version, who), None) is not None:
            self._note_holds()

    def let_go_but(self, version: int, who: str) -> None:
        for held, reader in [*self._holds]:
            if reader == who and held != version:
                self.let_go(held, who)

    def holders(self, now: float) -> list[str]:
        """The readers that hold it, in words."""
        for key in [key for key, until in self._holds.items() if until <= now]:
            del self._holds[key]
        return [
            f"version {version} is held by {who} for {until - now:.0f} s more"
            for (version, who), until in self._holds.items()
        ]

    def _note_holds(self) -> None:
        """Write them down for the next process: this one may be killed while an engine reads."""
        holds = [[*key, until] for key, until in self._holds.items()]
        with suppress(OSError):  # a full file system must not keep an engine from its weights
            _write_note(self.path / _HOLDS, holds)


def _recovered(folder: Path, should_pin: bool) -> Slot:
    slot = Slot(path=folder, should_pin=should_pin)
    try:
        slot.recover()
    except ValueError as error:
        _log.warning("the staged version in %s was dropped: %s", folder, error)
        return slot.emptied()
    return slot


def _lock_folder(folder: Path) -> int:
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


def _file_bytes(layout: Layout) -> int:
    return len(layout.file_header) + layout.num_bytes


def _make_weights(folder: Path, layout: Layout) -> None:
    """A new file with its header and all its pages. Raises OSError if there is no room for it.

    A first write to a page of tmpfs allocates the page, which is many times slower than writing to
    it again. So the file gets all its pages now, and keeps them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _WEIGHTS
    # The old file lives on while a process has it mapped; truncating it would kill that process.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without this, a write to the mapping of a full tmpfs would end in SIGBUS.
        os.posix_fallocate(descriptor, 0, _file_bytes(layout))
        os.pwrite(descriptor, layout.file_header, 0)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _has_weights(folder: Path, layout: Layout) -> bool:
    """Returns whether there is a file of exactly this layout; its data is not checked."""
    header = layout.file_header
    try:
        with (folder / _WEIGHTS).open("rb") as file:
            is_whole = os.fstat(file.fileno()).st_size == _file_bytes(layout)
            return is_whole and file.read(len(header)) == header
    except FileNotFoundError:
        return False


def _map_weights(folder: Path, layout: Layout, should_pin: bool) -> Tensor:
    """The file's data as flat uint8, shared with the file, with every page mapped already."""
    with (folder / _WEIGHTS).open("r+b") as file:
        memory = HostMemory(_file_bytes(layout), file.fileno())
    data = memory.tensor()[len(layout.file_header) :]
    data[:: mmap.PAGESIZE].bitwise_or_(0)  # writes to every page, and changes nothing
    if should_pin:
        memory.pin()
    return data


def _write_note(path: Path, content: Any) -> None:
    """Write JSON atomically. Raises OSError if there is no room for it."""
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
