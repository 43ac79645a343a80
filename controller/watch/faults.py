"""Faults with a known cause: rewards that fail, engines without memory, full disks (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from buffer.results import BufferStats
from configs.rollout_schema import RolloutConfig
from controller.metrics.history import Record, below
from controller.units import format_bytes, format_duration
from controller.watch.finding import MUCH, Finding, alarm, hint

MANY_FAILED = 0.1
"""Fraction of the episodes without a full reward, and of the requests that lost their KV cache."""
FEW = 3
"""Fewer failures than this are chance."""
LOW_LIMIT = 0.5
"""Fraction of what an engine may run; fewer requests have filled its cache."""
FULL_MEMORY, FULL_CACHE = 0.9, 0.95
LEAST_FREE = 256 * 2**20
"""Bytes that logs and Redis' file may take before anybody looks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """Memory of Redis and disk of the run's folder, in bytes."""

    memory_used: int = 0
    memory_limit: int = 0
    """maxmemory of the server; 0: none."""
    disk_free: int | None = None


def stopped_controller(pid: int) -> Finding:
    return alarm(
        "controller",
        f"the controller, process {pid}, stands still: a signal has stopped it",
        f"`kill -CONT {pid}` lets it go on; until then lost trainer ranks are not replaced, "
        "and evaluations and the history wait",
    )


def full_memory(room: Room) -> Finding | None:
    used, limit = room.memory_used, room.memory_limit
    if not limit or used < FULL_MEMORY * limit:
        return None
    return alarm(
        "redis",
        f"Redis holds {format_bytes(used)} of its maxmemory of {format_bytes(limit)}",
        "all of the run wait for it when it is full: raise maxmemory (CONFIG SET maxmemory), or "
        "set buffer.capacity_bytes below it",
    )


def full_disk(room: Room, checkpoint: Record | None) -> Finding | None:
    """`checkpoint`: the record of the last one."""
    if (free := room.disk_free) is None:
        return None
    size = 0 if checkpoint is None else checkpoint.count("bytes")
    if free >= max(LEAST_FREE, size):
        return None
    needs = f", and a checkpoint takes {format_bytes(size)}" if size else ""
    words = f"the disk of the run's folder has {format_bytes(free)} left{needs}"
    return alarm("disk", words, "free space on it: checkpoints, logs and metrics wait for it")


def failed_rewards(
    grown: Mapping[str, float], elapsed_s: float, rollout: RolloutConfig
) -> Finding | None:
    """`grown`: what the workers counted in the last `elapsed_s`."""
    failed = grown.get("rewards_failed", 0.0)
    ended = sum(grown[name] for name, _ in below(grown, "episodes_ended:"))
    if failed < max(FEW, MANY_FAILED * ended):
        return None
    return alarm(
        "rewards",
        f"rewards fail or take longer than rollout.reward_timeout_s={rollout.reward_timeout_s:g}: "
        f"{failed:.0f} episodes of the last {format_duration(elapsed_s)} are without, and "
        f"{ended:.0f} ended",
        "logs/worker-*.log and logs/rewards-*.log say which part and why",
    )


def full_caches(
    grown: Mapping[str, float],
    elapsed_s: float,
    engines: Sequence[Record],
    trainer_waited: float,
    of_hour: Mapping[str, float],
    most: int,
) -> Iterator[Finding]:
    """`engines`: the last record of each by each worker. `trainer_waited`: fraction of the time.
    `of_hour`: as `grown`, of the last hour. `most`: the requests that an engine may run."""
    for name in sorted({str(one.values.get("engine")) for one in engines}):
        of_it = [one for one in engines if one.values.get("engine") == name]
        used, queued = (max(one.number(field) for one in of_it) for field in ("kv_usage", "queued"))
        lost, requests = (
            grown.get(f"{field}:{name}", 0.0) for field in ("preemptions", "requests")
        )
        words, advice = f"{name} is out of KV cache ({used:.0%} is in use)", _CACHE_ADVICE
        if lost >= max(FEW, MANY_FAILED * requests):
            words += f": {lost:.0f} requests lost theirs in the last {format_duration(elapsed_s)}"
            yield alarm(name, f"{words}, and {requests:.0f} began", f"lower {MOST}, or {advice}")
        elif used >= FULL_CACHE and queued > 0 and trainer_waited >= MUCH:
            words += f", {queued:.0f} requests queue, and the trainer waited "
            words += f"{trainer_waited:.0%}"
            yield hint(name, words, f"a lower {MOST} would not help; {advice}")
        elif queued > 0 and trainer_waited >= MUCH and of_hour.get(f"preemptions:{name}", 0.0) > 0:
            # Since then the workers send so few that the cache is seldom full, and hardly any lose
            # theirs.
            running = max(one.number("running") for one in of_it)
            limit = sum(one.number("limit") for one in of_it)
            if max(running, limit) <= LOW_LIMIT * most:
                words = f"the KV cache of {name} is too small: of {most} requests {running:.0f} run"
                words += f" ({used:.0%} of it), {queued:.0f} queue, {limit:.0f} may be there since "
                words += f"some lost theirs, and the trainer waited {trainer_waited:.0%}"
                yield hint(name, words, f"a lower {MOST} would not help; {advice}")


MOST = "rollout.engine.max_running_requests"
_CACHE_ADVICE = "give the engine more memory (rollout.engine.mem_fraction), or add engines"


def is_busy(engine: Record) -> bool:
    """Returns whether it has as many requests as it takes, by its record."""
    return engine.number("queued") > 0 or engine.number("in_flight") >= engine.number("limit")


def low_admission(
    stats: BufferStats,
    trainer_waited: float,
    rewards_waited: float,
    engines: Sequence[Record],
    rollout: RolloutConfig,
) -> Finding | None:
    """The engines could take more groups than the workers may have in flight. Groups that wait for
    their rewards are in flight too."""
    most, workers = rollout.max_groups_in_flight, rollout.num_workers
    # A group that has just ended is not replaced yet.
    is_full = stats.running + workers >= most * workers and stats.running < stats.limit()
    if not is_full or not stats.running or not engines:
        return None
    if trainer_waited < MUCH or rewards_waited >= MUCH:
        return None
    if any(map(is_busy, engines)):
        return None
    in_all = f", with {workers} workers" if workers > 1 else ""
    return hint(
        "workers",
        f"rollout.max_groups_in_flight={most} is the bottleneck{in_all}: {stats.running} groups "
        f"run, no engine has a queue, and the trainer waited {trainer_waited:.0%}",
        "raise it; more engines would not help",
        f"rollout.max_groups_in_flight={2 * most}",
    )
