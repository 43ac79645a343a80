"""The state of a run for the panel, from its metrics records and samples of its buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from buffer.results import BufferStats
from configs.checks import with_live
from configs.introspection import live_settings
from configs.schema import Config
from controller.metrics.history import (
    ATTACHED,
    EVAL_COMMAND,
    EVAL_FAILED,
    RESUMED,
    STALL,
    STALL_ENDED,
    TUNED,
    WORKER_BACK,
    WORKER_LOST,
    Record,
    Waits,
)
from controller.metrics.weights import WeightsPace, WeightsView
from controller.watch.bottleneck import WaitFractions, Window, wait_fractions
from controller.watch.faults import Room, is_busy
from controller.watch.finding import Finding, log_once
from controller.watch.learning import learning_alarms
from controller.watch.length_bias import Lengths, measure_lengths

WAITS_HORIZON_S, WAITS_STEPS = 120.0, 10
"""Waits are measured over the last ten steps, between 30 and 120 s: with short steps two minutes
would hide what begins now."""
RATE_HORIZON_S = 30.0
LENGTHS_HORIZON_S = 3600.0
ENGINES_HORIZON_S = 30.0
"""An engine record that is older says nothing about now."""
PUSHES = ("pushes", "room")
"""The wait of pushes to a full buffer, beside those of the pools."""
ENGINE_EVENTS = {"engine_lost", "engine_restarted", "engine_joined", "engine_left"}
NEW_CONDITIONS = {ATTACHED, TUNED, WORKER_LOST, "redis_restarted", *ENGINE_EVENTS}
"""Kinds of records, and events, after which waits and rates are measured anew, as after RESUMED."""
FEW = 3
"""Times between steps that have a median."""
UNSEEN_S = 10.0
"""After a gap of so long between two looks, as while Redis is away, waits are measured anew."""


@dataclass(slots=True, kw_only=True)
class RunView:
    """The state of one run. Times are Unix seconds.

    The controller passes every metrics record to `apply` and every sample of Redis to `observe`:

        config = load_config(["trainer.num_steps=40"])
        view = RunView(run="night", config=config, started=990.0)
        view.apply(Record(t=1000.0, kind="step", values={"step": 1}))
        view.apply(Record(t=1002.0, kind="step", values={"step": 2}))
        view.seconds_per_step, view.eta_s     # 2.0, 76.0
    """

    run: str
    config: Config
    """With the changes of live settings so far."""
    started: float
    named: str = ""
    """Names the run behind a command, as " RUN=night"."""
    phase: str = "starting"
    now: float = 0.0
    step: int = 0
    """Completed steps."""
    resumed_at: float = 0.0
    changed_at: float = 0.0
    """When the run was last resumed, attached to, tuned or scaled, or a part of it restarted."""
    engines_at: float = 0.0
    """When an engine last came or went."""
    steps: list[Record] = field(default_factory=list)
    least_ready: list[float] = field(default_factory=list)
    """For each step, the fewest groups seen to lie ready; infinite if none looked."""
    evals: list[Record] = field(default_factory=list)
    eval_failure: Record | None = None
    """Record of the last evaluation, if it failed."""
    command_eval: Record | None = None
    """Record of the last evaluation by rollout.eval.command."""
    checkpoint_failure: Record | None = None
    """Record of the last checkpoint, if it failed."""
    checkpoint: Record | None = None
    """Record of the last checkpoint."""
    engines: dict[tuple[str, str], Record] = field(default_factory=dict)
    """The last record of each engine by each worker."""
    busy: Window[str] = field(default_factory=lambda: Window(WAITS_HORIZON_S))
    """Recent looks at engines that only train, and those at which one had as many requests as it
    takes."""
    room: Room = field(default_factory=Room)
    stopped_controller: int | None = None
    """Its process, if a signal has stopped that."""
    stats: BufferStats | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counters of the rollout workers."""
    waits: Window[tuple[str, str]] = field(default_factory=lambda: Window(WAITS_HORIZON_S))
    counted: Window[str] = field(default_factory=lambda: Window(RATE_HORIZON_S))
    """Recent counts of the rollout workers."""
    recent: Window[str] = field(default_factory=lambda: Window(WAITS_HORIZON_S))
    """The same over the time in which waits are counted."""
    answers: Window[str] = field(default_factory=lambda: Window(LENGTHS_HORIZON_S))
    """The same over the time in which answers are counted by length."""
    weights: WeightsView = field(init=False)
    moved_at: float = 0.0
    """When a token or a pushed group was last seen to have come."""
    trainer_at: float = 0.0
    """When the trainer was last seen to take a batch, to hand over a version, or to end a step."""
    workers_away: dict[str, str] = field(default_factory=dict)
    """Workers that have lost their process and are not back, and how."""
    changes: list[Record] = field(default_factory=list)
    """Changes of live settings."""
    stall: Record | None = None
    """The stall that goes on, if there is one."""
    _least_ready: float = math.inf
    _num_looks: int = 0
    _num_busy: int = 0
    _sampled_at: dict[str, float] = field(default_factory=dict)
    """By source: a viewer's clock is not the controller's, and records may come late."""
    _judged: tuple[Record, list[Finding]] | None = None
    """The last step, and the alarms after it."""

    def __post_init__(self) -> None:
        self.weights = WeightsView(publish_every=self.config.trainer.publish_every)

    def apply(self, record: Record) -> None:
        self.now = max(self.now, record.t)
        if record.kind == "phase":
            self.phase = str(record.values.get("phase", self.phase))
        elif record.kind == "step":
            self.step = record.count("step")
            self.steps.append(record)
            self.least_ready.append(self._least_ready)
            self._least_ready = math.inf
            self.trainer_at = max(self.trainer_at, record.t)
        elif record.kind == RESUMED:
            self.step = record.count("step")
            self.steps = [step for step in self.steps if step.count("step") <= self.step]
            self._begin_again(record.t)
        elif record.kind == "eval":
            self.evals.append(record)
            self.eval_failure = None
        elif record.kind == EVAL_FAILED:
            self.eval_failure = record
        elif record.kind == EVAL_COMMAND:
            self.command_eval = record
        elif record.kind == "checkpoint":
            self.checkpoint_failure = record if "error" in record.values else None
            self.checkpoint = record
        elif record.kind == "buffer":
            waits = {**record.waits, PUSHES: record.number("push_blocked_s")}
            self._sample("record", record.t, waits, record.counters)
        elif record.kind == TUNED:
            self.changes.append(record)
            # Any client of the run's Redis may have written it.
            with suppress(KeyError, ValueError):
                self._follow(record)
        elif record.kind == WORKER_LOST:
            lost = str(record.values.get("worker"))
            self.workers_away[lost] = str(record.values.get("detail"))
            for key in [key for key in self.engines if f"worker-{key[1]}" == lost]:
                del self.engines[key]  # its silence is no fault of its own
        elif record.kind == WORKER_BACK:
            self.workers_away.pop(str(record.values.get("worker")), None)
        elif record.kind in (STALL, STALL_ENDED):
            self.stall = record if record.kind == STALL else None
        elif record.kind == "engine":
            engine, worker = (str(record.values.get(name)) for name in ("engine", "worker"))
            self.engines[engine, worker] = record
            self.workers_away.pop(f"worker-{worker}", None)  # the next process has written it
            # Those of an evaluation, or of the start, say nothing about rollouts.
            at_it = [one for (name, _), one in self.engines.items() if name == engine]
            if self.phase == "training" and not any(one.number("evaluating") > 0 for one in at_it):
                self._num_looks += 1
                self._num_busy += is_busy(record)
                self.busy.add(record.t, {"looks": self._num_looks, "busy": self._num_busy})
        else:
            self.weights.apply(record)
        if record.values.get("event") in ENGINE_EVENTS:
            self.engines_at = record.t
        if NEW_CONDITIONS & {record.kind, record.values.get("event")}:
            self._measure_anew(record.t)

    def _follow(self, change: Record) -> None:
        setting, text = str(change.values["setting"]), str(change.values["after"])
        if setting in live_settings().values():
            name, last = setting.partition(".")[0], setting.rpartition(".")[2]
            section = with_live(getattr(self.config, name), {last: text})
            self.config = copy(self.config)  # others that change with it come one by one
            setattr(self.config, name, section)

    def note_resumed(self, t: float) -> None:
        """A controller has taken the run up at `t`: it starts, until there is a record of that."""
        if t > self.resumed_at:
            self.phase = "starting"
            self._begin_again(t)

    def _begin_again(self, t: float) -> None:
        """Forgets what was lost, late or failed before `t`, which says nothing about now."""
        self.resumed_at, self.workers_away = t, {}
        self.eval_failure = self.checkpoint_failure = None
        self.weights = WeightsView(publish_every=self.weights.publish_every)
        self.engines.clear()
        self._measure_anew(t)

    def _measure_anew(self, t: float) -> None:
        self.changed_at = t
        self.stall = None
        for window in (self.waits, self.counted, self.recent, self.answers, self.busy):
            window.clear()

    def observe(
        self,
        now: float,
        stats: BufferStats,
        waits: Waits,
        counters: Mapping[str, float],
        room: Room = Room(),  # noqa: B008 (it is frozen)
    ) -> None:
        """Add one sample of Redis; `waits` and `counters` are totals.

        Replaces `apply` for the `buffer` record of the same sample.
        """
        self.now = max(self.now, now)
        # Before the record of the change, which may come a look later.
        if self.stats is not None and (stats.paused, stats.max_staleness) != (
            self.stats.paused,
            self.stats.max_staleness,
        ):
            self._measure_anew(now)
        if self.stats is None or _trainer_marks(stats) != _trainer_marks(self.stats):
            self.trainer_at = now
        if self.stats is not None and stats.pushed != self.stats.pushed:
            self.moved_at = now
        self.stats, self.room = stats, room
        self._least_ready = min(self._least_ready, stats.ready)
        self._sample("look", now, {**waits, PUSHES: stats.push_blocked_s}, counters)

    def _sample(self, source: str, t: float, waits: Waits, counters: Mapping[str, float]) -> None:
        if t - self._sampled_at.get(source, t) > UNSEEN_S:
            self._measure_anew(t)
        # The latter is counted when a group ends; the histories of older versions have only that.
        marks = ("tokens_arrived", "tokens_generated")
        has_moved = any(counters.get(name) != self.counters.get(name) for name in marks)
        if has_moved or not self._sampled_at:
            self.moved_at = max(self.moved_at, t)
        self._sampled_at[source] = t
        restarts = "workers_restarted"
        if counters.get(restarts, 0.0) > self.counters.get(restarts, 0.0):
            self._measure_anew(t)
        self.counters = counters
        self.waits.add(t, waits)
        self.counted.add(t, counters)
        self.recent.add(t, counters)
        self.answers.add(t, counters)

    @property
    def last_step(self) -> Record | None:
        return self.steps[-1] if self.steps else None

    @property
    def elapsed_s(self) -> float:
        return max(0.0, self.now - self.started)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last twenty steps, without pauses; None before the second since the
        start."""
        recent = [step for step in self.steps[-20:] if step.t >= self.resumed_at]
        if len(recent) < 2:
            return None
        first, last = recent[0].t, recent[-1].t
        return (last - first - self._paused_s(first, last)) / (len(recent) - 1)

    def _paused_s(self, since: float, until: float) -> float:
        """How long the run was paused between two times."""
        paused_s, began = 0.0, math.inf
        for change in self.changes:
            if change.values.get("setting") != "buffer.paused":
                continue
            at = min(max(change.t, since), until)
            paused_s += max(0.0, at - began)
            began = at if change.values.get("after") == "True" else math.inf
        return paused_s + max(0.0, until - began)

    @property
    def recent_steps(self) -> list[Record]:
        """The last twenty steps, or two publishes, at most, since the run's conditions changed if
        they are enough; none before the fourth step since the start and a whole publish."""
        every = self.steps_per_publish
        for since in (self.changed_at, self.resumed_at):
            recent = [step for step in self.steps[-max(20, 2 * every) :] if step.t >= since]
            if len(recent) > max(FEW, every):
                return recent
        return []

    @property
    def usual_step_s(self) -> float | None:
        """Median time from one of the recent steps to the next."""
        times = [step.t for step in self.recent_steps]
        return median(b - a for a, b in pairwise(times)) if times else None

    @property
    def usual_publish_s(self) -> float | None:
        """The same for as many steps as are between two versions that the engines get."""
        times = [step.t for step in self.recent_steps]
        later = times[self.steps_per_publish :]
        return median(b - a for a, b in zip(times, later, strict=False)) if times else None

    @property
    def steps_per_publish(self) -> int:
        return self.config.trainer.gradient_accumulation_steps * self.weights.publish_every

    @property
    def eta_s(self) -> float | None:
        """Time for the remaining steps at the current pace."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, self.config.trainer.num_steps - self.step)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens, over the last half minute."""
        elapsed_s = self.counted.elapsed_s
        return self.counted.growth().get("tokens_generated", 0.0) / elapsed_s if elapsed_s else None

    @property
    def wait_fractions(self) -> WaitFractions:
        lately = self.recent_waits
        return wait_fractions(lately.growth(), lately.elapsed_s, self.config.rollout.num_workers)

    @property
    def recent_waits(self) -> Window[tuple[str, str]]:
        steps_s = WAITS_STEPS * (self.usual_step_s or math.inf)
        return self.waits.last(min(WAITS_HORIZON_S, max(RATE_HORIZON_S, steps_s)))

    @property
    def learning_alarms(self) -> list[Finding]:
        """The alarms after the last step, judged once."""
        if self.last_step is None:
            return []
        if self._judged is None or self._judged[0] is not self.last_step:
            self._judged = self.last_step, learning_alarms(self.steps)
        return self._judged[1]

    @property
    def recent_engines(self) -> list[Record]:
        """The last record of each engine by each worker, if it is recent."""
        since = max(self.changed_at, self.now - ENGINES_HORIZON_S)
        return [record for record in self.engines.values() if record.t >= since]

    @property
    def serving_engines(self) -> list[Record]:
        """The last record of each engine that serves by each worker, however old, since the run's
        conditions changed."""
        served = self.stats.engine_versions if self.stats else {}
        found = self.engines.items()
        return [one for (name, _), one in found if name in served and one.t >= self.changed_at]

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of the answers of the last hour, since the run's conditions changed."""
        since = self.now - self.answers.elapsed_s
        steps = [step for step in self.steps if step.t >= since]
        grown, most = self.answers.growth(), self.config.rollout.max_response_tokens
        try:
            return measure_lengths(grown, steps, most)
        except Exception:  # whatever is wrong with the counts
            log_once("the measurement of lengths")
            return None

    @property
    def is_measured(self) -> bool:
        """Two steps were trained under the present conditions, and waits were read meanwhile."""
        has_steps = len(self.steps) > 1 and self.steps[-2].t > self.changed_at
        return has_steps and self.waits.elapsed_s > 0

    @property
    def weights_pace(self) -> WeightsPace:
        if self.stats is None:
            return WeightsPace()
        seconds = self.seconds_per_step
        if seconds is not None:
            seconds *= self.steps_per_publish
        return self.weights.pace(seconds, self.stats.trainer_version, self.stats.engine_versions)


def _trainer_marks(stats: BufferStats) -> tuple[int, int, bool]:
    return stats.trained, stats.trainer_version, stats.leased > 0
