"""Staged versions survive restarts, SIGKILL, damage and concurrent readers."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors.torch import load_file

from tensors.checksums import staged_checksums
from tests.support.weights.staging import LAYOUT, Clock, content, delta, full, manifest_of, stage
from weight_sync.receiver.store import Slot, StagedStore
from weight_sync.types import StoreBusyError, Transfer, WeightSyncError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[StagedStore]:
    store = StagedStore(tmp_path / "stage", 2, clock=clock)
    store.set_layout(LAYOUT)
    yield store
    store.close()


def again(store: StagedStore, folder: Path, num_slots: int = 2) -> StagedStore:
    """The store of the next process in the folder."""
    store.close()
    return StagedStore(folder, num_slots)


def test_restart_finds_what_was_whole_and_what_was_released(
    store: StagedStore, tmp_path: Path
) -> None:
    stage(store, 1)
    stage(store, 2, should_release=False)
    store = again(store, tmp_path / "stage")
    assert store.layout == LAYOUT
    assert (store.newest, store.complete_versions) == (1, [1, 2])
    for version in (1, 2):
        assert torch.equal(store.get(version).data, content(version))
        assert store.get(version).manifest == manifest_of(version, content(version))
    store.close()


def test_restart_lists_no_version_that_was_on_its_way(
    store: StagedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage(store, 1)
    stage(store, 2)
    store.begin(full(3)).data[:10] = 1  # to the slot of version 1
    store = again(store, tmp_path / "stage")
    assert (store.newest, store.complete_versions) == (2, [2])
    assert caplog.text == ""  # nothing was damaged: version 1 was gone before the first byte came
    stage(store, 3)
    assert store.complete_versions == [2, 3]
    store.close()


def test_release_is_of_a_version_and_not_of_its_slot(store: StagedStore, tmp_path: Path) -> None:
    stage(store, 1)
    stage(store, 2)
    stage(store, 3, should_release=False)  # in the slot of version 1
    store = again(store, tmp_path / "stage")
    assert (store.newest, store.complete_versions) == (2, [2, 3])
    store.close()


@pytest.mark.parametrize("damage", ["data", "header", "length", "manifest", "no file"])
def test_restart_drops_what_was_damaged(
    store: StagedStore, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage(store, 1)
    path = stage(store, 2).path
    store.close()
    weights, manifest = path / "model.safetensors", path / "manifest.json"
    if damage == "manifest":
        manifest.write_text(manifest.read_text()[:-9])
    elif damage == "no file":
        weights.unlink()
    else:
        size = weights.stat().st_size
        with weights.open("r+b") as file:
            file.seek({"data": size - 1, "header": 40, "length": size}[damage])
            byte = file.read(1) or b"0"
            file.seek(-1 if damage != "length" else 0, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    store = StagedStore(tmp_path / "stage", 2)
    assert (store.newest, store.complete_versions) == (1, [1])
    assert str(path) in caplog.text
    if damage == "data":
        assert "checksums differ: s" in caplog.text  # the last tensor of the file
    stage(store, 2)
    stage(store, 3)
    assert torch.equal(store.get(3).data, content(3))
    assert load_file(store.get(3).path / "model.safetensors").keys() == {"a", "norm", "s"}
    store.close()


def test_hold_outlives_the_process_that_gave_it(
    store: StagedStore, clock: Clock, tmp_path: Path
) -> None:
    stage(store, 1)
    stage(store, 2)
    store.hold(1, "engine-0", ttl_s=10)
    store.close()
    store = StagedStore(tmp_path / "stage", 2, clock=clock)
    with pytest.raises(StoreBusyError, match="version 1 is held by engine-0 for 10 s more"):
        store.begin(full(3))
    store.let_go(1, "engine-0")
    stage(store, 3)
    store.close()


@pytest.mark.parametrize(("num_slots", "kept"), [(2, [2, 3]), (3, [1, 2, 3]), (5, [1, 2, 3])])
def test_restart_with_another_number_of_slots_keeps_the_newest(
    tmp_path: Path, num_slots: int, kept: list[int]
) -> None:
    folder = tmp_path / "stage"
    store = StagedStore(folder, 3)
    store.set_layout(LAYOUT)
    for version in (1, 2, 3):
        stage(store, version)
    store = again(store, folder, num_slots)
    assert store.complete_versions == kept
    stage(store, 4)
    assert len(list(folder.glob("slot-*"))) == num_slots
    store.close()


def test_folder_belongs_to_one_receiver_at_a_time(store: StagedStore, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="in use by another receiver"):
        StagedStore(tmp_path / "stage", 2)


def test_readers_never_see_bytes_change_under_a_hold(tmp_path: Path) -> None:
    """A transfer thread stages version after version while readers hold, read and let go."""
    store = StagedStore(tmp_path / "stage", 3)
    store.set_layout(LAYOUT)
    stage(store, 0)
    is_over, was_let_go = threading.Event(), threading.Event()
    torn: list[str] = []
    num_reads = [0, 0, 0]

    def read(number: int) -> None:
        while not is_over.is_set():
            version = store.newest
            try:
                store.hold(version or 0, f"reader-{number}", ttl_s=60)
            except WeightSyncError:
                continue  # it was superseded between the two calls
            slot = store.get(version or 0)
            manifest = slot.manifest
            for _ in range(5):
                if manifest is None or staged_checksums(LAYOUT, slot.data) != manifest.checksums:
                    torn.append(f"reader {number}, version {version}")
            num_reads[number] += 1
            store.let_go(version or 0, f"reader-{number}")
            was_let_go.set()

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for reader in readers:
        reader.start()
    try:
        staged, deadline = 0, time.monotonic() + 300
        while (staged < 40 or min(num_reads) < 10) and time.monotonic() < deadline:
            was_let_go.clear()
            try:
                stage(store, staged + 1)
                staged += 1
            except StoreBusyError:
                was_let_go.wait(timeout=1)
    finally:
        is_over.set()
        for reader in readers:
            reader.join(timeout=60)
    assert not torn
    assert staged >= 40 and min(num_reads) >= 10
    store.close()


class AnyOrder(RuleBasedStateMachine):
    """Any order of verbs, restarts among them, against what must be kept whatever happens."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.store = self.open()
        self.last = 0
        """The newest version that was begun."""
        self.completed: set[int] = set()
        self.released: set[int] = set()
        self.held: dict[int, float] = {}
        """Until when, by version."""
        self.held_discarded: dict[int, float] = {}
        self.arriving: Slot | None = None

    def open(self) -> StagedStore:
        store = StagedStore(Path(self.folder.name), 2, clock=self.clock)
        store.set_layout(LAYOUT)
        return store

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule()
    def begin_full(self) -> None:
        self.begin(full(self.last + 1))

    @precondition(lambda self: self.store.complete_versions)
    @rule()
    def begin_delta(self) -> None:
        base = self.store.complete_versions[-1]
        self.begin(delta(self.last + 1, base))
        if self.arriving and self.arriving.version == self.last:
            assert torch.equal(self.store.get(base).data, content(base))

    def begin(self, transfer: Transfer) -> None:
        try:
            self.arriving = self.store.begin(transfer)
        except StoreBusyError:
            deadlines = [*self.held.values(), *self.held_discarded.values()]
            is_held = any(until > self.clock.now for until in deadlines)
            assert is_held or transfer.base_version is not None
            return
        self.last = transfer.version
        self.arriving.data[:1000] = 99

    @precondition(lambda self: self.arriving)
    @rule()
    def complete(self) -> None:
        assert self.arriving is not None
        self.arriving.data.copy_(content(self.arriving.version))
        self.store.complete(self.arriving, manifest_of(self.arriving.version, self.arriving.data))
        self.completed.add(self.arriving.version)
        self.arriving = None

    @precondition(lambda self: self.store.complete_versions)
    @rule(data=st.data(), ttl_s=st.integers(1, 20))
    def hold(self, data: st.DataObject, ttl_s: int) -> None:
        version = data.draw(st.sampled_from(self.store.complete_versions))
        self.store.hold(version, "engine", ttl_s)
        self.held = {version: self.clock.now + ttl_s}  # a reader holds one version at a time
        self.held_discarded = {}

    @precondition(lambda self: self.store.complete_versions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.store.complete_versions))
        self.store.release(version)
        self.released.add(version)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.held)))
        self.store.let_go(version, "engine")
        del self.held[version]

    @precondition(lambda self: self.last and self.last not in self.released)
    @rule()
    def discard(self) -> None:
        self.store.discard(self.last)
        self.arriving = None
        self.completed.discard(self.last)
        if self.last in self.held:
            self.held_discarded[self.last] = self.held.pop(self.last)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()
        self.arriving = None

    @invariant()
    def newest_is_the_newest_that_was_ever_released(self) -> None:
        assert self.store.newest == max(self.released, default=None)

    @invariant()
    def what_is_listed_is_whole_and_what_is_held_is_listed(self) -> None:
        listed = self.store.complete_versions
        assert set(listed) <= self.completed
        for version in listed:
            assert torch.equal(self.store.get(version).data, content(version))
        assert {version for version, until in self.held.items() if until > self.clock.now} <= set(
            listed
        )


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=25)
