"""Detects that nothing moves in a run any more, and who waits for whom (pure).

    trainer    it has a batch, or could take one, or hands a version over: since its last change
    rollouts   the trainer waits for a batch: since the last token or pushed group

A stage stalls after `factor` times what a step of the same run usually takes of it: the median of
the last steps, those since the run's conditions changed if they are enough. What has its own reason
does not count: checkpoints, parts that start again, a Redis that was away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from buffer.results import BufferStats
from configs.run_files import Scalar
from controller.metrics.history import Record
from controller.metrics.weights import behind_words, engines_behind
from controller.watch.finding import Finding
from controller.watch.remarks import (
    AT_LEAST_S,
    FACTOR,
    REWARDS,
    REWARDS_LOGS,
    TRAINER,
    at_engines,
    awaited_rewards,
    ready_words,
    reported_since,
    sampled_words,
    stall_finding,
    trainer_words,
)
from controller.watch.run_view import RunView

ENGINES, WORKERS = "engines", "workers"
"""The parts of a stall that are all of these: it may be another's, as groups wait for rewards."""
_SENDING = ("snapshot_s", "snapshot_wait_s")
_SAVING = ("checkpoint_s", "memory_copy_s")


@dataclass(kw_only=True, slots=True, frozen=True)
class Stall:
    part: str
    """The one that the others wait for: trainer, engines, workers, or one process by its name."""
    since: float
    """Unix time of the last progress."""
    usual_s: float
    """How long the stage takes in a usual step."""
    words: str
    """Say who waits for whom."""
    advice: str

    def values(self) -> dict[str, Scalar]:
        """Its `stall` record."""
        return {name: getattr(self, name) for name in self.__slots__}

    def finding(self, now: float) -> Finding:
        return stall_finding(self.values(), now)


def find_stall(view: RunView, factor: float = FACTOR, sooner_s: float = 0.0) -> Stall | None:
    """The stall of a run that trains, if there is one, or will be in `sooner_s`; None before four
    steps were trained."""
    stats, steps, config = view.stats, view.recent_steps, view.config
    if stats is None or stats.paused or not steps:
        return None
    if view.phase != "training" or view.step >= config.trainer.num_steps:
        return None
    found, at_least_s = _of_trainer(view, stats, steps), AT_LEAST_S
    if found is None:
        found = _of_rollouts(view, stats, view.usual_publish_s or 0.0)
        # Groups may be complete but for their rewards.
        if not at_engines(reported_since(view.serving_engines, found.since)):
            at_least_s += config.rollout.reward_timeout_s
        if stats.engines_gone or view.workers_away:
            at_least_s += config.cluster.start_timeout_s
    limit_s = max(factor * found.usual_s, at_least_s) - sooner_s
    return found if view.now - found.since > limit_s else None


def _of_trainer(view: RunView, stats: BufferStats, steps: Sequence[Record]) -> Stall | None:
    """A stall, if it has lasted for long enough; None if the trainer waits for others."""
    if not (words := trainer_words(stats, view.steps[-1], view.config.buffer.on_stale)):
        return None
    return Stall(
        part=TRAINER,
        since=max(view.trainer_at, view.changed_at),
        usual_s=(
            median(_seconds(step, ("step_s",)) for step in steps)
            + max(_seconds(step, _SENDING) for step in steps)  # only some steps send a version
            + _saving_s(view, steps)
        ),
        words=f"rollouts wait for the trainer, {words}",
        advice="logs/trainer-*.log may say why",
    )


def _saving_s(view: RunView, steps: Sequence[Record]) -> float:
    """How long the step that goes on may take to save its state."""
    trainer, number = view.config.trainer, view.step + 1
    periods = (trainer.checkpoint_every, trainer.memory_copy_every)
    is_due = any(period and number % period == 0 for period in periods)
    if not is_due and number < trainer.num_steps:
        return 0.0
    written = view.checkpoint.number("write_s") if view.checkpoint else 0.0
    known = [*(_seconds(step, _SAVING) for step in steps), *([written] * (written > 0))]
    return max(known)


def _seconds(step: Record, names: Sequence[str]) -> float:
    return sum(x for name in names if math.isfinite(x := step.number(name)))


def _of_rollouts(view: RunView, stats: BufferStats, usual_s: float) -> Stall:
    """A stall, if it has lasted for long enough."""
    since = max(view.steps[-1].t, view.moved_at, view.changed_at)
    engines = reported_since(view.serving_engines, since)
    part, who = ENGINES, f"{ready_words(stats)}, {sampled_words(stats, engines)}"
    served, every = stats.engine_versions, view.weights.publish_every
    behind = engines_behind(stats.trainer_version, served, every)
    if behind and max(behind.values()) >= stats.max_staleness + every:
        part = max(behind, key=behind.__getitem__)
        who = f"rollouts may not begin, as {behind_words(behind)}"
    elif not stats.running:
        part, who = WORKERS, f"{ready_words(stats)}, and none is being sampled"
    elif awaited := awaited_rewards(engines):
        part, who = REWARDS, f"{ready_words(stats)}, {awaited}"
    logs = f"logs/{part.rstrip('s')}{'-*' * part.endswith('s')}.log may say why"
    return Stall(
        part=part,
        since=since,
        usual_s=usual_s,
        words=f"the trainer waits for rollouts: {who}",
        advice=REWARDS_LOGS if part == REWARDS else logs,
    )
