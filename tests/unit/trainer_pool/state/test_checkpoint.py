"""Checkpoints on disk are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buffer.types import PromptRef
from trainer_pool.state.checkpoint import CheckpointStore, TrainState


def state(step: int) -> TrainState:
    return TrainState(
        step=step,
        version=step + 1,
        num_updates=3,
        lineage="chain",
        consumed_group_ids=("a", "b"),
        task_positions={0: 12, 3: 9},
        untrained_prompts=(PromptRef(task="sums", index=7, attempt=1, reruns=2),),
    )


def write_checkpoint(store: CheckpointStore, step: int) -> Path:
    store.begin(step)
    shards = store.writing_folder(step) / "zero3"
    shards.mkdir()
    (shards / "rank0.pt").write_bytes(b"weights of %d" % step)
    return store.commit(state(step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_latest_is_none_before_the_first_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "checkpoints").latest() is None


def test_commit_makes_the_checkpoint_the_latest_with_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = write_checkpoint(store, 50)
    assert store.latest() == (folder, state(50))
    assert (folder / "zero3" / "rank0.pt").read_bytes() == b"weights of 50"
    assert names(store.folder) == {"step-000050", "latest"}


def test_interrupted_checkpoint_leaves_the_one_before_and_is_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = write_checkpoint(store, 1)
    store.begin(2)
    (store.writing_folder(2) / "half").write_bytes(b"torn")
    # The process dies here; another one looks, and goes on.
    again = CheckpointStore(tmp_path)
    assert again.latest() == (first, state(1))
    write_checkpoint(again, 2)
    assert names(tmp_path) == {"step-000001", "step-000002", "latest"}
    assert not (tmp_path / "step-000002" / "half").exists()


def test_crash_between_rename_and_pointer_leaves_the_older_one_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = write_checkpoint(store, 1)
    store.begin(2)
    (store.writing_folder(2) / "state.json").write_text("{}")
    store.writing_folder(2).rename(tmp_path / "step-000002")
    assert store.latest() == (first, state(1))
    second = write_checkpoint(store, 2)
    assert store.latest() == (second, state(2))


def test_newest_two_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (9, 10, 100, 101):
        write_checkpoint(store, step)
    assert names(tmp_path) == {"step-000100", "step-000101", "latest"}


def test_checkpoint_after_a_rollback_is_kept_beside_those_of_undone_steps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, num_kept=1, keep_every=50)
    for step in (50, 100, 150):
        write_checkpoint(store, step)
    (tmp_path / "latest").write_text("step-000050\n")
    again = CheckpointStore(tmp_path, num_kept=1)
    assert again.latest() == (tmp_path / "step-000050", state(50))
    folder = write_checkpoint(again, 63)
    assert again.latest() == (folder, state(63))
    write_checkpoint(again, 160)
    assert names(tmp_path) == {"step-000160", "latest"}


def test_copy_of_a_checkpoint_beside_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-000001.bak").mkdir()
    store = CheckpointStore(tmp_path)
    for step in (999_998, 999_999, 1_000_000):
        write_checkpoint(store, step)
    assert names(tmp_path) == {"step-000001.bak", "step-999999", "step-1000000", "latest"}


@pytest.mark.parametrize("content", ["nowhere\n", ""])
def test_pointer_to_no_checkpoint_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content)
    with pytest.raises(ValueError, match=r"latest names .*, which is not a"):
        CheckpointStore(tmp_path).latest()


def test_commit_leaves_nothing_that_others_may_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = CheckpointStore(tmp_path / "checkpoints")
        write_checkpoint(store, 1)
        assert store.latest() is not None
    finally:
        os.umask(before)
    paths = [store.folder, *store.folder.rglob("*")]
    assert [path for path in paths if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("name", [".", "latest", "step-000001", "step-000001/zero3/rank0.pt"])
def test_checkpoint_that_others_may_write_is_not_loaded(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    write_checkpoint(store, 1)
    path = store.folder / name
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(ValueError, match="can be written by others: it may not be what"):
        store.latest()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("name", [".", "latest", "step-000001", "step-000001/zero3/rank0.pt"])
def test_checkpoint_of_another_user_is_not_loaded(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    write_checkpoint(store, 1)
    os.chown(store.folder / name, 12345, -1)
    with pytest.raises(ValueError, match="belongs to user 12345, not to you"):
        store.latest()


def test_checkpoint_is_not_loaded_through_a_link(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = write_checkpoint(store, 1)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a symbolic link"):
        store.latest()
    (store.folder / "latest").write_text("../elsewhere")
    with pytest.raises(ValueError, match="not a"):
        store.latest()
