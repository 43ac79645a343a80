"""One version's way as bars, by hand, and the command that draws it."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from controller.main import EXIT_BAD_INPUT
from controller.metrics.history import Record
from controller.report.timeline import (
    GATE,
    LANE_KINDS,
    NEW,
    OLD,
    PAUSE,
    TRAINING,
    WIRE,
    Bar,
    Timeline,
    find_lanes,
    find_timeline,
)
from controller.run_dir import RunDir
from tests.support.controller.buffers import Command
from tests.support.controller.records import (
    commit_record,
    event_record,
    record_all,
    skipped_record,
    step_record,
    weights_records,
)

RECORDS = [
    *weights_records(4, 99.0),
    step_record(4, 100.0),
    *weights_records(5, 100.0, mode="delta"),
    step_record(5, 100.65),
    skipped_record(6, 101.0),
]


def bars_of(timeline: Timeline, row: str) -> dict[str, tuple[float, float]]:
    """Bars of one row: start and stop in seconds after the snapshot."""
    return {
        bar.what: (round(bar.start - timeline.start, 3), round(bar.stop - timeline.start, 3))
        for bar in timeline.bars
        if bar.row == row
    }


def test_timeline_is_made_of_the_times_that_were_recorded() -> None:
    timeline = find_timeline(RECORDS)
    assert timeline is not None and timeline.version == 5
    assert timeline.rows == ("trainer", "checkpoint engine", "receivers", "engine-0", "engine-1")
    assert bars_of(timeline, "checkpoint engine") == {
        "finding changes": (0.06, 0.1),
        WIRE: (0.1, 0.5),
    }
    assert bars_of(timeline, "receivers") == {"checksums": (0.5, 0.55)}
    engine = bars_of(timeline, "engine-1")
    assert engine[GATE] == (0.7, 0.74)
    assert engine[PAUSE] == (0.75, 0.85)
    # Before it the version before is decoded, after it this one: up to the edges of the picture.
    margin = 0.06 * 0.85
    assert engine[OLD] == (pytest.approx(-margin, abs=1e-3), 0.75)
    assert engine[NEW] == (0.85, pytest.approx(0.85 + margin, abs=1e-3))
    # The trainer goes on with its next step: it ended 0.05 s (the snapshot) before its record.
    assert bars_of(timeline, "trainer")[TRAINING] == (0.1, 0.6)
    assert timeline.title == (
        "Version 5: changes only, 244 KiB, 900 ms until every engine serves it"
    )


def test_version_can_be_chosen_even_if_not_all_engines_took_it() -> None:
    chosen = find_timeline(RECORDS, 4)
    assert chosen is not None and chosen.version == 4
    values = {k: v for k, v in RECORDS[2].values.items() if not k.startswith("converge")}
    lonely = [replace(RECORDS[2], values=values), RECORDS[0]]
    assert find_timeline(lonely) is None
    chosen = find_timeline(lonely, 4)
    assert chosen is not None and chosen.rows[3:] == ("engine-0",)
    assert find_timeline(RECORDS, 6) is None, "it was never sent"
    assert find_timeline([step_record(0, 1.0)]) is None


def test_command_draws_into_the_folder_and_prints_the_path(run_dir: RunDir, leash: Command) -> None:
    record_all(run_dir, RECORDS)
    for version, arguments in ((5, []), (4, ["--version", "4"])):
        path = leash("timeline", *arguments).strip()
        assert path == str(run_dir.path / f"timeline-v{version}.svg")
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    error = leash("timeline", "--version", "9", exit_code=EXIT_BAD_INPUT)
    assert "has no publish of a version 9" in error


def test_commit_that_does_not_name_its_engine_is_drawn_too() -> None:
    records = weights_records(1, 1000.0)
    values = {name: value for name, value in records[0].values.items() if name != "engine"}
    timeline = find_timeline([replace(records[0], values=values), *records[1:]])
    assert timeline is not None and "None" in timeline.rows


def test_lanes_are_the_phases_of_trainer_and_engines() -> None:
    commits = [commit_record("engine-0", 1, 99.0), commit_record("engine-0", 2, 99.5)]
    bars = find_lanes([*commits, step_record(0, 100.0)], seconds=60.0, num_bars=100)
    drawn = [(b.row, b.what, round(b.start, 2), round(b.stop, 2)) for b in bars if b.stop > b.start]
    assert drawn == [
        ("engine-0", "paused", 99.0, 99.1),
        ("engine-0", "decoding odd versions", 99.1, 99.5),
        ("trainer", "waiting for rollouts", 99.2, 99.45),
        ("trainer", "training", 99.45, 99.95),
        ("engine-0", "paused", 99.5, 99.6),
        ("engine-0", "decoding even versions", 99.6, 100.0),
        ("trainer", "copy of the shards", 99.95, 100.0),
    ]
    again = step_record(1, 110.0, lease_wait_s=9.0)
    slow = [b for b in find_lanes([step_record(0, 100.0), again], 0.1, 99) if b.stop > b.start]
    assert slow[0].what == "waiting for rollouts" and slow[0].start == pytest.approx(100.45)
    long_after = find_lanes([step_record(0, 100.0), commit_record("engine-0", 1, 900.0)], 60.0, 99)
    assert {bar.row for bar in long_after} == {"trainer"}
    (last,) = find_lanes([step_record(0, 100.0)], seconds=0.04, num_bars=1)
    assert last.stop == 100.0 and find_lanes([], seconds=60.0, num_bars=100) == ()


def test_each_rank_has_a_lane_that_shows_its_wait_for_the_slow_one() -> None:
    others = ("rest", "update", "snapshot_wait", "snapshot", "checkpoint")
    lanes = {part: [0.0, 0.0] for part in others}
    lanes |= {"at": [99.5, 99.25], "lease": [0.5, 0.25], "ranks": [4.0, 0.0], "passes": [1.0, 5.0]}
    ranks = Record(t=99.9, kind="ranks", values={"step": 1, "lanes": json.dumps(lanes)})
    bars = find_lanes([step_record(0, 99.5), ranks], seconds=60.0, num_bars=100)
    drawn = [(b.row, b.what, b.start, b.stop) for b in bars if b.stop > b.start]
    assert sorted(drawn) == [
        ("rank 0", "forward and backward", 98.5, 99.5),
        ("rank 0", "waiting for other ranks", 94.5, 98.5),
        ("rank 0", "waiting for rollouts", 94.0, 94.5),
        ("rank 1", "forward and backward", 94.25, 99.25),
        ("rank 1", "waiting for rollouts", 94.0, 94.25),
    ]
    assert {bar.what for bar in bars} <= set(LANE_KINDS), "each has its colour"


def test_engine_without_requests_is_idle_until_a_look_finds_some() -> None:
    looks = [(10.0, 4), (13.0, 0), (16.0, 0), (19.0, 2), (22.0, 0)]
    records = [
        Record(t=t, kind="engine", values={"engine": "engine-0", "running": n}) for t, n in looks
    ]
    commit = commit_record("engine-0", 1, 10.0)
    bars = find_lanes([commit, *records, step_record(0, 24.0)], seconds=60.0, num_bars=100)
    idle = [(bar.start, bar.stop) for bar in bars if bar.what == "idle"]
    assert idle == [(13.0, 19.0), (22.0, 24.0)]


def test_engine_that_is_gone_or_silent_or_does_not_answer_is_not_idle() -> None:
    def look(t: float, engine: str, running: float | None = 0) -> Record:
        values = {"engine": engine} if running is None else {"engine": engine, "running": running}
        return Record(t=t, kind="engine", values=values)

    records = [
        *(look(t, engine) for t in (10.0, 12.0) for engine in ("left", "silent", "mute")),
        event_record("engine_left", "left", t=13.0),
        *(look(t, "mute", None) for t in (14.0, 15.0, 90.0)),
    ]
    bars = find_lanes([*records, step_record(0, 100.0)], seconds=100.0, num_bars=100)
    idle = {bar.row: (bar.start, bar.stop) for bar in bars if bar.what == "idle"}
    assert idle == {"left": (10.0, 13.0), "silent": (10.0, 12.0), "mute": (10.0, 14.0)}


@pytest.mark.parametrize("event", ["engine_left", "engine_lost"])
def test_engine_that_is_gone_decodes_nothing_until_it_is_back(event: str) -> None:
    commits = [commit_record("engine-0", 1, 99.0), commit_record("engine-0", 2, 105.0)]
    gone = [event_record(event, "engine-0", t=t) for t in (98.0, 103.0, 107.0)]
    gone.append(event_record(event, "engine-1", t=101.0))
    bars = find_lanes([*commits, *gone, step_record(0, 110.0)], seconds=60.0, num_bars=100)
    decodes = [(round(b.start, 2), b.stop) for b in bars if b.what.startswith("decoding")]
    assert decodes == [(99.1, 103.0), (105.1, 107.0)]


def test_many_bars_leave_each_row_its_longest_ones_and_its_first() -> None:
    parts = ("lease", "rest", "update", "snapshot_wait", "snapshot", "checkpoint")
    records = [commit_record("engine-0", 1, 10.0)]
    for step in range(1, 31):
        at, ranks = 100.0 + 3.0 * step, [40, 7]
        lanes = {part: [0.0, 0.0] for part in parts}
        lanes |= {"rank": ranks, "at": [at, at], "ranks": [1.0, 0.1], "passes": [2.0, 2.9]}
        values = {"step": step, "lanes": json.dumps(lanes)}
        records += [Record(t=at, kind="ranks", values=values), step_record(step, at)]
    every = find_lanes(records, seconds=60.0, num_bars=1000)
    assert all(bar.stop > bar.start for bar in every)
    bars = find_lanes(records, seconds=60.0, num_bars=63)
    assert [bar for bar in bars if bar.row == "engine-0"] == [
        Bar(row="engine-0", what="decoding odd versions", start=130.0, stop=190.0)
    ]
    for row in ("rank 7", "rank 40"):
        of_row = [bar for bar in bars if bar.row == row]
        assert of_row[0].start == 130.0 and of_row[-1].stop == 190.0 and len(of_row) == 21
        assert sum(bar.what == "forward and backward" for bar in of_row) >= 20
