"""When nothing moves any more, and what is slow but moves: planted stalls and healthy runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from buffer.results import BufferStats
from configs.choices import OnStale
from configs.schema import Config, ModelConfig, TrainerConfig
from controller.metrics.history import STALL, STALL_ENDED, TUNED, Record
from controller.watch.finding import Level
from controller.watch.remarks import AT_LEAST_S
from controller.watch.run_view import NEW_CONDITIONS, RunView
from controller.watch.stalls import find_stall
from controller.watch.verdict import findings
from tests.support.controller.records import STATS, buffer_record, event_record, step_record

WAITING = replace(STATS, leased=0, ready=3, running=9, acked=0, consumed=0)
"""The trainer waits for a batch of 16 groups."""
TRAINING = replace(WAITING, leased=16)
SAMPLE_S = 1.0


def config(**trainer: int) -> Config:
    return Config(
        model=ModelConfig(path="some/model"), trainer=TrainerConfig(num_ranks=2, **trainer)
    )


class Clock:
    """A run that is sampled every second; `usual_s` is how long a step takes."""

    def __init__(self, usual_s: float = 10.0, num_steps: int = 6, **trainer: int) -> None:
        self.view = RunView(run="night", config=config(**trainer), started=0.0)
        self.view.config.trainer.num_steps = 1000
        self.t, self.tokens, self.counters = 0.0, 0.0, dict[str, float]()
        self.alarms: list[float] = []
        self.version: int | None = None
        """The trainer's, where that is not the number of its steps."""
        self.apply("phase", phase="training")
        for _ in range(num_steps):
            self.step(usual_s)

    def apply(self, kind: str, **values: Any) -> None:
        self.view.apply(Record(t=self.t, kind=kind, values=values))

    def stats(self, stats: BufferStats) -> BufferStats:
        """With the trainer's version, and engines that serve it."""
        version = self.view.step if self.version is None else self.version
        return replace(
            stats,
            gradient_accumulation_steps=self.view.config.trainer.gradient_accumulation_steps,
            trainer_version=version,
            consumed=16 * version,
            engine_versions={"engine-0": version},
        )

    def go_on(self, seconds: float, stats: BufferStats, *, tokens: bool) -> None:
        for _ in range(round(seconds / SAMPLE_S)):
            self.t += SAMPLE_S
            self.tokens += tokens
            counters = {"tokens_arrived": self.tokens, **self.counters}
            self.view.observe(self.t, self.stats(stats), {}, counters)
            if find_stall(self.view) is not None:
                self.alarms.append(self.t)

    def step(self, seconds: float, *, work: float = 0.4, saving_s: float = 0.0) -> None:
        """Samples for a while, then trains for `work` of the step, and then saves."""
        self.go_on(seconds * (1 - work), WAITING, tokens=True)
        self.go_on(seconds * work + saving_s, TRAINING, tokens=True)
        done = step_record(self.view.step, self.t, step_s=seconds * work, checkpoint_s=saving_s)
        self.view.apply(done)


def test_usual_step_is_the_median_and_needs_four_steps() -> None:
    clock = Clock(num_steps=3)
    assert clock.view.usual_step_s is None
    clock.step(300.0)
    clock.step(10.0)
    assert clock.view.usual_step_s == 10.0


@pytest.mark.parametrize(
    ("stats", "version", "part", "words"),
    [
        (TRAINING, 6, "trainer", "no step for 20 s, where a step takes 4.0 s: rollouts wait for "
         "the trainer, which has its 16 groups"),
        (replace(WAITING, ready=16), 6, "trainer", "which takes none of 16 groups that are ready"),
        (WAITING, 7, "trainer", "which hands over version 7, or saves it"),
        (WAITING, 6, "engines", "no token or group for 50 s, where a published version takes "
         "10 s: the trainer waits for rollouts: 3 of 16 groups are ready, and 9 are being sampled"),
        (replace(WAITING, running=0), 6, "workers", "3 of 16 groups are ready, and none is being"),
    ],
)  # fmt: skip
def test_stall_names_who_waits_for_whom(
    stats: BufferStats, version: int, part: str, words: str
) -> None:
    clock = Clock()
    clock.view.step = version
    began = clock.t
    clock.go_on(60.0, stats, tokens=False)
    found = find_stall(clock.view)
    assert found is not None and found.part == part
    rewards_s = 0.0 if part == "trainer" else clock.view.config.rollout.reward_timeout_s
    assert clock.alarms[0] - began == pytest.approx(AT_LEAST_S + rewards_s, abs=3.0)
    assert words in found.finding(clock.alarms[0] - SAMPLE_S).words
    assert found.finding(clock.t).level is Level.alarm


def test_paused_run_has_not_stalled_and_its_first_line_says_who_paused_it() -> None:
    clock = Clock()
    pausing = {"setting": "buffer.paused", "before": "False", "after": "True", "who": "ann@host"}
    clock.apply("tuned", **pausing)
    clock.go_on(900.0, replace(TRAINING, paused=True), tokens=False)
    assert clock.alarms == [] and find_stall(clock.view) is None
    first, *others = findings(clock.view)
    assert first.words == (
        "the run is paused for 15m 00s, by ann@host: no group begins and no step is taken, and "
        "9 groups may end"
    )
    assert first.command(" RUN=night") == "make unpause RUN=night"
    assert not any("no step" in other.words for other in others)
    ended = clock.t  # from here on the time counts
    clock.go_on(60.0, WAITING, tokens=False)
    limit_s = AT_LEAST_S + clock.view.config.rollout.reward_timeout_s
    assert clock.alarms[0] - ended == pytest.approx(limit_s, abs=3.0)


def test_trainer_that_must_wait_for_running_groups_has_not_stalled() -> None:
    clock = Clock()
    clock.view.config.buffer.on_stale = OnStale.wait
    ready = replace(WAITING, ready=16)
    clock.go_on(25.0, ready, tokens=True)
    assert clock.alarms == []
    clock.go_on(90.0, ready, tokens=False)
    found = find_stall(clock.view)
    assert found is not None and found.part == "engines" and "all at" not in found.words
    clock.go_on(90.0, replace(ready, running=0), tokens=False)
    found = find_stall(clock.view)
    assert found is not None and found.part == "trainer"


def updates(clock: Clock, number: int, *, wait_s: float, sending_s: float) -> None:
    """Each of five steps: its batches come at once, and only its last step sends the version."""
    for version in range(number):
        for step in range(1, 6):
            clock.go_on(wait_s if step == 1 else 1.0, WAITING, tokens=step > 1)
            clock.go_on(2.0, TRAINING, tokens=True)
            sends = step == 5
            clock.version = version + sends
            clock.go_on(sending_s * sends, WAITING, tokens=True)
            done = step_record(clock.view.step, clock.t, step_s=2.0, snapshot_s=sending_s * sends)
            clock.view.apply(replace(done, values={**done.values, "version": version}))


def test_update_of_several_steps_is_measured_as_a_whole() -> None:
    clock = Clock(num_steps=0, gradient_accumulation_steps=5, checkpoint_every=1000)
    updates(clock, 6, wait_s=40.0, sending_s=35.0)
    assert clock.view.usual_step_s == 3.0 and clock.view.usual_publish_s == 89.0
    assert clock.alarms == []


def test_version_that_is_handed_over_after_several_steps_is_the_trainers() -> None:
    clock = Clock(num_steps=0, gradient_accumulation_steps=5, checkpoint_every=1000)
    updates(clock, 2, wait_s=1.0, sending_s=1.0)
    clock.view.steps.pop()  # its last one goes on
    clock.view.step = 9
    clock.go_on(90.0, WAITING, tokens=False)
    found = find_stall(clock.view)
    assert found is not None and "which hands over version 2" in found.words


def test_engine_so_far_behind_that_nothing_may_begin_is_the_cause() -> None:
    clock = Clock()
    stats = replace(clock.stats(WAITING), engine_versions={"engine-0": 6, "engine-1": 2})
    for second in range(60):
        clock.view.observe(clock.t + second, stats, {}, {"tokens_generated": clock.tokens})
    found = find_stall(clock.view)
    assert found is not None and found.part == "engine-1"
    assert found.words.endswith("rollouts may not begin, as engine-1 is 4 versions behind")


def test_hung_trainer_is_found_by_its_own_work_where_rollouts_take_long() -> None:
    clock = Clock(usual_s=200.0)
    clock.view.steps = [replace(s, values={**s.values, "step_s": 8.0}) for s in clock.view.steps]
    began = clock.t
    clock.go_on(60.0, TRAINING, tokens=True)
    assert clock.alarms[0] - began == pytest.approx(3 * 8.05, abs=2.5)


def steps_of_all_lengths(clock: Clock) -> None:
    for seconds in (10.0, 25.0, 4.0, 2.0, 28.0) * 8:
        clock.step(seconds)


def step_with_answers_far_longer_than_usual(clock: Clock) -> None:
    clock.step(300.0, work=0.01)


def slow_checkpoints(clock: Clock) -> None:
    """The first was written before the first step, and the disk gets slower."""
    clock.apply("checkpoint", step=0, write_s=60.0)
    for _ in range(40):
        clock.step(5.0, saving_s=150.0 if (clock.view.step + 1) % 20 == 0 else 0.0)


def rewards_that_take_their_time(clock: Clock) -> None:
    clock.go_on(45.0, WAITING, tokens=False)
    clock.step(10.0)


def slow_evaluation(clock: Clock) -> None:
    """It takes half of the engines, and its answers are tokens too."""
    clock.step(80.0, work=0.05)
    clock.apply("eval", seconds=75.0)


def engines_that_start_again(clock: Clock) -> None:
    clock.view.apply(event_record("engine_lost", "engine-0", t=clock.t))
    clock.go_on(400.0, replace(WAITING, engines_gone=True), tokens=False)
    clock.view.apply(event_record("engine_restarted", "engine-0", t=clock.t))
    clock.go_on(25.0, WAITING, tokens=False)
    clock.step(10.0)


def worker_that_starts_again(clock: Clock) -> None:
    clock.apply("worker_lost", worker="worker-0")
    clock.go_on(100.0, replace(WAITING, running=0), tokens=False)
    clock.counters = {"workers_restarted": 1.0}
    clock.apply("engine", engine="engine-0", worker=0)
    clock.go_on(25.0, WAITING, tokens=False)
    clock.step(10.0)


def redis_that_was_away(clock: Clock) -> None:
    clock.t += 300.0
    clock.go_on(5.0, WAITING, tokens=False)
    clock.step(10.0)


def controller_that_stood_still_in_a_step(clock: Clock) -> None:
    clock.go_on(5.0, TRAINING, tokens=True)
    clock.t += 300.0
    clock.go_on(5.0, TRAINING, tokens=False)
    clock.step(10.0)


def trainer_that_starts_again(clock: Clock) -> None:
    clock.apply("phase", phase="restarting the trainer")
    clock.go_on(120.0, TRAINING, tokens=False)
    clock.apply("resumed", step=3)
    clock.apply("phase", phase="training")
    for seconds in (60.0, 10.0, 10.0, 10.0):
        clock.step(seconds)


def last_version_on_its_way(clock: Clock) -> None:
    clock.view.config.trainer.num_steps = clock.view.step
    clock.go_on(100.0, WAITING, tokens=False)


def other_phases(clock: Clock) -> None:
    for phase in ("evaluating the result", "saving the model"):
        clock.apply("phase", phase=phase)
        clock.go_on(200.0, WAITING, tokens=False)


HEALTHY = [
    steps_of_all_lengths,
    step_with_answers_far_longer_than_usual,
    slow_checkpoints,
    rewards_that_take_their_time,
    slow_evaluation,
    engines_that_start_again,
    worker_that_starts_again,
    redis_that_was_away,
    controller_that_stood_still_in_a_step,
    trainer_that_starts_again,
    last_version_on_its_way,
    other_phases,
]


@pytest.mark.parametrize("go_on", HEALTHY)
def test_healthy_run_has_no_stall(go_on: Callable[[Clock], None]) -> None:
    clock = Clock(checkpoint_every=20)
    go_on(clock)
    assert clock.alarms == []


def test_half_an_hour_without_a_fault_has_no_alarm() -> None:
    clock = Clock(usual_s=6.0, checkpoint_every=20)
    while clock.t < 1800:
        clock.step(4.0 + 7.0 * (clock.view.step % 5 == 0), saving_s=3.0)
    assert clock.alarms == [] and all(one.level is Level.hint for one in findings(clock.view))


@pytest.mark.parametrize("stats", [WAITING, TRAINING])
@pytest.mark.parametrize("change", sorted(NEW_CONDITIONS))
def test_time_before_a_change_does_not_count(change: str, stats: BufferStats) -> None:
    clock = Clock()
    clock.go_on(15.0, stats, tokens=False)
    if change.startswith("engine_"):
        clock.view.apply(event_record(change, "engine-7", t=clock.t))
    else:
        clock.apply(change)
    clock.go_on(18.0, stats, tokens=False)
    assert clock.alarms == []
    clock.go_on(960.0 if change == "worker_lost" else 40.0, stats, tokens=False)
    assert clock.alarms, "it has still stalled"


def test_step_that_is_late_while_tokens_come_is_a_hint() -> None:
    clock = Clock()
    clock.go_on(30.0, WAITING, tokens=True)
    assert [one for one in findings(clock.view) if one.words.startswith("no step")] == []
    clock.go_on(10.0, WAITING, tokens=True)
    (found,) = [one for one in findings(clock.view) if one.words.startswith("no step")]
    assert found.level is Level.hint and found.words == (
        "no step for 40 s, where one takes 10 s: 3 of 16 groups are ready, and 9 are being sampled"
    )


def test_rewards_that_do_not_come_are_named_and_no_engine_is() -> None:
    clock = Clock(usual_s=0.5)
    clock.go_on(1.0, WAITING, tokens=True)
    clock.apply("engine", engine="engine-0", worker=0, in_flight=0, scoring=180)
    clock.apply("engine", engine="engine-1", worker=0, in_flight=3, scoring=180)  # has left
    clock.apply("engine", engine="engine-0", worker=1, in_flight=0, scoring=180)
    clock.go_on(22.0, WAITING, tokens=False)
    first = findings(clock.view)[0]
    assert (first.part, first.level) == ("rewards", Level.hint)
    assert first.words.endswith("360 episodes await their rewards, and nothing is being sampled")
    clock.go_on(35.0, WAITING, tokens=False)
    found = find_stall(clock.view)
    assert found is not None and (found.part, found.advice) == ("rewards", first.advice)


def test_requests_that_stay_at_engines_are_a_stall_without_the_time_of_rewards() -> None:
    clock = Clock(usual_s=0.5)
    clock.go_on(1.0, WAITING, tokens=True)
    clock.apply("engine", engine="engine-0", worker=0, in_flight=24, scoring=8)
    clock.go_on(40.0, WAITING, tokens=False)
    found = find_stall(clock.view)
    assert found is not None and found.part == "engines"
    assert clock.alarms[0] - found.since == pytest.approx(AT_LEAST_S, abs=3.0)
    since = clock.alarms[0]
    assert clock.alarms == [since + n for n in range(len(clock.alarms))], "it never ends meanwhile"


def test_request_of_before_the_last_token_leaves_rewards_their_time() -> None:
    clock = Clock(usual_s=0.5)
    clock.apply("engine", engine="engine-0", worker=0, in_flight=24, scoring=8)
    clock.go_on(5.0, WAITING, tokens=True)  # in which it ends
    clock.go_on(AT_LEAST_S + 5.0, WAITING, tokens=False)
    assert clock.alarms == []
    clock.apply("engine", engine="engine-0", worker=0, in_flight=0, scoring=8)
    clock.go_on(clock.view.config.rollout.reward_timeout_s, WAITING, tokens=False)
    found = find_stall(clock.view)
    assert found is not None and found.part == "rewards"


def test_rewards_that_were_awaited_before_the_last_token_are_not_told() -> None:
    clock = Clock()
    clock.apply("engine", engine="engine-0", worker=0, in_flight=0, scoring=8)
    clock.go_on(40.0, WAITING, tokens=True)
    (found,) = [one for one in findings(clock.view) if one.words.startswith("no step")]
    assert found.words.endswith("9 are being sampled")


def test_wait_for_each_publish_is_not_a_late_step() -> None:
    clock = Clock(num_steps=0)
    clock.view.weights.publish_every = 8
    for step in range(32):
        clock.step(40.0 if step % 8 == 0 else 1.0)
    clock.go_on(39.0, WAITING, tokens=True)
    assert [one for one in findings(clock.view) if one.words.startswith("no step")] == []


def test_engine_that_has_all_requests_of_a_stall_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(usual_s=0.5)
    clock.go_on(1.0, WAITING, tokens=True)
    served = dict.fromkeys(("engine-0", "engine-1"), 6)
    own = clock.stats
    monkeypatch.setattr(clock, "stats", lambda stats: replace(own(stats), engine_versions=served))
    for name, worker, in_flight in (("engine-0", 0, 0), ("engine-1", 0, 9), ("engine-1", 1, 7)):
        clock.apply("engine", engine=name, worker=worker, in_flight=in_flight, scoring=0)
    clock.go_on(22.0, replace(WAITING, running=2), tokens=False)
    found, words = find_stall(clock.view), "and 2 are being sampled, all at engine-1"
    assert found is not None and words in found.words and words in findings(clock.view)[0].words


def test_pause_counts_neither_as_a_late_step_nor_in_the_pace() -> None:
    clock = Clock()
    clock.apply(TUNED, setting="buffer.paused", before="False", after="True", who="a@b")
    clock.go_on(100.0, replace(WAITING, paused=True), tokens=False)
    clock.apply(TUNED, setting="buffer.paused", before="True", after="False", who="a@b")
    clock.go_on(8.0, WAITING, tokens=True)
    assert [one for one in findings(clock.view) if one.words.startswith("no step")] == []
    clock.step(2.0)
    assert clock.view.seconds_per_step == pytest.approx(10.0)


def test_stall_is_the_verdict_until_its_end_or_a_resume() -> None:
    clock = Clock()
    clock.go_on(60.0, WAITING, tokens=False)
    found = find_stall(clock.view)
    assert found is not None
    for end in (STALL_ENDED, "resumed"):
        clock.view.apply(Record(t=clock.t, kind=STALL, values=found.values()))
        assert findings(clock.view)[0] == found.finding(clock.t)
        clock.apply(end, step=6)
        assert all(one.level is Level.hint for one in findings(clock.view))


def test_stall_stays_the_verdict_of_a_viewer_whose_clock_is_ahead() -> None:
    stall = {"part": "trainer", "since": 5.0, "usual_s": 4.0, "words": "it hangs", "advice": "look"}
    view = RunView(run="night", config=config(), started=0.0)
    view.apply(Record(t=1.0, kind="phase", values={"phase": "training"}))
    for t in range(20, 31):
        view.apply(buffer_record(float(t)))
    view.apply(Record(t=30.0, kind=STALL, values=stall))
    for t in (31.0, 33.0):
        view.observe(t + 14.0, STATS, {}, {})
        assert "it hangs" in findings(view)[0].words
        view.apply(buffer_record(t))
