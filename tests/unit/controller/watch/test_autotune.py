"""Changes of max_staleness by the run itself: each decision by hand, and whole runs simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs.schema import BufferConfig
from controller.metrics.history import RESUMED, TUNED, Record
from controller.watch.autotune import WAITS, Measured, find_move, next_move
from tests.support.controller.autotune_works import (
    BOUNDS,
    SEEN,
    Tuned,
    pace,
    simulated,
    time_to,
)
from tests.support.controller.records import STATS, step_record


def now(waited: float, ess: float = 0.9, enough: int | None = None, **more: Any) -> Measured:
    usual = {"waited": waited, "ess": ess, "enough": enough, "has_waited": waited >= WAITS}
    return Measured(**{**usual, **more})


CASES: list[tuple[str, int, Measured, dict[int, float], int | None]] = [
    ("the trainer waits: 1 / 0.7 times as many groups", 2, now(0.3), {}, 4),
    ("a little more would do", 2, now(0.1), {}, 3),
    ("it waits little", 2, now(0.02), {}, 1),
    ("it waited too short a time to say", 2, now(0.3, has_waited=False), {}, None),
    ("it has not waited, for too short a time to say", 3, now(0.0, is_whole=False), {}, None),
    ("batches lie ready", 4, now(0.0, surplus=3), {}, 1),
    ("they do, but fewer waited", 4, now(0.0, surplus=3), {2: 0.9}, 3),
    ("they do while the trainer waits for the oldest", 3, now(0.3, surplus=2), {}, 4),
    ("a value on the way was tried", 1, now(0.6), {2: 0.9}, 2),
    ("engines have places for two more batches", 1, now(0.9, places=1.5), {}, 2),
    ("engines are full", 3, now(0.3, is_full=True, is_queued=True), {}, 2),
    ("the upper bound", 4, now(0.3), {}, None),
    ("the lower bound", 1, now(0.0), {}, None),
    ("few tokens carry the updates", 3, now(0.3, 0.4), {}, 2),
    ("very few do", 4, now(0.3, 0.2), {}, 1),
    ("few do, at the lower bound", 1, now(0.3, 0.4), {}, None),
    ("they are not so few, yet would be", 2, now(0.3, 0.55), {}, None),
    ("they would be two values on", 2, now(0.3, 0.68), {}, 3),
    ("there were too few with the next value", 2, now(0.3), {3: 0.4}, None),
    ("there were enough with it", 2, now(0.3), {3: 0.8}, 3),
    ("how many is not measured", 2, now(0.3, math.nan), {4: math.nan}, 4),
    ("workers or rewards have all that they take", 2, now(0.3, is_full=True), {}, None),
    ("it was raised for a reason", 3, now(0.01), {2: 0.9}, None),
    ("long answers need more", 2, now(0.01, enough=4, is_biased=True), {}, 4),
    ("they do where engines are full", 2, now(0.3, enough=4, is_biased=True, is_full=True), {}, 4),
    ("they do, but few tokens would carry", 2, now(0.01, 0.55, 4, is_biased=True), {}, None),
    ("they need just as much", 3, now(0.01, enough=3), {}, None),
    ("they need less", 3, now(0.01, enough=2), {}, 2),
    ("no value is known to suffice", 3, now(0.01, is_biased=True), {}, None),
    ("a person's value above the bounds", 6, now(0.3), {}, None),
    ("a person's value below the bounds", 0, now(0.3), {}, None),
]


@pytest.mark.parametrize(
    ("bound", "seen", "left", "after"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_decision(bound: int, seen: Measured, left: Mapping[int, float], after: int | None) -> None:
    move = next_move(bound, seen, left, BOUNDS)
    assert (move and move[0]) == after


def test_reason_has_the_numbers() -> None:
    move = next_move(2, Measured(waited=0.2, idle=0.03, ess=0.97), {}, BOUNDS)
    why = "the trainer waited 20% for rollouts, they 3% for it; effective sample size 0.97"
    assert move == (3, why)


# Whole runs ---------------------------------------------------------------------------------------


def test_run_at_an_edge_is_left_alone_once_both_sides_are_known() -> None:
    """With 2 the trainer waits for a third of its time, with 3 not at all."""
    run = Tuned(3)
    for t in range(1, 100):
        run.step(float(t), 0.3 if run.bounds[-1] < 3 else 0.0)
    first, second = run.changes
    assert run.bounds[first] == 2 and run.bounds[second] == run.bounds[-1] == 3
    # The leash fills with 2 + 1 versions; twice as many more, and the waits are beyond doubt.
    assert second - first == 3 + 6 + 1
    assert "fresher" in run.whys[0] and run.whys[1].startswith("the trainer waited 30%")


def test_edge_is_tried_again_when_it_is_forgotten() -> None:
    run = Tuned(3)
    for t in range(1, 400):
        run.step(float(t), 0.3 if run.bounds[-1] < 3 else 0.0)
    pairs = zip(run.changes[1::2], run.changes[2::2], strict=False)
    assert len(run.changes) > 4 and min(b - a for a, b in pairs) > 90


def test_batches_that_lie_ready_at_every_look_are_given_up_together() -> None:
    run = Tuned(4)
    for t in range(1, 20):
        ready = replace(STATS, max_staleness=run.bounds[-1], ready=2 * 16 + 15)
        run.view.observe(t - 0.5, ready, {}, {})
        run.step(float(t), 0.0)
    assert run.bounds[-1] == 2 and len(run.changes) == 1 and "lay ready: 2" in run.whys[0]


@pytest.mark.parametrize(("queued", "after"), [((3, 0, 3), 2), ((0, 3, 0), 4)])
def test_requests_that_mostly_queue_make_no_room_for_more(
    queued: tuple[int, ...], after: int
) -> None:
    run = Tuned(3)
    for t in range(1, 16):
        values = {"engine": "e", "worker": 0, "queued": queued[t % 3], "in_flight": 1, "limit": 900}
        run.view.apply(Record(t=float(t), kind="engine", values=values))
        run.step(float(t), 0.3)
    assert run.bounds[-1] == after


def test_value_falls_step_by_step_where_the_trainer_never_waits() -> None:
    run = Tuned(4)
    for t in range(1, 100):
        run.step(float(t), 0.0)
    assert [run.bounds[one] for one in run.changes] == [3, 2, 1]


def test_change_by_a_person_begins_a_new_window_and_is_not_undone() -> None:
    run = Tuned(2)
    for t in range(1, 12):
        run.step(float(t), 0.3)
    run.change(11.5, "2", "4", who="ann@host")
    run.bounds[-1] = 4
    for t in range(12, 27):
        run.step(float(t), 0.0)
    assert set(run.bounds[-15:]) == {4}
    run.step(27.0, 0.0)
    assert run.bounds[-1] == 3
    run.change(27.5, "3", "9", who="ann@host")
    run.bounds[-1] = 9
    for t in range(28, 88):
        run.step(float(t), 0.3)
    assert set(run.bounds[-60:]) == {9}, "outside the bounds it stays as the person left it"


@pytest.mark.parametrize(
    "amiss",
    [
        lambda run: run.see(paused=True),
        lambda run: run.see(engine_versions={}),
        lambda run: run.view.apply(Record(t=20.0, kind="phase", values={"phase": "restarting"})),
        lambda run: run.view.apply(Record(t=20.0, kind="stall", values={})),
        lambda run: run.view.apply(Record(t=20.0, kind="worker_lost", values={})),
        lambda run: run.view.apply(Record(t=20.0, kind=RESUMED, values={"step": 19})),
        lambda run: run.view.apply(Record(t=20.0, kind=TUNED, values={"setting": "rollout.tail"})),
    ],
)
def test_nothing_changes_while_something_is_amiss(amiss: Callable[[Tuned], None]) -> None:
    run = Tuned(1)  # the lowest
    for t in range(1, 20):
        run.step(float(t), 0.0)
    assert run.changes == []
    for i in range(12):
        run.view.apply(step_record(19 + i, 19.1 + i / 20, lease_wait_s=0.04, ess=0.9))
    run.see()
    assert find_move(run.view) is not None
    amiss(run)
    assert find_move(run.view) is None


def test_run_without_the_setting_never_changes() -> None:
    run = Tuned(2)
    assert run.view.config is not None
    run.view.config = replace(run.view.config, buffer=BufferConfig(max_staleness=2))
    for t in range(1, 60):
        run.step(float(t), 0.5)
    assert run.changes == []


@pytest.mark.parametrize(
    ("name", "begin"), [("balanced", 0), ("balanced", 8), ("long tail", 0), ("engine-bound", 8)]
)
def test_simulated_run_is_nearly_as_fast_as_with_the_best_value(name: str, begin: int) -> None:
    work, plain = SEEN[name], np.ones(200)
    best = min(
        (simulated(work, 200, bound, is_tuned=False)[0] for bound in (3, 7, 8)),
        key=lambda outcome: time_to(150, outcome, work.ess(outcome)),
    )
    outcome, run = simulated(work, 200, begin, is_tuned=True)
    worth, most = work.ess(outcome), work.ess(best)
    assert pace(outcome, worth, 50) > 0.95 * pace(best, most, 50)
    assert time_to(150, outcome, worth) < 1.12 * time_to(150, best, most), "it is there soon"
    assert pace(outcome, plain, 50) > 0.95 * pace(best, plain, 50)
    assert all(0 <= bound <= 8 for bound in run.bounds)
