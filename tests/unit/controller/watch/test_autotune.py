"""Changes of max_staleness by the run itself: each decision by hand, and whole runs simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from buffer.results import BufferStats
from configs.choices import OnStale
from configs.schema import AutotuneConfig, BufferConfig, Config, ModelConfig
from controller.commands.simulate import lognormal_lengths
from controller.metrics.history import RESUMED, TUNED, Record
from controller.simulate.events import Outcome, Setting, simulate
from controller.simulate.machine import Machine
from controller.watch.autotune import SETTING, WAITS, WHO, Measured, find_move, next_move
from controller.watch.run_view import RunView
from tests.support.controller.records import STATS, step_record

BOUNDS = AutotuneConfig(min_staleness=1, max_staleness=4, min_ess=0.5, steps=5)


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


class Tuned:
    """A run that is fed step by step, whose changes are recorded as the controller does."""

    def __init__(self, bound: int, config: AutotuneConfig = BOUNDS) -> None:
        buffer = BufferConfig(max_staleness=bound, autotune=config)
        whole = Config(model=ModelConfig(path="m"), buffer=buffer)
        self.view = RunView.of_run("night", whole, 0.0)
        self.view.num_engines = 1
        self.view.phase = "training"
        self.bounds = [bound]
        """The one in force in each step."""
        self.whys = list[str]()

    def see(self, **changes: object) -> None:
        full = (self.bounds[-1] + 1) * STATS.groups_per_step
        usual = {"max_staleness": self.bounds[-1], "ready": 0, "leased": 0, "running": full}
        stats: BufferStats = replace(STATS, **{**usual, **changes})
        self.view.stats = stats

    def step(self, t: float, waited_s: float, ess: float = 0.9) -> int:
        number = self.view.step
        self.view.apply(step_record(number, t, lease_wait_s=waited_s, ess=ess))
        self.see()
        return self.look(t)

    def look(self, t: float) -> int:
        before, move = self.bounds[-1], find_move(self.view)
        self.bounds.append(before if move is None else move[0])
        if move is not None:
            self.change(t, str(before), str(move[0]), **move[1])
        return self.bounds[-1]

    def change(self, t: float, before: str, after: str, who: str = WHO, **said: object) -> None:
        values = {"setting": SETTING, "before": before, "after": after, "who": who, **said}
        self.whys.append(str(said.get("why")))
        self.view.apply(Record(t=t, kind=TUNED, values=values))

    @property
    def changes(self) -> list[int]:
        """Steps after which it changed."""
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        return [number for number, (a, b) in enumerate(pairs, start=1) if a != b]


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


MACHINE = Machine(
    gpu="H100", num_params=9e9, active_params=9e9, kv_elements=65536, tp_size=1, max_running=256
)
BALANCED = Setting(
    machine=MACHINE,
    num_engines=4,
    num_trainer_gpus=2,
    num_steps=200,
    groups_per_step=8,
    prompt_tokens=256,
    max_staleness=0,
    on_stale=OnStale.wait,
    max_commits=8,
)
WORKLOADS = {
    "balanced": (BALANCED, "500,1000"),
    "long tail": (replace(BALANCED, num_engines=6, num_trainer_gpus=1), "1000,8000"),
}
"""A setting, with the median and the 99th percentile of the lengths."""
WIDE = AutotuneConfig(min_staleness=0, max_staleness=8, steps=10)


def simulated(
    workload: str, num_steps: int, bound: int, *, is_tuned: bool
) -> tuple[Outcome, Tuned]:
    """The run with this max_staleness, or with one that autotune moves from there."""
    setting, lengths = WORKLOADS[workload]
    setting = replace(setting, num_steps=num_steps, max_staleness=bound)
    run = Tuned(bound, WIDE)

    def tune(outcome: Outcome) -> int:
        begin, end = [0.0, *outcome.ends][-2:]
        return run.step(end, end - begin - outcome.train_s[-1])

    draw = lognormal_lengths(lengths, 8, 30_000)()
    return simulate(setting, draw, tune if is_tuned else None), run


def pace(outcome: Outcome, num_last: int) -> float:
    """Steps a second, of the last ones."""
    return num_last / (outcome.ends[-1] - outcome.ends[-1 - num_last])


@pytest.mark.parametrize(
    ("workload", "begin"), [("balanced", 0), ("balanced", 8), ("long tail", 0)]
)
def test_simulated_run_ends_nearly_as_fast_as_with_the_best_value(
    workload: str, begin: int
) -> None:
    """The largest is the fastest, since the trainer waits for the oldest: on_stale=wait."""
    best, _ = simulated(workload, 200, 8, is_tuned=False)
    outcome, run = simulated(workload, 200, begin, is_tuned=True)
    assert pace(outcome, 50) > 0.95 * pace(best, 50)
    assert outcome.ends[-1] < 1.15 * best.ends[-1], "it is there soon"
    assert all(0 <= bound <= 8 for bound in run.bounds) and len(run.changes) <= 6
