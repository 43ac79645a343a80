"""The index of recorded groups: filters, pages, files that grow and change their names."""

from __future__ import annotations

import os
from math import inf

import pytest

from controller.page import samples
from controller.page.samples import MAX_TOKENS, PAGE_GROUPS, Filter, GroupIndex, describe
from controller.run_dir import RunDir
from tests.support.controller.records import record_groups, recorded_group


def ids(index: GroupIndex, wanted: Filter, start: int = 0) -> list[str]:
    return [row.group_id for row in index.page(wanted, start)[1]]


def test_filters_select_by_reward_length_and_task(run_dir: RunDir) -> None:
    low = recorded_group("low", rewards=(0.0, 0.5), length=3)
    high = recorded_group("high", rewards=(1.0, 1.0), length=9)
    other = recorded_group("other", task="capitals", rewards=(1.0, 0.0), length=4)
    record_groups(run_dir, [low, high, other])
    index = GroupIndex(run_dir.path)
    assert index.read(60.0) == 0
    assert ids(index, Filter()) == ["other", "high", "low"]
    assert ids(index, Filter(task="sums")) == ["high", "low"] and index.tasks == [
        "capitals",
        "sums",
    ]
    assert ids(index, Filter(bounds={"reward": (0.5, inf)})) == ["other", "high"]
    assert ids(index, Filter(bounds={"reward": (-inf, 0.25)})) == ["low"]
    assert ids(index, Filter(bounds={"length": (4, 8)})) == ["other"]


def test_pages_are_parts_of_what_the_filter_admits(run_dir: RunDir) -> None:
    record_groups(run_dir, [recorded_group(f"group-{n:03}") for n in range(PAGE_GROUPS + 7)])
    index = GroupIndex(run_dir.path)
    index.read(60.0)
    total, rows = index.page(Filter(), PAGE_GROUPS)
    assert total == PAGE_GROUPS + 7
    assert [row.group_id for row in rows] == [f"group-{n:03}" for n in reversed(range(7))]


def test_index_reads_on_where_it_ended_and_waits_for_the_end_of_a_line(run_dir: RunDir) -> None:
    record_groups(run_dir, [recorded_group("first")])
    index = GroupIndex(run_dir.path)
    index.read(60.0)
    path = run_dir.path / "rollouts" / "worker-0.jsonl"
    whole = path.read_bytes().replace(b'"first"', b'"later"')
    with path.open("ab") as file:
        file.write(whole[:100])
        file.flush()
        index.read(60.0)
        assert ids(index, Filter()) == ["first"]
        file.write(whole[100:])
    index.read(60.0)
    assert {*ids(index, Filter())} == {"first", "later"}
    assert index.find("later").group.group_id == "later"


def test_long_line_that_is_being_written_when_the_page_opens_is_found_at_its_end(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "CHUNK_BYTES", 100)
    record_groups(run_dir, [recorded_group("first")])
    path = run_dir.path / "rollouts" / "worker-0.jsonl"
    whole = path.read_bytes().replace(b'"first"', b'"later"')
    with path.open("ab") as file:
        file.write(whole[:-50])
        file.flush()
        index = GroupIndex(run_dir.path)
        index.read(60.0)
        assert ids(index, Filter()) == ["first"]
        file.write(whole[-50:])
    assert index.read(60.0) == 0
    assert {*ids(index, Filter())} == {"first", "later"}


def test_index_passes_over_a_line_that_was_cut_off(run_dir: RunDir) -> None:
    record_groups(run_dir, [recorded_group("cut")])
    path = run_dir.path / "rollouts" / "worker-0.jsonl"
    os.truncate(path, 200)
    record_groups(run_dir, [recorded_group("whole")])
    index = GroupIndex(run_dir.path)
    assert index.read(60.0) == 0 and ids(index, Filter()) == ["whole"]


def test_group_is_found_when_its_file_has_another_name_and_not_when_it_is_gone(
    run_dir: RunDir,
) -> None:
    record_groups(run_dir, [recorded_group("old")])
    index = GroupIndex(run_dir.path)
    index.read(60.0)
    path = run_dir.path / "rollouts" / "worker-0.jsonl"
    size = path.stat().st_size
    record_groups(run_dir, [recorded_group("new")], max_file_bytes=size + size // 2)
    assert path.with_name("worker-0.jsonl.1").exists()
    index.read(60.0)
    assert {*ids(index, Filter())} == {"old", "new"}
    assert index.find("old").group.group_id == "old"
    path.with_name("worker-0.jsonl.1").unlink()
    index.read(60.0)
    assert ids(index, Filter()) == ["new"]
    with pytest.raises(KeyError):
        index.find("old")


def test_file_that_got_the_number_of_a_removed_one_is_read_from_its_beginning(
    run_dir: RunDir,
) -> None:
    record_groups(run_dir, [recorded_group("old")])
    index = GroupIndex(run_dir.path)
    index.read(60.0)
    path = run_dir.path / "rollouts" / "worker-0.jsonl"
    line = path.read_bytes()
    path.write_bytes(line.replace(b'"old"', b'"one"') + line.replace(b'"old"', b'"two"'))
    index.read(60.0)
    assert {*ids(index, Filter())} == {"one", "two"}
    path.write_bytes(b"")
    index.read(60.0)
    assert ids(index, Filter()) == []


def test_description_has_what_is_known_of_each_token(run_dir: RunDir) -> None:
    record_groups(run_dir, [recorded_group("group", length=5)], said="hello")
    index = GroupIndex(run_dir.path)
    index.read(60.0)
    recorded = index.find("group")
    found = describe(recorded, 1, 0, lambda tokens: "".join(map(chr, (65 + t for t in tokens))))
    assert found["texts"] == list("ABCDEFGH") and found["mask"] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert found["versions"] == [-1, -1, -1, 3, 3, 3, 4, 4]
    assert found["logprobs"][3:] == [-0.5] * 5
    assert found["trajectories"][1]["reward"] == 1.0
    assert found["messages"][0]["content"] == "hello"
    assert describe(recorded, 0, 6, None)["texts"] == ["[6]", "[7]"]
    with pytest.raises(KeyError):
        describe(recorded, 2, 0, None)


def test_description_of_a_long_trajectory_comes_in_parts(run_dir: RunDir) -> None:
    record_groups(run_dir, [recorded_group("long", length=MAX_TOKENS)])
    index = GroupIndex(run_dir.path)
    index.read(60.0)
    recorded = index.find("long")
    assert len(describe(recorded, 0, 0, None)["texts"]) == MAX_TOKENS
    assert len(describe(recorded, 0, MAX_TOKENS, None)["texts"]) == 3


def test_newest_groups_are_read_first_and_the_others_backward(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "CHUNK_BYTES", 2000)
    record_groups(run_dir, [recorded_group(f"{n:02}") for n in range(30)])
    index = GroupIndex(run_dir.path)
    left = index.read(0.0)
    seen = ids(index, Filter())
    assert 0 < len(seen) < 30 and seen == [f"{n:02}" for n in range(29, 29 - len(seen), -1)]
    assert left > 0 and index.find("29").group.group_id == "29"
    record_groups(run_dir, [recorded_group("new"), recorded_group("long", length=500)])
    assert index.read(60.0) == 0
    assert index.page(Filter(), 0)[0] == 32 and index.find("00").group.group_id == "00"


def test_lines_longer_than_a_chunk_are_found_backward(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "CHUNK_BYTES", 100)
    record_groups(run_dir, [recorded_group(f"{n}") for n in range(3)])
    index = GroupIndex(run_dir.path)
    assert index.read(60.0) == 0
    assert ids(index, Filter()) == ["2", "1", "0"]
