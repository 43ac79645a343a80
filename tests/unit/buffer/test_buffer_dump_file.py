"""The dump file: written whole or not at all, and no damage to it goes unnoticed."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from buffer.export import (
    DumpedGroup,
    DumpedShard,
    DumpHeader,
    DumpWriter,
    check_dump,
    read_dump,
    read_header,
)

HEADER = DumpHeader(
    run="größe",
    created=1_700_000_000.5,
    shards=[DumpedShard(settings={"max_staleness": "2"}, stats={"pushed": "3"})],
)
GROUPS = [
    DumpedGroup(group_id="a", state="ready", fields={"tokens": "8"}, payload=b"LSHG\n\0"),
    DumpedGroup(group_id="ü:1", state="leased", fields={}, payload=bytes(range(256))),
    DumpedGroup(group_id="c", state="quarantined", fields={"reason": "x"}, payload=b""),
]


def _write(path: Path, num_gone: int = 0) -> bytes:
    with DumpWriter(path, HEADER) as dump:
        for group in GROUPS:
            dump.write(group)
        dump.num_gone = num_gone
    return path.read_bytes()


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path, num_gone=2)
    assert read_header(path) == HEADER
    assert list(read_dump(path)) == GROUPS
    assert check_dump(path) == {"ready": 1, "leased": 1, "quarantined": 1}
    assert data.startswith(b"LEASH-DUMP 1 ") and b'"gone":2' in data
    assert [file.name for file in tmp_path.iterdir()] == ["buffer.dump"]


def test_an_empty_buffer_makes_a_dump_too(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    with DumpWriter(path, HEADER):
        assert not path.exists()
    assert list(read_dump(path)) == []


def test_every_truncation_of_a_dump_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"buffer\.dump"):
            check_dump(path)


def test_every_flipped_bit_of_a_dump_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"buffer\.dump"):
            check_dump(path)


def test_removed_repeated_and_surplus_bytes_of_a_dump_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    random = Random(0)
    for _ in range(2000):
        start, end = sorted(random.choices(range(len(data) + 1), k=2))
        for damaged in (data[:start] + data[end:], data[:end] + data[start:]):
            if damaged != data:
                path.write_bytes(damaged)
                with pytest.raises(ValueError, match=r"buffer\.dump"):
                    check_dump(path)


def test_whole_records_that_are_missing_or_in_another_order_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    first, *records = [data.index(b"LSHR"), *_places(data, b"LSHR")[1:], data.index(b"LSHE")]
    second, third = records[0], records[1]
    for damaged in (
        data[:first] + data[second:],
        data[:first] + data[second:third] + data[first:second] + data[third:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="the end record says"):
            check_dump(path)


def _places(data: bytes, word: bytes) -> list[int]:
    return [at for at in range(len(data)) if data.startswith(word, at)]


def test_errors_name_file_record_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    at = data.index(bytes(range(256)))
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    groups = read_dump(path)
    assert next(groups) == GROUPS[0]
    with pytest.raises(ValueError, match=r"buffer\.dump, record 2: its checksum .*Copy or make"):
        next(groups)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no dump of a replay buffer"):
        read_header(path)
    path.write_bytes(data.replace(b"LEASH-DUMP 1", b"LEASH-DUMP 7"))
    with pytest.raises(ValueError, match=r"format 7.*update"):
        read_header(path)


def test_a_full_disk_is_told_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    (tmp_path / "buffer.dump.part").symlink_to("/dev/full")  # every write there fails with ENOSPC
    with pytest.raises(OSError, match=r"Make room.*buffer\.dump") as caught:
        _write(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    before = _write(path)
    with pytest.raises(ValueError, match="'running' is none of"), DumpWriter(path, HEADER) as dump:
        dump.write(DumpedGroup(group_id="x", state="running", fields={}, payload=b""))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing/buffer\.dump"):
        _write(tmp_path / "missing" / "buffer.dump")
