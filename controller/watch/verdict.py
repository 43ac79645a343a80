"""Everything that an operator should know about a run, what matters most first (pure).

    alarms   rewards, engines, memory, disk and checkpoints that fail; a run in which nothing moves,
             that does not learn, or that trains short answers only
    hints    what bounds the run, and what else somebody should look at

The first one is the verdict. What is measured over time is of the last minutes, and never from
before the run was resumed, attached to, tuned or scaled, or a part of it restarted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from buffer.results import BufferStats
from configs.checks import with_live
from configs.choices import Thoughts
from controller.metrics.history import Record, of_kind, training_seconds
from controller.metrics.weights import WeightsView
from controller.units import format_duration
from controller.watch.bottleneck import Sizes, bottleneck, outside_engines, wait_fractions
from controller.watch.faults import (
    failed_rewards,
    full_caches,
    full_disk,
    full_memory,
    low_admission,
    stopped_controller,
)
from controller.watch.finding import Finding, Level, log_once
from controller.watch.learning import learning_alarms
from controller.watch.length_bias import length_bias
from controller.watch.remarks import (
    buffer_findings,
    checkpoint_failed,
    engine_findings,
    eval_failed,
    late_step,
    lost_workers,
    paused,
    rewritten_histories,
    silent_workers,
    stall_finding,
)
from controller.watch.run_view import PUSHES, RunView
from controller.watch.stages import episode_seconds


def findings(view: RunView) -> list[Finding]:
    """Alarms before hints, and a run that is well balanced last."""
    found = list[Finding]()
    try:
        for one in _in_order(view):
            if one is not None:
                found.append(_possible(one, view))
    except Exception:  # a verdict that fails must not end the run
        log_once("the verdict on the run")
    return sorted(found, key=lambda one: (one.level is Level.hint, not one.part))


def parts_at_fault(view: RunView) -> dict[str, dict[str, float]]:
    """The parts with an alarm and with a hint: {"alarm": {"redis": 1}, "hint": {}}."""
    found = findings(view)
    return {
        level.value: {one.part: 1.0 for one in found if one.part and one.level is level}
        for level in Level
    }


def wanted_engines(view: RunView) -> int | None:
    """How many engines the first hint with a command would have, if that is what it is about."""
    hints = [one for one in findings(view) if one.level is Level.hint and one.changes]
    name, _, number = hints[0].changes[0].partition("=") if hints else ("", "", "")
    return int(number) if name == "rollout.num_engines" else None


def _in_order(view: RunView) -> Iterator[Finding | None]:
    """The order among alarms and that among hints."""
    stats, usual_s, rollout = view.stats, view.usual_step_s, view.config.rollout
    on_stale = view.config.buffer.on_stale
    waited = view.wait_fractions.trainer_for_rollout
    grown, elapsed_s = view.counted.growth(), view.counted.elapsed_s
    if stats is not None and stats.paused:
        yield paused(stats, view.changes, view.now)
    if view.stopped_controller is not None:
        yield stopped_controller(view.stopped_controller)
    yield full_memory(view.room)
    yield full_disk(view.room, view.checkpoint)
    if view.checkpoint_failure is not None:
        yield checkpoint_failed(view.checkpoint_failure)
    yield failed_rewards(grown, elapsed_s, rollout)
    of_hour, most = view.answers.growth(), rollout.engine.max_running_requests
    yield from full_caches(grown, elapsed_s, view.recent_engines, waited, of_hour, most)
    if view.stall is not None:
        yield stall_finding(view.stall.values, view.now)
    yield lost_workers(view.workers_away)
    if stats is not None:
        # Before what bounded the run so far.
        is_moving = view.phase == "training" and view.stall is None and not stats.paused
        if usual_s is not None and is_moving:
            late_s = view.now - max(view.steps[-1].t, view.changed_at)
            # The wait for a version comes once a publish.
            usual_s = max(usual_s, view.usual_publish_s or 0.0)
            last, now = view.steps[-1], view.serving_engines
            yield late_step(stats, last, on_stale, late_s, usual_s, now, view.moved_at)
        if view.is_measured:
            for_rewards = view.wait_fractions.rollout_for_rewards
            engines = view.recent_engines
            yield low_admission(stats, waited, for_rewards, engines, rollout)
            yield _bottleneck(view, stats)
        late_s = view.now - view.steps[-1].t if view.steps else 0.0
        version_s = view.usual_step_s and view.usual_step_s * stats.gradient_accumulation_steps
        yield from engine_findings(stats, view.weights, version_s, late_s)
        yield silent_workers(view.engines, view.changed_at)
        yield from buffer_findings(stats, view.recent_waits.growth().get(PUSHES, 0.0), _when(view))
    yield from view.learning_alarms
    if view.eval_failure is not None:
        yield eval_failed(view.eval_failure)
    if stats is not None and (lengths := view.lengths) is not None:
        yield length_bias(lengths, stats.max_staleness, on_stale)
    if view.config.task.thoughts is not Thoughts.stripped:
        yield rewritten_histories(view.answers.growth())


def _bottleneck(view: RunView, stats: BufferStats) -> Finding:
    serving = len(stats.engine_versions)
    rollout = view.config.rollout
    sizes = Sizes(
        engines=max(serving, rollout.num_engines),
        reward_actors=rollout.reward_actors,
        reward_processes=rollout.reward_processes,
    )
    # On GPUs a resume may find no room for more ranks.
    if view.config.cluster.gpus_per_rank == 0:
        trainer = view.config.trainer
        step = trainer.sequence_parallel_size
        most = step * (trainer.groups_per_step // trainer.num_minibatches)
        sizes = replace(sizes, ranks=trainer.num_ranks, rank_step=step, most_ranks=most)
    pace, fractions = view.weights_pace, view.wait_fractions
    found = bottleneck(fractions, stats.max_staleness, _when(view), pace, sizes)
    if found.part == "rollout":
        episodes = episode_seconds(view.recent.growth())
        waited, more = fractions.trainer_for_rollout, _more_groups(view, stats)
        found = outside_engines(episodes, waited, _when(view), *more) or found
    # Those that are to serve already may be enough.
    is_short = serving < rollout.num_engines and found.part == "rollout"
    return replace(found, changes=()) if is_short else found


def _more_groups(view: RunView, stats: BufferStats) -> Iterator[str]:
    """The limit at which the groups that run are, raised."""
    most, workers = view.config.rollout.max_groups_in_flight, view.config.rollout.num_workers
    # A group that has just ended is not replaced yet.
    if stats.running + workers >= most * workers:
        yield f"rollout.max_groups_in_flight={2 * most}"
    elif stats.running + stats.ready + stats.leased + workers >= stats.limit():
        yield f"buffer.max_staleness={stats.max_staleness + 1}"


def _when(view: RunView) -> str:
    return f"of the last {format_duration(view.recent_waits.elapsed_s)}"


def _possible(found: Finding, view: RunView) -> Finding:
    """Without its changes, if the settings of the run do not go with them."""
    config = view.config
    try:
        for change in found.changes:
            name, _, text = change.partition("=")
            of, _, setting = name.partition(".")
            section = with_live(getattr(config, of), {setting: text})
            config = replace(config, **{of: section})
    except ValueError:
        return replace(found, changes=())
    return found


def findings_of_ended(records: Sequence[Record]) -> list[Finding]:
    """The alarms at the end of a run that is over, and what bounded it in all its time."""
    steps, samples = of_kind(records, "step"), of_kind(records, "buffer")
    found, seconds = learning_alarms(steps), training_seconds(steps)
    if not samples or len(steps) < 2:
        return found
    weights = WeightsView()
    for publish in of_kind(records, "publish"):
        weights.apply(publish)
    # An engine that was late at the end says nothing about the whole run.
    num_publishes = sum(step.number("snapshot_s") > 0 for step in steps)
    pace = weights.pace(seconds / max(1, num_publishes), trainer_version=0, engine_versions={})
    last = samples[-1]
    fractions = wait_fractions(last.waits, seconds)
    bound = bottleneck(fractions, last.count("max_staleness"), "of the run", pace)
    return [*found, replace(bound, changes=())]
