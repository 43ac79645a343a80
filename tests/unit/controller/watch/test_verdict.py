"""The first line of `make status`, for planted faults and for a healthy run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from buffer.results import BufferStats
from configs.choices import Thoughts
from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.schema import ClusterConfig, Config, ModelConfig, TrainerConfig
from controller.metrics.history import Record
from controller.watch.faults import Room
from controller.watch.finding import Finding, Level, log_once
from controller.watch.run_view import NEW_CONDITIONS, RunView
from controller.watch.verdict import findings
from tests.support.controller.records import (
    STATS,
    commit_record,
    event_record,
    settings_of_run,
    step_record,
    weights_records,
)

HEALTHY = replace(STATS, leased=0, ready=16, running=12, trainer_version=137)
IDLE_RATES = {"trainer": 0.05, "rollout": 0.04, "rewards": 0.0}


def engine_record(t: float, name: str = "engine-0", **changes: float) -> Record:
    values: dict[str, float | int | str] = {"engine": name, "worker": 0, "running": 40, "queued": 0}
    values |= {"kv_usage": 0.4, "limit": 64, "in_flight": 40, **changes}
    return Record(t=t, kind="engine", values=values)


def view_of(
    *,
    stats: BufferStats = HEALTHY,
    waited: Mapping[str, float] = IDLE_RATES,
    counts: Mapping[str, float] | None = None,
    engine: Mapping[str, float] | None = None,
    room: Room = Room(),  # noqa: B008 (it is frozen)
    num_steps: int = 30,
    last: float = 0.0,
    **rollout: Any,
) -> RunView:
    """A run that has trained a step a second, and was looked at `last` seconds after the last one.
    `waited` are fractions of the time, `counts` the workers' per second."""
    config = settings_of_run(90)
    config.rollout = RolloutConfig(num_engines=2, **rollout)
    view = RunView(run="night", config=config, started=0.0)
    view.apply(Record(t=0.0, kind="phase", values={"phase": "training"}))
    rates = {"tokens_generated": 500.0, "episodes_ended:stop": 20.0, **(counts or {})}
    for step in range(num_steps):
        t = 1.0 + step
        view.apply(step_record(step, t))
        for record in (*weights_records(step, t - 1.0), engine_record(t, **(engine or {}))):
            view.apply(record)
        healthy = replace(HEALTHY, max_staleness=stats.max_staleness)  # which is no change
        _observe(view, t, healthy, waited, rates)
    _observe(view, num_steps + last, stats, waited, rates, room)
    return view


def _observe(
    view: RunView,
    t: float,
    stats: BufferStats,
    waited: Mapping[str, float],
    rates: Mapping[str, float],
    room: Room = Room(),  # noqa: B008
) -> None:
    pairs = {"trainer": ("trainer", "rollout"), "rollout": ("rollout", "trainer")}
    pairs["rewards"] = ("rollout", "rewards")
    waits = {pairs[who]: fraction * t for who, fraction in waited.items()}
    view.observe(t, stats, waits, {name: rate * t for name, rate in rates.items()}, room)


def verdict(view: RunView) -> Finding:
    return findings(view)[0]


@pytest.mark.parametrize("last", [0.0, 8.0])
def test_healthy_run_has_no_alarm_and_nothing_to_change(last: float) -> None:
    found = findings(view_of(last=last))
    assert [one.level for one in found] == [Level.hint]
    assert found[0].words.startswith("well balanced") and found[0].command() == ""


def test_histories_that_are_no_longer_extended_are_told() -> None:
    often = {"turns": 80.0, "branches": 70.0}
    view = view_of(counts=often)
    [told] = [one for one in findings(view) if "trajectories" in one.words]
    assert told.words.startswith("an episode is 3.5 trajectories for its 4.0 answers")
    view.config = Config(model=ModelConfig(path="m"), task=TaskConfig(thoughts=Thoughts.stripped))
    of_roles = view_of(counts={**often, "players": 60.0})
    fewer = view_of(counts={**often, "branches": 39.0})
    for usual in (view, fewer, view_of(counts={"turns": 80}), of_roles):
        assert [one.words for one in findings(usual) if "trajectories" in one.words] == []


MIB = 2**20
SLOW = {"decode_s:engine-0": 3.0, "episode_s:siblings": 50.0}
"""Seconds of episodes elsewhere than in an environment or a reward that takes long, each second."""
SQUEEZED = {"running": 6, "queued": 9, "kv_usage": 0.42, "limit": 14, "in_flight": 15}
FAULTS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "redis",
        "Redis holds 95 MiB of its maxmemory of 100 MiB",
        {"room": Room(memory_used=95 * MIB, memory_limit=100 * MIB)},
        "",
    ),
    (
        "disk",
        "the disk of the run's folder has 100 MiB left",
        {"room": Room(disk_free=100 * MIB)},
        "",
    ),
    (
        "rewards",
        "rewards fail or take longer than rollout.reward_timeout_s=30: 145 episodes of the",
        {"counts": {"rewards_failed": 5.0}},
        "",
    ),
    (
        "engine-0",
        "engine-0 is out of KV cache (99% is in use): 87 requests lost theirs",
        {
            "counts": {"preemptions:engine-0": 3.0, "requests:engine-0": 20.0},
            "engine": {"kv_usage": 0.99},
        },
        "",
    ),
    (
        "engine-0",
        "engine-0 is out of KV cache (97% is in use), 9 requests queue, and the trainer waited 60%",
        {"engine": {"kv_usage": 0.97, "queued": 9}, "waited": {"trainer": 0.6}},
        "",
    ),
    (
        "engine-0",
        "the KV cache of engine-0 is too small: of 128 requests 6 run (42% of it), 9 queue, 14 may "
        "be there since some lost theirs, and the trainer waited 60%",
        {"engine": SQUEEZED, "waited": {"trainer": 0.6}, "counts": {"preemptions:engine-0": 0.05}},
        "",
    ),
    (
        "rollout",
        "rollouts are the bottleneck",  # a queue that no lost cache explains
        {"engine": SQUEEZED, "waited": {"trainer": 0.6}},
        "make scale ROLLOUT=4",
    ),
    (
        "rollout",
        "rollouts are the bottleneck",  # one lost cache, and as many requests as it may run
        {
            "engine": {"running": 120, "queued": 9, "limit": 128},
            "waited": {"trainer": 0.6},
            "counts": {"preemptions:engine-0": 0.05},
        },
        "make scale ROLLOUT=4",
    ),
    (
        "workers",
        "rollout.max_groups_in_flight=12 is the bottleneck: 12 groups run, no engine has a queue",
        {"waited": {"trainer": 0.6}, "max_groups_in_flight": 12},
        'make tune ARGS="rollout.max_groups_in_flight=24"',
    ),
    (
        "rollout",
        "rollouts are the bottleneck: the trainer waited 60% of the last 29 s",
        {"waited": {"trainer": 0.6}},
        "make scale ROLLOUT=4",
    ),
    (
        "rollout",
        "rollouts are the bottleneck",
        {"waited": {"trainer": 0.6}, "max_groups_in_flight": 12, "engine": {"queued": 3}},
        "make scale ROLLOUT=4",
    ),
    (
        "environment",
        "environments are the bottleneck: episodes spent 75% of their time in them, and the "
        "trainer waited 60% of the last 29 s",
        {
            "waited": {"trainer": 0.6},
            "counts": {**SLOW, "episode_s:environment": 9.0},
            "stats": replace(HEALTHY, running=32),
        },
        "make tune MAX_STALENESS=3",
    ),
    (
        "environment",
        "environments are the bottleneck",
        {"waited": {"trainer": 0.6}, "counts": {**SLOW, "episode_s:environment": 9.0}},
        "",
    ),
    (
        "rewards",
        "rewards are the bottleneck: episodes spent 75% of their time in them",
        {
            "waited": {"trainer": 0.6},
            "counts": {**SLOW, "episode_s:rewards": 9.0},
            "max_groups_in_flight": 12,
            "engine": {"queued": 3},
        },
        'make tune ARGS="rollout.max_groups_in_flight=24"',
    ),
    (
        "rollout",
        "rollouts are the bottleneck",
        {"waited": {"trainer": 0.6}, "counts": {**SLOW, "episode_s:environment": 2.0}},
        "make scale ROLLOUT=4",
    ),
    (
        "rewards",
        "the reward pool is too small: episodes waited 50%",
        {"waited": {"rewards": 0.5}},
        'make stop && make resume ARGS="rollout.reward_processes=2"',
    ),
    (
        "trainer",
        "trainer and rollouts take turns",
        {"waited": {"trainer": 0.5}, "stats": replace(HEALTHY, max_staleness=0)},
        "make tune MAX_STALENESS=1",
    ),
    (
        "engines",
        "no engine serves",
        {"stats": replace(HEALTHY, engine_versions={}, engines_gone=True)},
        "",
    ),
    (
        "engine-1",
        "engine-1 is 5 versions behind",
        {"stats": replace(HEALTHY, engine_versions={"engine-0": 137, "engine-1": 132})},
        "",
    ),
]


@pytest.mark.parametrize(("part", "words", "planted", "command"), FAULTS)
def test_planted_fault_is_the_verdict(
    part: str, words: str, planted: dict[str, Any], command: str
) -> None:
    found = verdict(view_of(**planted))
    assert found.words.startswith(words) and found.part == part and found.command() == command


@pytest.mark.parametrize(
    "planted",
    [
        {"room": Room(memory_used=80, memory_limit=100, disk_free=2**40)},
        {"counts": {"rewards_failed": 0.05}},
        {"counts": {"preemptions:engine-0": 0.3, "requests:engine-0": 20.0}},
        {"engine": {"kv_usage": 0.97, "queued": 9}},
    ],
)
def test_little_of_a_fault_is_none(planted: dict[str, Any]) -> None:
    assert verdict(view_of(**planted)).words.startswith("well balanced")


def test_checkpoint_that_would_not_fit_is_told_before_it_fails() -> None:
    view = view_of(room=Room(disk_free=2**30))
    view.apply(Record(t=31.0, kind="checkpoint", values={"step": 20, "bytes": 2**31}))
    assert verdict(view).words.endswith("1 GiB left, and a checkpoint takes 2 GiB")


def test_alarm_of_learning_comes_before_what_bounds_the_run() -> None:
    view = view_of(waited={"trainer": 0.6})
    view.apply(step_record(30, 31.0, num_updates=1, num_empty_updates=1))
    first, second = findings(view)[:2]
    assert first.level is Level.alarm and first.words.startswith("no gradient")
    assert second.level is Level.hint and second.words.startswith("rollouts are the bottleneck")


@pytest.mark.parametrize("change", sorted(NEW_CONDITIONS))
def test_hint_is_not_drawn_from_the_time_before_a_change(change: str) -> None:
    view = view_of(waited={"trainer": 0.9})
    values: dict[str, float | int | str] = {"step": 30}
    if change.startswith("engine_"):
        view.apply(event_record(change, "engine-7", t=30.5))
        view.apply(commit_record("engine-7", 30, 30.6))
    else:
        view.apply(Record(t=30.5, kind=change, values=values))
    view.observe(30.6, HEALTHY, {("trainer", "rollout"): 27.1}, {})
    assert [one for one in findings(view) if one.level is Level.hint] == []
    for step in range(2):  # in which nobody waited
        view.apply(step_record(30 + step, 31.0 + step))
        view.observe(31.0 + step, HEALTHY, {("trainer", "rollout"): 27.1}, {})
    assert findings(view)[-1].words.startswith("well balanced: the trainer waited 0%")


def test_cache_of_which_workers_have_learnt_to_take_little_is_named_long_after_a_loss() -> None:
    counted = {"preemptions:engine-0": 0.1, "tokens_generated": 0.0}
    view = view_of(engine=SQUEEZED, waited={"trainer": 0.6}, counts=counted)
    for t in range(31, 331, 5):
        view.apply(step_record(t, float(t)))
        view.apply(engine_record(float(t), **SQUEEZED))
        counts = {"episodes_ended:stop": 20.0 * t, "preemptions:engine-0": 3.0}
        view.observe(float(t), HEALTHY, {("trainer", "rollout"): 0.6 * t}, counts)
    assert verdict(view).words.startswith("the KV cache of engine-0 is too small")


def test_worker_that_lost_its_process_is_named_until_one_is_back() -> None:
    view, values = view_of(), {"worker": "worker-1", "detail": "lost its process"}
    view.apply(Record(t=30.5, kind="worker_lost", values=values))
    assert (verdict(view).level, verdict(view).words) == (Level.alarm, "worker-1 lost its process")
    assert verdict(view).part == "worker-1" and "logs/worker-1.log" in verdict(view).advice
    view.apply(Record(t=30.6, kind="worker_lost", values={**values, "worker": "worker-0"}))
    view.observe(31.0, HEALTHY, {}, {"workers_restarted": 1.0})
    view.apply(engine_record(31.0))
    assert [*view.workers_away] == ["worker-1"], "worker 0 has written that"
    view.apply(Record(t=32.0, kind="worker_back", values={"worker": "worker-1"}))
    assert [one for one in findings(view) if one.level is Level.alarm] == []


def test_wait_that_begins_after_minutes_without_is_named_within_half_a_minute() -> None:
    view = view_of(num_steps=150)
    for t in range(150, 165):
        waited = {**IDLE_RATES, "rewards": 0.9 * (1 - 149 / t)}
        _observe(view, float(t), HEALTHY, waited, {"episodes_ended:stop": 20.0})
    assert verdict(view).words.startswith("the reward pool is too small: episodes waited 4")


def test_worker_that_was_restarted_is_such_a_change() -> None:
    view = view_of(waited={"trainer": 0.9}, counts={"rewards_failed": 5.0})
    view.observe(31.0, HEALTHY, {("trainer", "rollout"): 27.9}, {"workers_restarted": 1.0})
    assert findings(view) == []


def test_two_short_steps_after_a_change_say_nothing_while_no_waits_were_read() -> None:
    view = view_of(waited={"trainer": 0.9})
    view.observe(31.0, HEALTHY, {("trainer", "rollout"): 27.9}, {"workers_restarted": 1.0})
    for step in (31, 32):
        view.apply(step_record(step, step / 10 + 28.0))
    assert findings(view) == []


def test_receiver_without_an_answer_is_named_until_it_is_back() -> None:
    view = view_of()
    view.apply(event_record("excluded", "receiver-1", t=30.0))
    assert verdict(view).words == "receiver-1 does not respond: it was killed"
    view.apply(event_record("epoch", "receiver-0, receiver-1", t=31.0))
    assert verdict(view).words.startswith("well balanced")


def test_worker_whose_reports_have_stopped_is_named_until_they_come() -> None:
    view = view_of()
    for t in range(30, 50):
        other = {**engine_record(0.0).values, "worker": 1}
        view.apply(replace(engine_record(float(t)), values=other))
    assert verdict(view).words == "worker-0 does not respond: no report for 19 s"
    assert verdict(view).level is Level.alarm
    view.apply(engine_record(50.0))
    assert verdict(view).level is Level.hint


def test_worker_that_is_lost_or_reports_rarely_is_not_silent() -> None:
    lost, rare = view_of(), view_of()
    lost.apply(Record(t=30.0, kind="worker_lost", values={"worker": "worker-0"}))
    for number in range(60):
        rare.apply(engine_record(30.0, f"engine-{number}"))
    for view in (lost, rare):
        for t in range(30, 50):
            other = {**engine_record(0.0).values, "worker": 1}
            view.apply(replace(engine_record(float(t)), values=other))
        assert [one.words for one in findings(view) if "not respond" in one.words] == []


@pytest.mark.parametrize(
    "record",
    [
        event_record("receiver_left", "receiver-1", t=31.0),
        Record(t=31.0, kind="resumed", values={"step": 30}),
    ],
)
def test_what_is_gone_is_no_alarm(record: Record) -> None:
    view = view_of()
    view.apply(event_record("excluded", "receiver-1", t=30.0))
    view.apply(record)
    assert [one.words for one in findings(view) if one.level is Level.alarm] == []


def test_failures_and_losses_of_before_a_resume_are_forgotten() -> None:
    view = view_of()
    view.apply(Record(t=30.0, kind="checkpoint", values={"step": 20, "error": "no room"}))
    view.apply(Record(t=30.0, kind="eval_failed", values={"version": 20, "why": "no answer"}))
    view.apply(event_record("engine_lost", "engine-7", t=30.0))
    parts = {one.part for one in findings(view)}
    assert {"checkpoint", "evaluation", "engine-7"} <= parts
    view.apply(Record(t=31.0, kind="resumed", values={"step": 30}))
    assert findings(view) == []


def test_run_that_is_being_resumed_starts() -> None:
    view = view_of()
    view.note_resumed(4000.0)
    view.observe(4030.0, HEALTHY, {}, {})
    assert view.phase == "starting" and findings(view) == []
    view.apply(Record(t=4031.0, kind="resumed", values={"step": 30}))
    view.apply(Record(t=4031.0, kind="phase", values={"phase": "training"}))
    view.note_resumed(4000.0)
    assert view.phase == "training"


def test_engines_are_counted_by_what_is_wanted() -> None:
    view = view_of(waited={"trainer": 0.6})
    assert verdict(view).command() == "make scale ROLLOUT=4"
    values: dict[str, float | int | str] = {"setting": "rollout.num_engines", "after": "6"}
    view.apply(Record(t=0.0, kind="tuned", values=values))
    view.changed_at = 0.0
    two_of_six = [one for one in findings(view) if one.part == "rollout"]
    assert view.config.rollout.num_engines == 6 and all(not one.changes for one in two_of_six)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, ()),  # GPUs or not: nobody has said
        ({"cluster": ClusterConfig(gpus_per_rank=1)}, ()),
        ({"cluster": ClusterConfig(gpus_per_rank=0)}, ("trainer.num_ranks=4",)),
        (
            {
                "cluster": ClusterConfig(gpus_per_rank=0),
                "trainer": TrainerConfig(num_ranks=2, groups_per_step=3),
            },
            ("trainer.num_ranks=3",),
        ),
        (
            {
                "cluster": ClusterConfig(gpus_per_rank=0),
                "trainer": TrainerConfig(num_ranks=2, groups_per_step=9, min_groups_per_step=2),
            },
            (),  # refused by trainer.min_groups_per_step
        ),
    ],
)
def test_command_for_ranks_is_one_that_a_resume_takes(
    settings: dict[str, Any], changes: tuple[str, ...]
) -> None:
    view = view_of(waited={"rollout": 0.6})
    model = ModelConfig(path="some/model")
    trainer = TrainerConfig(num_ranks=2, groups_per_step=16)
    view.config = Config(**{"model": model, "trainer": trainer, **settings})
    found = verdict(view)
    assert found.words.startswith("the trainer is the bottleneck") and found.changes == changes


def test_full_workers_are_no_bottleneck_while_rewards_are_slow_or_nothing_runs() -> None:
    planted: dict[str, Any] = {"max_groups_in_flight": 12}
    slow = verdict(view_of(waited={"trainer": 0.6, "rewards": 0.5}, **planted))
    assert slow.part == "rewards"
    one = view_of(
        waited={"trainer": 0.6}, stats=replace(HEALTHY, running=0), max_groups_in_flight=1
    )
    assert verdict(one).part == "rollout"


def test_pushes_that_once_waited_are_not_told() -> None:
    once = replace(HEALTHY, push_blocked=3, push_blocked_s=60.0)
    view = view_of()
    view.apply(Record(t=30.0, kind="tuned", values={}))
    for t, waited_s in ((30.0, 60.0), (31.0, 60.0), (32.0, 62.5)):
        assert findings(view) == []
        view.observe(t, replace(once, push_blocked_s=waited_s), {}, {})
    assert verdict(view).words == "pushes waited 2.5 s of the last 2.0 s for room"
    full = replace(once, capacity_groups=16)
    assert "(3 pushes waited 1m 00s so far)" in verdict(view_of(stats=full)).words


def test_verdict_that_fails_leaves_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    view = view_of(room=Room(disk_free=1))
    view.apply(Record(t=30.0, kind="checkpoint", values={"step": 2, "error": "no room"}))
    view.engines = None  # type: ignore[assignment]
    for _ in range(2):
        assert [one.part for one in findings(view)] == ["disk", "checkpoint"]
    assert len(caplog.records) == 1


def test_engine_whose_receiver_is_slow_is_named() -> None:
    view = view_of()
    for version in range(30, 33):
        view.apply(commit_record("engine-0", version, 31.0 + version))
        view.apply(commit_record("engine-1", version, 35.0 + version))
    words = [one.words for one in findings(view)]
    assert "engine-1 gets each version 4.0 s after the first engine" in words


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ((), ""),
        (("rollout.num_engines=6",), "make scale ROLLOUT=6 RUN=night"),
        (("buffer.max_staleness=3",), "make tune MAX_STALENESS=3 RUN=night"),
        (
            ("buffer.max_staleness=3", "rollout.tail=postpone"),
            'make tune ARGS="buffer.max_staleness=3 rollout.tail=postpone" RUN=night',
        ),
        (
            ("trainer.num_ranks=4",),
            'make stop RUN=night && make resume RUN=night ARGS="trainer.num_ranks=4"',
        ),
    ],
)
def test_command_is_that_of_the_makefile(changes: tuple[str, ...], command: str) -> None:
    found = Finding(level=Level.hint, part="", words="a", advice="b", changes=changes)
    assert found.command(" RUN=night") == command
    assert found.is_live == (changes != ("trainer.num_ranks=4",))
