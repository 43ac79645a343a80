"""Checkpoints on disk are whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from buffer.types import PromptRef
from trainer_pool.state.checkpoint import (
    Best,
    CheckpointStore,
    TrainState,
    check_checkpoint,
    checksum_of,
    read_state,
)


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


@pytest.mark.parametrize("content", ["nowhere\n", "", "step-1", "../step-000001", "\xff" * 4096])
def test_pointer_to_no_checkpoint_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content, encoding="latin-1")
    with pytest.raises(
        ValueError, match=f"{tmp_path}/latest (names .*, which is not a|is not text)"
    ):
        CheckpointStore(tmp_path).latest()


def test_noted_version_is_the_last_one_and_needs_no_room(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.noted_version() == -1
    sizes = set()
    for version in (0, 9, 10, 1097):
        store.note_version(version)
        assert CheckpointStore(tmp_path / "checkpoints").noted_version() == version
        sizes.add((store.folder / "version").stat().st_size)
    assert len(sizes) == 1
    write_checkpoint(store, 1)
    assert store.noted_version() == 1097


@pytest.mark.parametrize("content", ["", "7\n", "-0000000000000000001\n", "\xff" * 20])
def test_damaged_version_is_an_error_that_names_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "version").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{tmp_path}/version is (damaged|not text)"):
        CheckpointStore(tmp_path).noted_version()


WRITTEN = ["state.json", "zero3/rank0.pt", "checksums.json"]


@pytest.mark.parametrize("name", WRITTEN)
def test_any_flipped_bit_of_a_checkpoint_is_found_in_its_file(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(CheckpointStore(tmp_path), 50)
    check_checkpoint(folder)
    assert read_state(folder) == state(50)
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), 1 + len(whole) // 100):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (folder / name).write_bytes(damaged)
        # A flip in checksums.json shows at the file whose name or sum it was.
        with pytest.raises(ValueError, match=str(folder)) as found:
            read_state(folder)
            check_checkpoint(folder)
        assert name == "checksums.json" or str(folder / name) in str(found.value), place


def test_parts_of_a_check_read_every_file_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    for rank in range(3):
        (store.writing_folder(1) / f"rank-{rank:02d}.safetensors").write_bytes(b"weights")
    folder = store.commit(state(1))
    for path in folder.glob("rank-*"):
        whole = path.read_bytes()
        path.write_bytes(whole[::-1])
        wrong = 0
        for part in range(2):
            try:
                check_checkpoint(folder, part, 2)
            except ValueError as error:
                assert f"{path} is damaged" in str(error)
                assert f"write the name of another checkpoint into {tmp_path}/latest" in str(error)
                wrong += 1
        assert wrong == 1
        path.write_bytes(whole)


def damage(folder: Path, how: str) -> Path:
    """Returns the file that is not as it was written."""
    file = folder / "zero3" / "rank0.pt"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    return file


@pytest.mark.parametrize("how", ["cut", "missing", "pipe", "folder"])
def test_latest_refuses_a_checkpoint_without_a_file_of_the_written_size(
    tmp_path: Path, how: str
) -> None:
    store = CheckpointStore(tmp_path)
    file = damage(write_checkpoint(store, 1), how)
    with pytest.raises(ValueError, match=f"{file} (is|cannot)") as found:
        store.latest()
    words = f"write the name of a complete one into {tmp_path}/latest"
    assert how == "pipe" or words in str(found.value)


@pytest.mark.parametrize("name", ["latest", "step-000001/groups.dump"])
def test_pipe_in_place_of_a_file_does_not_wait_for_a_writer(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    write_checkpoint(store, 1)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{tmp_path / name} is not a regular file"):
        store.latest()


@pytest.mark.parametrize("value", [-5, True, "7", 3.7, 3.0, None, 2**63])
@pytest.mark.parametrize("field", ["step", "version", "num_updates"])
def test_numbers_of_a_state_are_whole_and_not_negative(
    tmp_path: Path, field: str, value: Any
) -> None:
    store = CheckpointStore(tmp_path)
    write_checkpoint(store, 1)
    fields = json.loads((tmp_path / "step-000001" / "state.json").read_text())
    with pytest.raises(ValueError, match=rf"state\.json is damaged: .*`\$\.{field}`"):
        commit_text(store, json.dumps({**fields, field: value}))


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, '{"step": 1e999}', '{"step": ' + "9" * 5000, "\xff\xfe"]
)
def test_state_of_another_shape_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"state\.json is damaged: "):
        commit_text(CheckpointStore(tmp_path), text)


def commit_text(store: CheckpointStore, text: str) -> TrainState:
    """The state of a checkpoint whose checksums are right, and whose state is `text`."""
    store.begin(2)
    folder = store.commit(state(2))
    (folder / "state.json").write_text(text, encoding="latin-1")
    sums = json.loads((folder / "checksums.json").read_text())
    found = checksum_of(folder / "state.json")
    sums["state.json"] = {"num_bytes": found.num_bytes, "crc32": found.crc32}
    (folder / "checksums.json").write_text(json.dumps(sums))
    return read_state(folder)


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
    with pytest.raises(ValueError, match="not a checkpoint"):
        store.latest()


def test_best_checkpoint_is_kept_until_a_better_one_is_found(tmp_path: Path) -> None:
    store, ranks = CheckpointStore(tmp_path), CheckpointStore(tmp_path, num_kept=1)

    def note(step: int, value: float, metric: str = "accuracy") -> bool:
        return store.note_best(Best(step=step, metric=metric, value=value))

    assert store.best() is None
    for step in (10, 20, 30):
        write_checkpoint(ranks, step)
        assert note(step, {10: 0.4, 20: 0.8, 30: 0.8}[step])
    assert names(tmp_path) == {"step-000020", "step-000030", "latest", "best"}
    assert store.best() == Best(step=20, metric="accuracy", value=0.8)
    assert note(40, 0.9) is None, "it is evaluated before it is written"
    ranks.begin(40)
    ranks.discard(40)  # the disk is full: the former best stays
    assert store.best() == Best(step=20, metric="accuracy", value=0.8)
    write_checkpoint(ranks, 40)
    assert note(40, 0.9)
    write_checkpoint(ranks, 50)
    assert names(tmp_path) == {"step-000040", "step-000050", "latest", "best"}
    assert not note(30, 1.0), "it is gone"
    assert note(40, 0.2)  # repeated after a rollback: it has other weights
    assert note(50, 0.3) and store.best() == Best(step=50, metric="accuracy", value=0.3)
    assert note(40, 0.1, "pass_at_4")  # resumed with another metric: values do not compare
    assert store.best() == Best(step=40, metric="pass_at_4", value=0.1)
    shutil.rmtree(tmp_path / "step-000040")
    assert note(50, 0.05, "pass_at_4"), "a checkpoint that is gone is not the best"
    assert store.best() == Best(step=50, metric="pass_at_4", value=0.05)


def test_nothing_is_removed_while_the_best_is_unknown(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, num_kept=1)
    write_checkpoint(store, 10)
    (tmp_path / "best").write_text("{")
    for step in (20, 30):
        write_checkpoint(store, step)
    assert names(tmp_path) > {"step-000010", "step-000020", "step-000030"}
    (tmp_path / "best").unlink()
    write_checkpoint(store, 40)
    assert names(tmp_path) == {"step-000040", "latest"}
