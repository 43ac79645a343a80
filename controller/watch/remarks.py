"""Findings about buffer and engines, late steps and stalls, evaluations and checkpoints (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from buffer.results import BufferStats
from configs.choices import OnStale
from configs.run_files import Scalar
from controller.metrics.history import Record, below
from controller.metrics.weights import WeightsView, behind_words, engines_behind
from controller.units import format_bytes, format_duration, format_number_of
from controller.watch.finding import Finding, Level, alarm, hint

TRAINER = "trainer"
"""The part of a stall that is the trainer's."""
REWARDS = "rewards"
"""The part of a stall in which all wait for rewards."""
REWARDS_LOGS = (
    "logs/rewards-*.log and logs/worker-*.log may say why; if they only come slowly, raise "
    "rollout.reward_processes"
)
PAUSED = "buffer.paused"
FACTOR, AT_LEAST_S = 3.0, 20.0
"""A step is late after so many times its usual duration, and not before so many seconds."""
LAGS_S = 2.0
"""With short steps an engine may be some versions behind for less than that, and catch up."""
SILENT_S = 15.0
"""A worker is silent that has not reported for so long while others have."""
FEWEST_EPISODES = 32
MANY_BRANCHES, MANY_OF_ANSWERS = 1.5, 0.5
"""Trajectories for each episode and for each of its answers from which they are many."""


def buffer_findings(stats: BufferStats, waited_s: float, when: str) -> list[Finding]:
    """A hint for each condition that may need action. `waited_s`: the wait of pushes, `when`."""
    found = [_blocked(stats, waited_s, when)]
    for what, number, state in (
        ("group", stats.quarantined, "kept but not trained"),
        ("prompt", stats.prompts_quarantined, "no longer run"),
    ):
        if number:
            are = f"{format_number_of(number, what)} {'is' if number == 1 else 'are'}"
            words = f"{are} in quarantine, {state}"
            found.append(hint("buffer", words, "`make quarantine` says why"))
    return [one for one in found if one is not None]


def engine_findings(
    stats: BufferStats, weights: WeightsView, version_s: float | None = None, late_s: float = 0.0
) -> list[Finding]:
    """Engines and receivers that are gone or late. `version_s`: the usual time of a version, if it
    is known; `late_s`: since the last step."""
    lost = sorted(name for name in weights.lost_engines if name not in stats.engine_versions)
    found = []
    if stats.engines_gone:
        advice = "nothing is admitted until one is back; their logs say why they ended"
        found.append(alarm("engines", "no engine serves", advice))
    if lost:
        are = "is" if len(lost) == 1 else "are"
        advice = f"it restarts, or waits for room; logs/{lost[0]}.log may say why"
        found.append(alarm(lost[0], f"{', '.join(lost)} {are} lost", advice))
    for receiver, why in weights.silent_receivers.items():
        advice = f"it gets no versions; logs/{receiver}.log may say why"
        found.append(alarm(receiver, f"{receiver} does not respond: {why}", advice))
    served, every = stats.engine_versions, weights.publish_every
    if behind := engines_behind(stats.trainer_version, served, every):
        name, lag = max(behind.items(), key=lambda item: item[1])
        # With so old weights it samples nothing that could be trained.
        is_far = lag >= stats.max_staleness + every
        lasts = version_s is None or late_s + lag * version_s >= LAGS_S
        level = Level.alarm if is_far and lasts else Level.hint
        advice = "admission follows the slowest engine"
        words = behind_words(behind)
        found.append(Finding(level=level, part=name, words=words, advice=advice))
    if late := weights.late_receiver:
        engine, late_s = late
        words = f"{engine} gets each version {format_duration(late_s)} after the first engine"
        advice = "its receiver, its machine or the link to it is slow"
        found.append(hint(engine, words, advice))
    return found


def silent_workers(engines: Mapping[tuple[str, str], Record], since: float) -> Finding | None:
    """The alarm of workers whose reports have stopped while those of others come. `engines`:
    the last record of each engine by each worker; `since`: no silence began before."""
    reported = dict[str, float]()
    for (_, worker), record in engines.items():
        reported[worker] = max(reported.get(worker, since), record.t)
    newest = max(reported.values(), default=since)
    limit_s = max(SILENT_S, len(engines) / 2)  # many report more rarely: ten records a second
    silent_s = {f"worker-{name}": newest - t for name, t in sorted(reported.items())}
    silent_s = {name: s for name, s in silent_s.items() if s > limit_s}
    if not silent_s:
        return None
    first, verb = next(iter(silent_s)), "does" if len(silent_s) == 1 else "do"
    words = f"{', '.join(silent_s)} {verb} not respond: no report for "
    words += format_duration(min(silent_s.values()))
    return alarm(first, words, f"its groups wait; logs/{first}.log may say why")


def lost_workers(away: Mapping[str, str]) -> Finding | None:
    """The alarm of workers whose processes are gone. `away`: how each was lost."""
    if not away:
        return None
    first, words = next(iter(away)), ", ".join(f"{name} {how}" for name, how in away.items())
    advice = f"Ray starts it again, and its prompts run again; logs/{first}.log may say why"
    return alarm(first, words, advice)


def paused(stats: BufferStats, changes: Sequence[Record], now: float) -> Finding:
    """The alarm of a run that somebody has paused."""
    made = [one for one in changes if one.values.get("setting") == PAUSED]
    since = f" for {format_duration(max(0.0, now - made[-1].t))}" if made else ""
    by = f", by {made[-1].values.get('who')}" if made else ""
    words = f"the run is paused{since}{by}: no group begins and no step is taken"
    if left := stats.running:
        words += f", and {format_number_of(left, 'group')} may end"
    return alarm("run", words, "it goes on where it is when it is told to", f"{PAUSED}=False")


def stall_finding(stall: Mapping[str, Scalar], now: float) -> Finding:
    """The alarm of a `stall` record."""
    part, usual_s = str(stall.get("part")), float(stall.get("usual_s", math.nan))
    is_trainer = part.startswith(TRAINER)
    what, of = ("no step", "step") if is_trainer else ("no token or group", "published version")
    lasted = format_duration(max(0.0, now - float(stall.get("since", now))))
    head = f"{what} for {lasted}, where a {of} takes {format_duration(usual_s)}"
    return alarm(part, f"{head}: {stall.get('words')}", str(stall.get("advice")))


def reported_since(engines: Sequence[Record], since: float) -> list[Record]:
    """Records of the time after the last movement: many engines report rarely, and an older record
    may count requests that have ended."""
    return [one for one in engines if one.t >= since]


def at_engines(engines: Sequence[Record]) -> bool:
    """Returns whether requests are there. `engines`: the last record of each by each worker."""
    return any(one.number("in_flight") > 0 for one in engines)


def awaited_rewards(engines: Sequence[Record]) -> str:
    """The episodes that wait for their rewards, in words; "" if requests are at engines too."""
    scoring = {one.values.get("worker"): one.count("scoring") for one in engines}
    if at_engines(engines) or not (number := sum(scoring.values())):
        return ""
    return (
        f"{format_number_of(number, 'episode')} await their rewards, and nothing is being sampled"
    )


def sampled_words(stats: BufferStats, engines: Sequence[Record]) -> str:
    """With the engine that has all requests, if there are others without."""
    there = {str(one.values.get("engine")) for one in engines if one.number("in_flight") > 0}
    is_one = len(there) == 1 < len({one.values.get("engine") for one in engines})
    return f"and {stats.running} are being sampled" + f", all at {', '.join(there)}" * is_one


def late_step(
    stats: BufferStats,
    last: Record,
    on_stale: OnStale,
    late_s: float,
    usual_s: float,
    engines: Sequence[Record],
    moved_at: float,
) -> Finding | None:
    """A hint for a step that takes long although something moves; `late_s`: since `last`."""
    is_late = late_s > max(FACTOR * usual_s, AT_LEAST_S)
    if not is_late or not stats.running or trainer_words(stats, last, on_stale):
        return None
    head = f"no step for {format_duration(late_s)}, where one takes {format_duration(usual_s)}"
    if awaited := awaited_rewards(reported_since(engines, moved_at)):
        return hint(REWARDS, f"{head}: {ready_words(stats)}, {awaited}", REWARDS_LOGS)
    words = f"{head}: {ready_words(stats)}, {sampled_words(stats, engines)}"
    return hint("rollout", words, "long answers may be at their end soon")


def trainer_words(stats: BufferStats, last: Record, on_stale: OnStale) -> str:
    """The trainer's work after its step `last`, in words; "" if it waits for a batch."""
    version = stats.trainer_version
    # With OnStale.wait it may wait for a running group first.
    may_wait = on_stale is OnStale.wait and stats.running > 0
    can_take = stats.ready >= stats.groups_per_step and not may_wait
    # Each step of an update records the version that it trains; only the last one makes the next.
    is_made = last.count("step") % stats.gradient_accumulation_steps == 0
    if version > last.count("version") + is_made:
        return f"which hands over version {version}, or saves it"
    # In the middle of an update that takes several batches it may wait for the next of them.
    if stats.leased and (stats.gradient_accumulation_steps == 1 or can_take):
        return f"which has its {stats.leased} groups"
    return f"which takes none of {stats.ready} groups that are ready" * can_take


def ready_words(stats: BufferStats) -> str:
    verb = "is" if stats.ready == 1 else "are"
    return f"{stats.ready} of {format_number_of(stats.groups_per_step, 'group')} {verb} ready"


def rewritten_histories(grown: Mapping[str, float]) -> Finding | None:
    """A hint if most answers of longer episodes begin another trajectory. `grown`: counters of a
    while."""
    num_episodes = sum(grown[name] for name, _ in below(grown, "episodes_ended:"))
    branches, turns, players = (grown.get(n, 0.0) for n in ("branches", "turns", "players"))
    is_many = (
        branches > MANY_BRANCHES * max(num_episodes, players) and branches > MANY_OF_ANSWERS * turns
    )
    if num_episodes < FEWEST_EPISODES or not is_many:
        return None
    words = (
        f"an episode is {branches / num_episodes:.1f} trajectories for its "
        f"{turns / num_episodes:.1f} answers, each with the whole history before it"
    )
    advice = "its requests do not extend the earlier ones; docs/openai.md says when they do"
    return hint("rollout", words, advice)


def eval_failed(record: Record) -> Finding:
    version, why = record.number("version"), record.values.get("why")
    return alarm(
        "evaluation", f"the evaluation of version {version:.0f} failed: {why}", "training continues"
    )


def checkpoint_failed(record: Record) -> Finding:
    step, why = record.count("step"), record.values.get("error")
    if why is None:
        return alarm(
            "checkpoint",
            f"the checkpoint of step {step} is without the buffer's groups, which does not stop "
            f"the run: {record.values.get('groups_error')}",
            "a resume whose Redis has lost them samples their prompts again",
        )
    return alarm(
        "checkpoint",
        f"there is no checkpoint of step {step}, which does not stop the run: {why}",
        "free space; the next one, if any is due, tries again",
    )


def _blocked(stats: BufferStats, waited_s: float, when: str) -> Finding | None:
    # A push is counted when its wait ends: a full buffer is reported before the first one.
    if not (full := _full(stats)):
        words = f"pushes waited {format_duration(waited_s)} {when} for room"
        return hint("buffer", words, "there is room now") if waited_s > 0 else None
    times, so_far = stats.push_blocked, ""
    if times:
        pushes = "1 push" if times == 1 else f"{times} pushes"
        so_far = f" ({pushes} waited {format_duration(stats.push_blocked_s)} so far)"
    advice = "the trainer is behind: raise the capacity, or train more groups per step"
    return hint("buffer", f"the buffer is full: {full}{so_far}", advice)


def bytes_in_use(stats: BufferStats) -> int:
    """The bytes that count against buffer.capacity_bytes: payloads that are ready or leased."""
    return stats.bytes - stats.bytes_consumed - stats.bytes_quarantined


def _full(stats: BufferStats) -> str:
    """The capacity that is used up, or ""."""
    held = stats.ready + stats.leased
    if stats.capacity_groups is not None and held >= stats.capacity_groups:
        return f"{held} groups, buffer.capacity_groups={stats.capacity_groups}"
    size = bytes_in_use(stats)
    if stats.capacity_bytes is not None and size >= stats.capacity_bytes:
        return f"{format_bytes(size)}, buffer.capacity_bytes={stats.capacity_bytes}"
    return ""
