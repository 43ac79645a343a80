"""Shares of the time that each stage of a run takes, and what it waits for meanwhile (pure).

    episodes   prompt ─► queue ─► prefill ─► decode ─► environment ─► rewards ─► siblings ─► push
    trainer    lease ─► plan ─► score ─► passes ─► update ─► snapshot ─► checkpoint
    versions   snapshot ─► encode ─► wire ─► verify ─► commit
    engines    gate ─► drain ─► pause

Of the seconds that episodes, many at a time, took for these; of the trainer's (rank 0); of those
from versions' snapshots until every engine served them; and of the clock's, for each engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.metrics.history import Record, below, of_kind, series
from controller.watch.bottleneck import Window

RECENT_S, MAX_SAMPLES = 600.0, 1000
STEP_PARTS = ("plan", "score", "passes", "update", "critic", "ranks")
TRAINER = {
    "lease": "lease_wait_s",
    **{part: f"step_{part}_s" for part in STEP_PARTS},
    "rest of step": "step_s",
    "snapshot": "snapshot_s",
    "snapshot wait": "snapshot_wait_s",
    "checkpoint": "checkpoint_s",
    "checkpoint wait": "checkpoint_wait_s",
}
VERSION = {part: f"{part}_s" for part in ("snapshot", "encode", "wire", "verify")}
AFTER = ("environment", "rewards", "siblings", "held", "push")
"""Stages of an episode beside its requests, but for its prompt."""
COMMIT = {"gate": "gate_wait_s", "drain": "drain_s", "pause": "pause_s"}
WAITS_FOR = {
    "queue": "engines",
    "environment": "environments, tools, agents",
    "rewards": "rewards",
    "siblings": "the rest of the group",
    "held": "other groups",
    "push": "the buffer",
    "lease": "rollouts",
    "ranks": "other ranks",
    "snapshot wait": "the wire",
    "checkpoint wait": "the disk",
    "commit": "engines",
    "gate": "other engines",
    "drain": "requests",
    "pause": "weights",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    of: str
    name: str
    share: float
    waits_for: str  # empty: it works


def stages(records: Sequence[Record], horizon_s: float = RECENT_S) -> list[Stage]:
    """The stages that took time in the last `horizon_s` of a run, of each kind in order."""
    since = records[-1].t - horizon_s if records else 0.0
    recent = records[bisect_left(records, since, key=lambda record: record.t) :]
    counted = Window[str](horizon_s)
    if recent and recent[0] is records[0]:
        counted.add(recent[0].t, {})  # the run's first counts may be older than its first sample
    samples = of_kind(recent, "buffer")[::-1]
    # Of a whole run's samples, each of these and the last are enough to see a server begin anew.
    for record in reversed(samples[:: len(samples) // MAX_SAMPLES + 1]):
        counted.add(record.t, record.counters)
    trainer = _sums(of_kind(recent, "step"), TRAINER)
    trainer["rest of step"] -= sum(trainer[part] for part in STEP_PARTS)
    trainer["checkpoint"] -= trainer["checkpoint wait"]
    trainer["ranks"] += sum(series(of_kind(recent, "step"), "lease_ranks_s"))
    sent = [one for one in of_kind(recent, "publish") if one.number("convergence_s") > 0]
    versions = _sums(sent, {**VERSION, "commit": "convergence_s"})
    versions["commit"] -= sum(versions[part] for part in VERSION)
    commits = of_kind(recent, "commit")
    engines_s = counted.elapsed_s * len({one.values.get("engine") for one in commits})
    return [
        *_shares("episodes", episode_seconds(counted.growth())),
        *_shares("trainer", trainer),
        *_shares("versions", versions),
        *_shares("engines", _sums(commits, COMMIT), engines_s),
    ]


def episode_seconds(grown: Mapping[str, float]) -> dict[str, float]:
    """Seconds of episodes by stage. `grown`: how much the workers' counters grew."""
    names = {"queue": "queue_s:", "prefill": "first_token_s:", "decode": "decode_s:"}
    sums = {s: sum(grown[name] for name, _ in below(grown, of)) for s, of in names.items()}
    in_engine = sum(grown[name] for name, _ in below(grown, "engine_queue_s:"))
    sums["queue"] += in_engine  # which is a part of the time to the first token
    sums["prefill"] = max(0.0, sums["prefill"] - in_engine)
    further = {stage: grown.get(f"episode_s:{stage}", 0.0) for stage in ("prompt", *AFTER)}
    return {"prompt": further.pop("prompt"), **sums, **further}


def _sums(records: Sequence[Record], fields: Mapping[str, str]) -> dict[str, float]:
    return {name: sum(series(records, field)) for name, field in fields.items()}


def _shares(of: str, seconds: Mapping[str, float], whole_s: float = 0.0) -> list[Stage]:
    whole_s = whole_s or sum(max(0.0, taken) for taken in seconds.values())
    return [
        Stage(of=of, name=name, share=taken / whole_s, waits_for=WAITS_FOR.get(name, ""))
        for name, taken in seconds.items()
        if taken > 0
    ]
