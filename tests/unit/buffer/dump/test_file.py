"""The dump file: written whole or not at all, and no damage to it goes unnoticed."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from zipfile import ZipFile

import pytest

from buffer.dump.file import (
    FORMAT_VERSION,
    DumpedGroup,
    DumpedShard,
    DumpedTokens,
    DumpHeader,
    check_dump,
    read_dump,
    read_groups,
    read_header,
    write_dump,
)

HEADER = DumpHeader(
    run="größe",
    created=1_700_000_000.5,
    shards=[
        DumpedShard(
            settings={"max_staleness": "2"},
            stats={"pushed": "3"},
            failures={"7 math": "1"},
            quarantined_prompts={},
        )
    ],
)
GROUPS = [
    DumpedGroup(group_id="a", state="ready", fields={"tokens": "8"}, payload=b"LSHG\n\0"),
    DumpedGroup(group_id="ü:1", state="leased", fields={}, payload=bytes(range(90))),
    DumpedGroup(group_id="c", state="quarantined", fields={"reason": "x"}, payload=b""),
]
TOKENS = DumpedTokens(prompt="7 math", parts={"0.0.0": b"\n\0first", "0.0.7": b"second"})


def _write(path: Path, num_gone: int = 0) -> bytes:
    with write_dump(path, HEADER) as dump:
        for group in GROUPS:
            dump.write(group)
        dump.write_tokens(TOKENS)
        dump.num_gone = num_gone
    return path.read_bytes()


def test_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    _write(path, num_gone=2)
    assert read_header(path) == HEADER
    assert list(read_dump(path)) == [*GROUPS, TOKENS]
    assert check_dump(path) == {"ready": 1, "leased": 1, "quarantined": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["buffer.dump"]


def test_dump_can_be_looked_at_with_any_zip_program(tmp_path: Path) -> None:
    _write(tmp_path / "buffer.dump", num_gone=2)
    with ZipFile(tmp_path / "buffer.dump") as file:
        groups = ["groups/0", "groups/1", "groups/2"]
        assert file.namelist() == ["header.json", *groups, "kept/0", "end.json"]
        header, end = json.loads(file.read("header.json")), json.loads(file.read("end.json"))
        assert (header["format"], header["run"]) == (FORMAT_VERSION, "größe")
        assert end == {"groups": {"ready": 1, "leased": 1, "quarantined": 1}, "gone": 2, "kept": 1}
        assert file.read("groups/0").partition(b"\n")[2] == GROUPS[0].payload


def test_empty_buffer_makes_a_dump_too(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    with write_dump(path, HEADER):
        assert not path.exists()
    assert list(read_dump(path)) == []


def _is_noticed_or_harmless(path: Path, damaged: bytes) -> bool:
    """Whether it was noticed. The date of a member and the like may change without harm."""
    path.write_bytes(damaged)
    try:
        found = (list(read_dump(path)), read_header(path))
    except ValueError as error:
        assert "buffer.dump" in str(error)
        return True
    assert found == ([*GROUPS, TOKENS], HEADER)
    return False


def test_dump_that_is_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    assert all(_is_noticed_or_harmless(path, data[:length]) for length in range(len(data)))


def test_flipped_bits_do_not_change_what_is_read_from_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        _is_noticed_or_harmless(path, bytes(damaged))


def test_removed_or_repeated_bytes_do_not_change_what_is_read_from_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    random = Random(0)
    for _ in range(150):
        start, end = sorted(random.choices(range(len(data) + 1), k=2))
        for damaged in (data[:start] + data[end:], data[:end] + data[start:]):
            _is_noticed_or_harmless(path, damaged)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["header.json", "groups/0", "groups/2", "end.json"], "groups/1: found 'groups/2' instead"),
        (
            ["header.json", "groups/1", "groups/0", "groups/2", "end.json"],
            "groups/0: found",
        ),
        (["header.json", "groups/0", "groups/1", "end.json"], "end.json: it says .*'quarantined'"),
        (
            ["header.json", "groups/0", "groups/1", "groups/2", "end.json"],
            "and 1 prompts with tokens, but the file holds .* and 0",
        ),
        (["header.json", "groups/0", "groups/1", "groups/2"], "end.json: it is missing"),
        (["groups/0", "groups/1", "groups/2", "end.json"], "header.json: found 'groups/0' instead"),
    ],
)
def test_members_that_are_missing_or_in_another_order_are_noticed(
    tmp_path: Path, names: list[str], message: str
) -> None:
    _write(tmp_path / "whole")
    with ZipFile(tmp_path / "whole") as whole, ZipFile(tmp_path / "buffer.dump", "w") as copy:
        for name in names:
            copy.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=message):
        check_dump(tmp_path / "buffer.dump")


def test_errors_name_file_member_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    data = _write(path)
    at = data.index(bytes(range(90)))
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    groups = read_groups(path)
    assert next(groups) == GROUPS[0]
    with pytest.raises(ValueError, match=r"buffer\.dump, groups/1: its bytes .*Copy or make"):
        next(groups)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a replay buffer dump"):
        read_header(path)


def test_dump_in_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    with write_dump(path, replace(HEADER, format=7)):
        pass
    with pytest.raises(ValueError, match=r"format 7.*reads format 4: use the version"):
        read_header(path)


def test_full_disk_is_reported_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    (tmp_path / "buffer.dump.part").symlink_to("/dev/full")  # every write there fails with ENOSPC
    with pytest.raises(OSError, match=r"Make room.*buffer\.dump") as caught:
        _write(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == []


def test_dump_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "buffer.dump"
    before = _write(path)
    with pytest.raises(ValueError, match="'running' is none of"), write_dump(path, HEADER) as dump:
        dump.write(DumpedGroup(group_id="x", state="running", fields={}))  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing/buffer\.dump"):
        _write(tmp_path / "missing" / "buffer.dump")
