"""Changes of max_staleness by the run itself: each decision by hand, and whole runs simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs.schema import BufferConfig
from controller.metrics.history import RESUMED, TUNED, Record
from controller.watch.autotune import WAITS, Measured, Move, find_move, next_move
from controller.watch.verdict import wanted_engines
from tests.support.controller.autotune_works import (
    BOUNDS,
    SEEN,
    Tuned,
    pace,
    scaled,
    simulated,
    time_to,
)
from tests.support.controller.records import STATS, step_record


def now(waited: float, ess: float = 0.9, enough: int | None = None, **more: Any) -> Measured:
    usual = {
        "waited": waited,
        "usual": waited,
        "ess": ess,
        "enough": enough,
        "has_waited": waited >= WAITS,
    }
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
    ("engines are full", 3, now(0.3, is_full=True, busy=0.9, places=2.5), {}, 2),
    (
        "they are with what they have places for",
        2,
        now(0.3, is_full=True, busy=1, places=2.5),
        {},
        None,
    ),
    ("they have places for less", 4, now(0.3, is_full=True, busy=0.9, places=0.7), {}, 2),
    ("one wait was much longer than the others", 2, now(0.9, usual=0.1), {}, 3),
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
    ("engines, workers or rewards have all that they take", 2, now(0.3, is_full=True), {}, None),
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
    value, why = next_move(bound, seen, left, BOUNDS)
    assert value == (bound if after is None else after) and why


def test_reason_has_the_numbers() -> None:
    move = next_move(2, now(0.2, 0.97, idle=0.03), {}, BOUNDS)
    why = "the trainer waited 20% for rollouts, they 3% for it; effective sample size 0.97"
    assert move == (3, why)


@pytest.mark.parametrize(
    ("bound", "seen", "why"),
    [
        (4, now(0.3), "it is the largest"),
        (2, now(0.3, 0.55), "a larger one is below 0.5"),
        (2, now(0.3, is_full=True), "engines, workers or rewards have all that they take"),
        (2, now(0.3, has_waited=False), "for too short a time so far"),
        (
            1,
            now(0.3, is_full=True, busy=0.9, places=0.5),
            "requests queue at engines, but it is the",
        ),
        (3, now(0.0, is_whole=False), "lay ready: 0, but it has not been measured for long"),
        (3, now(0.01, enough=3), "but long answers need it"),
        (6, now(0.3), "it was set beside the bounds, 1 and 4"),
    ],
)
def test_reason_why_it_stays_is_told(bound: int, seen: Measured, why: str) -> None:
    value, words = next_move(bound, seen, {}, BOUNDS)
    assert value == bound and why in words


def test_no_decision_leaves_the_bounds_or_goes_back_down_or_lacks_a_reason() -> None:
    draw, some = random.Random(0), random.Random(1).random
    for _ in range(5000):
        seen = Measured(
            waited=some() ** 4,
            usual=some(),
            is_whole=some() < 0.8,
            has_waited=some() < 0.7,
            idle=some(),
            ess=draw.choice([math.nan, some(), 0.5 + some() / 2]),
            surplus=draw.randrange(4),
            is_full=some() < 0.3,
            busy=some(),
            places=draw.choice([math.inf, 6 * some()]),
            is_biased=some() < 0.2,
            enough=draw.choice([None, draw.randrange(9)]),
        )
        left = {
            draw.randrange(7): draw.choice([math.nan, some()]) for _ in range(draw.randrange(4))
        }
        bound = draw.randint(1, 4)
        value, why = next_move(bound, seen, left, BOUNDS)
        assert 1 <= value <= 4 and why
        is_uneven = seen.ess < BOUNDS.min_ess
        assert is_uneven or not any(value <= one < bound for one in left), "it was too little"
        assert value <= bound or not any(
            left.get(one, 1.0) < BOUNDS.min_ess for one in range(bound + 1, value + 1)
        ), "it was uneven"


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
        values = {"engine": "e", "worker": 0, "queued": queued[t % 3], "in_flight": 1, "limit": 300}
        run.view.apply(Record(t=float(t), kind="engine", values=values))
        run.step(float(t), 0.3)
    assert run.bounds[-1] == after


@pytest.mark.parametrize(
    "beside", [{"phase": "evaluating the start"}, {"evaluating": 40}], ids=["start", "evaluation"]
)
def test_looks_at_engines_that_do_not_only_train_do_not_count(beside: dict[str, Any]) -> None:
    """Engines idle before the training, and full while an evaluation is there."""
    run, is_start = Tuned(3), "phase" in beside
    for t in range(1, 60):
        if is_start:
            run.view.phase = "training" if t > 40 else beside["phase"]
        queued = int(t > 40) if is_start else 1
        values = {"engine": "e", "worker": 0, "queued": queued, "in_flight": 1, "limit": 300}
        run.view.apply(Record(t=float(t), kind="engine", values=values | beside))
        if t > 40:
            run.step(float(t), 0.3)
    assert run.bounds[-1] == (2 if is_start else 4)


@pytest.mark.parametrize(
    ("waits", "after"),
    [([0.6] * 3, 2), ([0.0, 570.0] + [0.0] * 30, None), ([0.6, 570.0, 0.6], 2)],
    ids=["all", "one", "all, one of them much longer"],
)
def test_from_0_it_is_raised_after_three_steps_by_what_they_usually_wait(
    waits: list[float], after: int | None
) -> None:
    run, t = Tuned(0, replace(BOUNDS, min_staleness=0)), 0.0
    for waited_s in waits:
        run.step(t := t + max(1.0, waited_s / 0.95), waited_s)
    assert run.changes == [3] * (after is not None) and run.bounds[-1] == (after or 0)


def test_leash_longer_than_the_steps_to_measure_is_measured_too() -> None:
    run = Tuned(8, replace(BOUNDS, max_staleness=8))
    for t in range(1, 40):
        run.step(float(t), 0.0)
    assert run.changes


def test_wait_for_ranks_that_lease_later_is_none_for_rollouts() -> None:
    run = Tuned(1, BOUNDS)
    for t in range(40):
        run.view.apply(step_record(t, float(t), lease_wait_s=0.0, lease_ranks_s=0.4, ess=0.9))
    run.see()
    stays = find_move(run.view, wanted_engines)
    assert isinstance(stays, str) and stays.startswith("the trainer waited 0% for rollouts")


# Engines ------------------------------------------------------------------------------------------


def with_engines(number: int, most: int, bound: int) -> Tuned:
    run = Tuned(bound, replace(BOUNDS, max_engines=most))
    run.view.config.rollout.num_engines = number
    run.see()
    return run


def work_on(run: Tuned, times: range, waited: float, idle: float, queued: int = 0) -> None:
    """Steps in which trainer and rollouts wait for these fractions of the time."""
    for t in times:
        waits = {("trainer", "rollout"): waited * t, ("rollout", "trainer"): idle * t}
        run.view.waits.add(float(t), waits)
        values = {"engine": "e", "worker": 0, "queued": queued, "in_flight": 1, "limit": 900}
        run.view.apply(Record(t=float(t), kind="engine", values=values))
        run.step(float(t), waited)


@pytest.mark.parametrize("queued", [0, 1])
def test_engine_joins_where_engines_are_full_or_the_bound_may_go_no_further(queued: int) -> None:
    run = with_engines(1, 2, bound=4)
    work_on(run, range(1, 18), 0.4, 0.0, queued)
    assert run.num_engines == 2 and set(run.bounds) == {4}
    why = "requests queue at engines" if queued else "max_staleness may not grow"
    assert run.whys == [f"the trainer waited 40% for rollouts, and {why}"]
    run.view.stats = replace(STATS, engine_versions={"engine-0": 136})
    assert find_move(run.view, wanted_engines) == "1 of 2 engines serve", (
        "while one joins nothing else changes"
    )
    work_on(run, range(18, 60), 0.4, 0.0)
    assert run.num_engines == 2, "the most"


def test_engine_does_not_join_without_a_place_or_the_setting() -> None:
    run = with_engines(1, 2, bound=4)
    run.look = lambda t: 0  # type: ignore[method-assign]
    work_on(run, range(1, 18), 0.4, 0.0)
    move = find_move(run.view, wanted_engines)
    assert (
        isinstance(move, Move)
        and move.setting == "rollout.num_engines"
        and move.after > move.before
    )
    stays = find_move(run.view, wanted_engines, num_free=0)
    assert isinstance(stays, str) and "it is the largest" in stays
    run.view.config = replace(run.view.config, buffer=BufferConfig(autotune=BOUNDS))
    assert isinstance(find_move(run.view, wanted_engines), str)


def test_idle_engine_leaves_and_is_not_tried_without_again_once_it_was_missed() -> None:
    run = with_engines(3, 3, bound=1)  # the least
    work_on(run, range(1, 12), 0.0, 0.5)
    assert run.num_engines == 2 and "no groups for 50% of their time" in run.whys[0]
    work_on(run, range(12, 40), 0.0, 0.3)
    assert run.num_engines == 2, "one alone would be busy for more than its time"
    run = with_engines(3, 3, bound=1)
    work_on(run, range(1, 3), 0.0, 0.5)
    run.change(2.5, "2", "3", setting="rollout.num_engines")
    work_on(run, range(3, 60), 0.0, 0.5)
    assert run.num_engines == 3


def test_engine_stays_where_some_workers_are_idle_but_engines_are_full() -> None:
    run = with_engines(3, 3, bound=1)
    for t in range(1, 40):
        values = {"engine": "e", "worker": 0, "queued": int(t % 3 == 0), "in_flight": 1}
        run.view.apply(Record(t=float(t), kind="engine", values={**values, "limit": 900}))
        run.view.waits.add(float(t), {("rollout", "trainer"): 0.5 * t})
        run.step(float(t), 0.0)
    assert run.num_engines == 3


def test_one_long_wait_that_is_booked_at_its_end_makes_no_engine_leave() -> None:
    run, waited_s = with_engines(3, 3, bound=1), 0.0
    for t in range(1, 200):
        waited_s += 18.0 * (t % 90 == 0)  # while a checkpoint was written
        run.view.waits.add(float(t), {("rollout", "trainer"): waited_s})
        run.step(float(t), 0.0)
    assert run.num_engines == 3


@pytest.mark.parametrize(("waited", "after"), [(0.0, 1), (0.4, 4)])
def test_engine_that_never_comes_holds_up_the_number_of_engines_alone(
    waited: float, after: int
) -> None:
    run = with_engines(1, 3, bound=4)
    work_on(run, range(1, 18), 0.4, 0.0)
    assert run.num_engines == 2
    for t in range(20, 1000):
        waits = {("trainer", "rollout"): waited * t, ("rollout", "trainer"): (0.6 - waited) * t}
        run.view.waits.add(float(t), waits)
        run.view.apply(step_record(t, float(t), lease_wait_s=waited, ess=0.9))
        run.see(engine_versions={"engine-0": 136})
        run.look(float(t))
        assert t > 600 or run.bounds[-1] == 4
    assert run.bounds[-1] == after and run.num_engines == 2
    run.see(engine_versions={})
    assert find_move(run.view, wanted_engines) == "0 of 2 engines serve"


def test_simulated_run_gets_the_engines_that_it_needs_and_no_more() -> None:
    assert scaled(SEEN["engine-bound"], 2, most=4, num_steps=150)[-1] == 4
    assert scaled(SEEN["trainer-bound"], 2, most=8, num_steps=150) == [4]


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
    assert isinstance(find_move(run.view, wanted_engines), Move)
    amiss(run)
    assert isinstance(find_move(run.view, wanted_engines), str)


def test_run_without_the_setting_never_changes() -> None:
    run = Tuned(2)
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
