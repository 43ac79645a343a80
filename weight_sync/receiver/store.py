"""One slot of a `StagedStore`: its files, and what is known of them. Not thread-safe.

    model.safetensors   the bytes; made once, then written over by version after version
    manifest.json       is there exactly if they are those of a whole version
    released            is there if that version may be served
    holds.json          who reads it, and until when

A first write to a page of tmpfs makes the page: many times slower than writing to it again. So the
file is given all its pages when it is made, and keeps them.

The versions that one receiver has staged: slots on tmpfs, each a file that an engine can load.

                begin             complete           release
    free ───────────────► arriving ───────► whole ───────────► released ─┐
     ▲                       │ discard        │ discard                  │ no longer the newest,
     └───────────────────────┴────────────────┴──────────────────────────┘ nobody holds it

Bytes arrive in a slot only after the notes of its last version are gone. So what a killed process
leaves behind is whole or is not listed; the next one in the folder takes it over, and verifies it
again.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import math
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

import torch
from torch import Tensor

from weight_sync.checksums import staged_checksums
from weight_sync.errors import StoreBusyError, StoreFullError
from weight_sync.layout import Layout, Manifest, Transfer, mismatches
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


_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM}
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Slot:
    """One version in the store, arriving or whole."""

    version: int
    path: Path
    """Folder with model.safetensors, as an engine loads it."""
    data: Tensor
    """Flat uint8, writable, shared with the file: its data behind the header."""
    manifest: Manifest | None
    """None of a version that arrives."""
    _store: StagedStore = field(repr=False)
    _place: Place = field(repr=False)
    _transfer: Transfer | None = field(repr=False)

    def complete(self, manifest: Manifest) -> None:
        """Every byte is there and verified, says the caller; from here on the version is whole.

        Raises WeightSyncError if the slot was given to another version meanwhile, or if the
        manifest is not one of this version in the store's layout.
        """
        self._store._complete(self, manifest)


class StagedStore:
    """Thread-safe. Its lock guards what is known of the slots, never their bytes.

    Bytes are written by the one who began a version; a version that is held or the newest
    released one is never given to another.
    """

    def __init__(
        self, folder: Path, num_slots: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes over what an earlier process of this folder left.

        `clock` must go on across processes. Raises WeightSyncError if the folder is in use.
        """
        assert num_slots >= 2, "one version is offered while the next arrives"
        self._folder = folder
        self._num_slots = num_slots
        self._clock = clock
        self._lock = threading.Lock()
        self._setup = threading.Lock()
        """Held while slots are made, which is long; taken before the other one."""
        self._layout: Layout | None = None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._owner: int | None = own_folder(folder)
        self._places = self._recover()

    @property
    def layout(self) -> Layout | None:
        """None before the first `set_layout`."""
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Makes the slots, which takes a while; no-op if they are of this layout already.

        Versions of another layout are dropped. Raises StoreFullError, and StoreBusyError if one of
        them is held.
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
    def newest(self) -> int | None:
        """The newest released version."""
        with self._lock:
            return self._newest()

    @property
    def complete_versions(self) -> list[int]:
        """Versions that are whole, released or not, in order."""
        with self._lock:
            return sorted(p.version for p in self._places if p.manifest and p.version is not None)

    def get(self, version: int) -> Slot:
        """Raises WeightSyncError if the version is not whole here."""
        with self._lock:
            return self._slot(self._whole(version))

    def begin(self, transfer: Transfer) -> Slot:
        """A slot for a version that arrives; one for a delta has the bytes of its base already.

        For the transfer that arrives already: its slot, with the bytes that came so far. Another
        unfinished version is dropped; whoever writes to its slot must have stopped. Raises
        StoreBusyError if no slot can be taken, WeightSyncError if the version is whole already, if
        the base is not here or if the transfer is of another layout.
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
            place = self._find(transfer.version)
            if place and place.manifest:
                raise WeightSyncError(f"version {transfer.version} is staged already")
            if place and place.transfer == transfer and not place.is_copying:
                return self._slot(place)
            if transfer.base_version is None:
                return self._slot(self._take(transfer, base=None))
            base = self._whole(transfer.base_version)
            place = self._take(transfer, base)
            slot, source = self._slot(place), self._slot(base).data
            reader = f"the copy for version {transfer.version}"
            base.hold(transfer.base_version, reader, math.inf)
            place.is_copying = True
        try:
            slot.data.copy_(source)
        finally:
            with self._lock:
                base.let_go(transfer.base_version, reader)
                place.is_copying = False
        return slot

    def release(self, version: int) -> None:
        """From here on it may be served. Raises WeightSyncError if it is not whole."""
        with self._lock:
            place = self._whole(version)
            with self._room_for(f"the mark of version {version}"):
                place.release()

    def discard(self, version: int) -> None:
        """Drops a version that arrives or is not released; an unknown one is no error."""
        with self._lock:
            place = self._find(version)
            if place and place.is_released:
                raise WeightSyncError(f"version {version} is released: it cannot be taken back")
            if place:
                place.forget()

    def hold(self, version: int, who: str, ttl_s: float) -> None:
        """Keeps the bytes as they are for `ttl_s`; again: for so long from now on.

        Raises WeightSyncError if the version is not whole here (any more).
        """
        with self._lock:
            place = self._whole(version)
            place.hold(version, who, self._clock() + ttl_s)

    def let_go(self, version: int, who: str) -> None:
        """Ends a hold; an unknown one is no error: it may have expired."""
        with self._lock:
            for place in self._places:
                place.let_go(version, who)

    def close(self, remove: bool = False) -> None:
        """Leaves the folder to the next process, or to nobody. The slots handed out stay mapped."""
        with self._setup, self._lock:
            if self._owner is None:
                return
            self._places = []
            self._layout = None
            if remove:
                shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner)
            self._owner = None

    def _complete(self, slot: Slot, manifest: Manifest) -> None:
        layout = self._layout
        is_ours = layout is not None and manifest.layout.digest == layout.digest
        if manifest.version != slot.version or not is_ours:
            raise WeightSyncError(
                f"the manifest is of version {manifest.version} in the layout "
                f"{manifest.layout.digest[:12]}; the slot is version {slot.version}'s in "
                f"{layout.digest[:12] if layout else 'none'}"
            )
        with self._lock:
            place = slot._place
            if slot._transfer is None or place.transfer is not slot._transfer:
                raise WeightSyncError(f"version {slot.version} was dropped before it was whole")
            with self._room_for(f"the manifest of version {slot.version}"):
                place.complete(manifest)

    def _slot(self, place: Place) -> Slot:
        assert place.version is not None and place.data is not None
        return Slot(
            version=place.version,
            path=place.folder,
            data=place.data,
            manifest=place.manifest,
            _store=self,
            _place=place,
            _transfer=place.transfer,
        )

    def _find(self, version: int) -> Place | None:
        return next((place for place in self._places if place.version == version), None)

    def _whole(self, version: int) -> Place:
        place = self._find(version)
        if place is None or place.manifest is None:
            whole = [p.version for p in self._places if p.manifest]
            raise WeightSyncError(f"version {version} is not staged here; staged are {whole}")
        return place

    def _newest(self) -> int | None:
        released = [p.version for p in self._places if p.is_released and p.version is not None]
        return max(released, default=None)

    def _take(self, transfer: Transfer, base: Place | None) -> Place:
        """The slot whose version is missed least, emptied for the one that arrives."""
        reasons = {place.folder: self._reason_to_keep(place, base) for place in self._places}
        free = [place for place in self._places if not reasons[place.folder]]
        if not free:
            raise StoreBusyError(
                f"no slot of {self._folder} is free for version {transfer.version}: "
                f"{'; '.join(reasons.values())}. They expire, or raise weight_sync.num_staged"
            )
        for place in free:
            if place.transfer:
                place.forget()
        place = min(free, key=lambda p: (p.version is not None, not p.is_released, p.version or 0))
        place.forget()
        place.version, place.transfer = transfer.version, transfer
        return place

    def _reason_to_keep(self, place: Place, base: Place | None) -> str:
        """Empty if the slot may be given to another version."""
        if place.is_copying:
            return f"version {place.version} is being copied from its base"
        if place is base:
            return f"version {place.version} is the base"
        if place.is_released and place.version == self._newest():
            return f"version {place.version} is the newest released"
        return ", ".join(place.holders(self._clock()))

    def _make_slots(self, layout: Layout) -> None:
        missing = [place for place in self._places if place.data is None]
        size = file_bytes(layout)
        what = f"{len(missing)} slots of {size} bytes ({len(missing) * size} bytes together)"
        with self._room_for(what):
            try:
                for place in missing:
                    place.make(layout)
            except OSError:
                for place in missing:
                    place.remove_file()
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
        """Forgets all versions; keeps files that the new layout can use again."""
        whole = [place for place in self._places if place.manifest]
        if holders := [text for place in whole for text in place.holders(self._clock())]:
            raise StoreBusyError(f"{self._folder} cannot change its layout: {'; '.join(holders)}")
        for place in self._places:
            place.drop_for(layout)
        self._layout = None

    def _check_open(self) -> None:
        if self._owner is None:
            raise WeightSyncError(f"the store in {self._folder} is closed")

    def _recover(self) -> list[Place]:
        """The slots that lie in the folder, as many as there may be, and new ones up to that."""
        found = [Place(folder=folder) for folder in sorted(self._folder.glob("slot-*"))]
        for place in found:
            try:
                place.recover()
            except ValueError as error:
                _log.warning("what was staged in %s is dropped: %s", place.folder, error)
                place.forget()
        found.sort(key=lambda p: (p.is_released, p.version is not None, p.version or 0))
        found.reverse()
        if found and (best := found[0].manifest):
            self._layout = best.layout
        for place in found:
            if place.manifest and place.manifest.layout != self._layout:
                place.remove_file()
        for place in found[self._num_slots :]:
            shutil.rmtree(place.folder)
        taken = {place.folder for place in found}
        names = (self._folder / f"slot-{number}" for number in itertools.count())
        unused = (Place(folder=folder) for folder in names if folder not in taken)
        return list(itertools.islice(itertools.chain(found, unused), self._num_slots))
