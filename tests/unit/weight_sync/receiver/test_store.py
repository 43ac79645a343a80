"""The verbs of the store, on real files; the full file system is a real tmpfs."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tensors.layout import Layout
from tests.support.weights.layouts import spec
from tests.support.weights.pinning import CudaStandIn
from tests.support.weights.staging import (
    LAYOUT,
    OTHER_LAYOUT,
    Clock,
    content,
    delta,
    full,
    manifest_of,
    stage,
)
from weight_sync.receiver.store import StagedStore
from weight_sync.types import StoreBusyError, StoreFullError, WeightSyncError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[StagedStore]:
    store = StagedStore(tmp_path / "stage", 2, clock=clock)
    store.set_layout(LAYOUT)
    yield store
    store.close()


def test_staged_version_loads_as_safetensors_file(store: StagedStore) -> None:
    slot = stage(store, 1)
    assert store.newest == 1
    assert [path.name for path in slot.path.glob("*.safetensors")] == ["model.safetensors"]
    found = load_file(slot.path / "model.safetensors")
    data = content(1)
    for tensor, start in zip(LAYOUT.tensors, LAYOUT.offsets, strict=False):
        raw = found[tensor.name].reshape(-1).view(torch.uint8)
        assert torch.equal(raw, data[start : start + tensor.num_bytes])


def test_version_is_listed_when_whole_and_newest_when_released(store: StagedStore) -> None:
    slot = store.begin(full(4))
    assert (store.newest, store.complete_versions, slot.manifest) == (None, [], None)
    slot.data.copy_(content(4))
    manifest = manifest_of(4, slot.data)
    store.complete(slot, manifest)
    assert (store.newest, store.complete_versions) == (None, [4])
    assert store.get(4).manifest == manifest
    store.release(4)
    store.release(4)
    assert (store.newest, store.complete_versions) == (4, [4])


def test_slots_are_written_over_in_turn_and_stay_the_same_files(store: StagedStore) -> None:
    inodes = set()
    for version in range(6):
        slot = stage(store, version)
        inodes.add((slot.path / "model.safetensors").stat().st_ino)
        assert store.complete_versions == [version - 1, version][-(version + 1) :]
        for whole in store.complete_versions:
            assert torch.equal(store.get(whole).data, content(whole))
    assert len(inodes) == 2


def test_slot_has_all_its_pages_before_the_first_byte_arrives(store: StagedStore) -> None:
    store.set_layout(OTHER_LAYOUT)
    slot = store.begin(full(1, OTHER_LAYOUT))
    status = (slot.path / "model.safetensors").stat()
    assert status.st_blocks * 512 >= status.st_size


def test_slots_into_which_a_gpu_copies_are_pinned_until_they_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = CudaStandIn().install(monkeypatch)
    store = StagedStore(tmp_path / "stage", 2, should_pin=True)
    store.set_layout(LAYOUT)
    stage(store, 1)
    sizes = [len(LAYOUT.file_header) + LAYOUT.num_bytes] * 2
    assert [*cuda.pinned.values()] == sizes
    store.close()
    assert not cuda.pinned
    again = StagedStore(tmp_path / "stage", 2, should_pin=True)  # verified, and mapped at once
    assert again.newest == 1 and [*cuda.pinned.values()] == sizes
    again.set_layout(OTHER_LAYOUT)
    assert len(cuda.pinned) == 2
    again.close()
    assert not cuda.pinned


def test_same_transfer_again_goes_on_in_its_slot(store: StagedStore) -> None:
    slot = store.begin(full(1))
    slot.data[:100] = 7
    resumed = store.begin(full(1))
    assert resumed.data.data_ptr() == slot.data.data_ptr()
    assert (resumed.data[:100] == 7).all()
    store.complete(resumed, manifest_of(1, resumed.data))
    with pytest.raises(WeightSyncError, match="version 1 is staged already"):
        store.begin(full(1))


def test_unfinished_version_gives_way_to_the_next(store: StagedStore) -> None:
    stage(store, 1)
    stale = store.begin(full(2))
    slot = store.begin(full(3))
    with pytest.raises(WeightSyncError, match="version 2 was dropped"):
        store.complete(stale, manifest_of(2, stale.data))
    store.complete(slot, manifest_of(3, slot.data))
    assert store.complete_versions == [1, 3]


def test_transfer_of_the_same_version_with_other_terms_starts_anew(store: StagedStore) -> None:
    stage(store, 1)
    stale = store.begin(delta(2, base_version=1))
    store.begin(full(2))
    with pytest.raises(WeightSyncError, match="version 2 was dropped"):
        store.complete(stale, manifest_of(2, stale.data))


def test_obstacle_says_why_no_slot_is_free(store: StagedStore) -> None:
    stage(store, 1)
    stage(store, 2)
    assert store.obstacle == ""
    store.hold(1, "engine-0", ttl_s=60)
    assert "version 1 is held by engine-0 for 60 s more" in store.obstacle
    store.let_go(1, "engine-0")
    slot = store.begin(delta(3, base_version=2))
    assert store.obstacle == ""  # the version that arrives could give way
    slot.data.fill_(0)
    assert torch.equal(store.get(2).data, content(2))


def test_delta_is_not_put_over_its_base(store: StagedStore) -> None:
    stage(store, 1)
    stage(store, 2, should_release=False)
    with pytest.raises(StoreBusyError, match="newest released; version 2 is the base"):
        store.begin(delta(3, base_version=2))
    assert store.complete_versions == [1, 2]
    store.release(2)
    store.begin(delta(3, base_version=2))


def test_delta_whose_base_is_not_here_changes_nothing(store: StagedStore) -> None:
    stage(store, 1)
    stage(store, 2)
    for missing in (0, 3):
        with pytest.raises(WeightSyncError, match=rf"version {missing} is not staged .* \[1, 2\]"):
            store.begin(delta(4, base_version=missing))
    assert store.complete_versions == [1, 2]
    store.begin(full(4))
    with pytest.raises(WeightSyncError, match="version 4 is not staged"):
        store.begin(delta(5, base_version=4))  # it arrives, it is not whole


def test_held_version_is_not_written_over_until_it_is_let_go(store: StagedStore) -> None:
    stage(store, 1)
    store.hold(1, "engine-0", ttl_s=60)
    store.hold(1, "engine-1", ttl_s=60)
    stage(store, 2)
    with pytest.raises(StoreBusyError, match=r"version 1 is held by engine-0 for 60 s .*engine-1"):
        store.begin(full(3))
    with pytest.raises(StoreBusyError, match="version 2 is the newest released"):
        store.begin(full(3))
    store.let_go(1, "engine-0")
    store.let_go(1, "engine-0")
    with pytest.raises(StoreBusyError):
        store.begin(full(3))
    assert torch.equal(store.get(1).data, content(1))
    store.let_go(1, "engine-1")
    stage(store, 3)
    assert store.complete_versions == [2, 3]


def test_hold_expires_by_itself_and_can_be_prolonged(store: StagedStore, clock: Clock) -> None:
    stage(store, 1)
    store.hold(1, "engine-0", ttl_s=10)
    stage(store, 2)
    clock.now += 9
    store.hold(1, "engine-0", ttl_s=10)
    clock.now += 9
    with pytest.raises(StoreBusyError, match="engine-0 for 1 s more"):
        store.begin(full(3))
    clock.now += 1
    stage(store, 3)
    with pytest.raises(WeightSyncError, match="version 1 is not staged"):
        store.hold(1, "engine-0", ttl_s=10)


def test_reader_that_comes_back_ends_the_hold_with_which_it_died(store: StagedStore) -> None:
    stage(store, 1)
    store.hold(1, "engine-0", ttl_s=150)
    stage(store, 2)
    with pytest.raises(StoreBusyError, match="version 1 is held by engine-0 for 150 s more"):
        store.begin(full(3))
    store.hold(2, "engine-1", ttl_s=150)  # another one changes nothing
    with pytest.raises(StoreBusyError, match="version 1 is held by engine-0 for 150 s more"):
        store.begin(full(3))
    store.hold(2, "engine-0", ttl_s=150)
    stage(store, 3)


def test_version_that_is_discarded_while_it_is_read_keeps_its_bytes(store: StagedStore) -> None:
    stage(store, 1)
    slot = stage(store, 2, should_release=False)
    store.hold(2, "peer", ttl_s=10)
    store.discard(2)
    assert store.complete_versions == [1]
    with pytest.raises(StoreBusyError, match="version 2 is held by peer"):
        store.begin(full(3))
    assert torch.equal(slot.data, content(2))


def test_discard_drops_what_is_not_released(store: StagedStore) -> None:
    stage(store, 1)
    slot = store.begin(full(2))
    store.discard(2)
    store.discard(77)
    with pytest.raises(WeightSyncError, match="version 2 was dropped"):
        store.complete(slot, manifest_of(2, slot.data))
    with pytest.raises(WeightSyncError, match="version 1 is released"):
        store.discard(1)
    with pytest.raises(WeightSyncError, match="version 2 is not staged"):
        store.release(2)
    assert store.complete_versions == [1]


def test_version_that_was_never_released_goes_before_the_newest_released(
    store: StagedStore,
) -> None:
    stage(store, 1)
    stage(store, 2, should_release=False)
    stage(store, 3)
    assert (store.newest, store.complete_versions) == (3, [1, 3])


def test_oldest_released_version_goes_before_one_that_waits_for_its_release(
    tmp_path: Path,
) -> None:
    store = StagedStore(tmp_path / "stage", 3)
    store.set_layout(LAYOUT)
    stage(store, 1)
    stage(store, 2)
    stage(store, 3, should_release=False)
    store.begin(full(4))
    assert store.complete_versions == [2, 3]
    store.close()


def test_transfer_of_another_layout_is_refused(store: StagedStore, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="version 1 is of the layout"):
        store.begin(full(1, OTHER_LAYOUT))
    empty = StagedStore(tmp_path / "empty", 2)
    with pytest.raises(WeightSyncError, match="the slots are of none"):
        empty.begin(full(1))
    empty.close()


def test_new_layout_drops_staged_versions_unless_one_is_held(
    store: StagedStore, clock: Clock
) -> None:
    slot = stage(store, 1)
    store.hold(1, "engine-0", ttl_s=5)
    store.set_layout(LAYOUT)
    with pytest.raises(StoreBusyError, match="version 1 is held by engine-0"):
        store.set_layout(OTHER_LAYOUT)
    assert (store.layout, store.newest) == (LAYOUT, 1)
    clock.now += 5
    store.set_layout(OTHER_LAYOUT)
    assert (store.layout, store.newest, store.complete_versions) == (OTHER_LAYOUT, None, [])
    assert torch.equal(slot.data, content(1))  # its mapping outlives the file
    new = store.begin(full(2, OTHER_LAYOUT))
    assert load_file(new.path / "model.safetensors").keys() == {"a"}


def test_closing_leaves_or_removes_the_folder(store: StagedStore, tmp_path: Path) -> None:
    slot = stage(store, 1)
    store.close()
    store.close()
    with pytest.raises(WeightSyncError, match="is closed"):
        store.begin(full(2))
    with pytest.raises(WeightSyncError, match="is closed"):
        store.set_layout(LAYOUT)
    assert store.newest is None
    last = StagedStore(tmp_path / "stage", 2)
    assert last.newest == 1
    last.close(remove=True)
    assert not (tmp_path / "stage").exists()
    assert torch.equal(slot.data, content(1))


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def layout_of_bytes(num_bytes: int) -> Layout:
    return Layout.of([spec("a", num_bytes // 2)], num_ranks=1)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_full_tmpfs_is_said_before_the_first_byte_comes_and_leaves_its_room(
    small_tmpfs: Path,
) -> None:
    store = StagedStore(small_tmpfs / "stage", 2)
    before = free_bytes(small_tmpfs)
    with pytest.raises(StoreFullError, match=r"weight_sync\.stage_dir: .* 2 slots of 600\d\d\d "):
        store.set_layout(layout_of_bytes(600_000))
    assert store.layout is None
    assert free_bytes(small_tmpfs) >= before - 8192  # the first slot fitted, and is gone again
    small = layout_of_bytes(400_000)
    store.set_layout(small)
    slot = store.begin(full(1, small))
    slot.data.fill_(1)
    store.complete(slot, manifest_of(1, slot.data, small))
    store.close()


def test_tmpfs_that_others_filled_up_costs_no_staged_byte(small_tmpfs: Path) -> None:
    layout = layout_of_bytes(400_000)
    store = StagedStore(small_tmpfs / "stage", 2)
    store.set_layout(layout)
    first = store.begin(full(1, layout))
    first.data.fill_(1)
    store.complete(first, manifest_of(1, first.data, layout))
    store.release(1)
    with (small_tmpfs / "others").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    slot = store.begin(full(2, layout))
    slot.data.fill_(2)  # every page is there: no SIGBUS
    with pytest.raises(StoreFullError, match=r"for the manifest of version 2, 0 bytes"):
        store.complete(slot, manifest_of(2, slot.data, layout))
    store.hold(1, "engine-0", ttl_s=10)  # an engine gets what is there all the same
    assert (store.newest, store.complete_versions) == (1, [1])
    (small_tmpfs / "others").unlink()
    store.complete(slot, manifest_of(2, slot.data, layout))
    assert store.complete_versions == [1, 2]
    store.close()


def test_limit_on_the_size_of_files_is_said_the_same_way(tmp_path: Path) -> None:
    store = StagedStore(tmp_path / "stage", 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StoreFullError, match=r"weight_sync\.stage_dir"):
            store.set_layout(layout_of_bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.set_layout(layout_of_bytes(200_000))
    store.close()
