"""Made-up records and buffer numbers of a run that learns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from buffer.results import BufferStats
from buffer.types import PromptRef, TrajectoryGroup
from configs.schema import Config, ModelConfig, TrainerConfig
from controller.metrics.history import MetricsLog, Record, Waits, buffer_values
from controller.run_dir import RunDir
from rollout_pool.episodes.conversation import Message
from rollout_pool.worker.record import RolloutLog
from tests.support.buffer.groups import make_group
from trainer_pool.state.checkpoint import CheckpointStore, TrainState


def settings_of_run(num_steps: int) -> Config:
    return Config(model=ModelConfig(path="m"), trainer=TrainerConfig(num_steps=num_steps))


STATS = BufferStats(
    pushed=2260,
    acked=1600,
    consumed=592,
    dropped={"stale": 20},
    quarantined=0,
    ready=32,
    leased=16,
    running=0,
    abandoned=3,
    abandoned_by_reason={"stale": 3},
    requeued=20,
    retries_waiting=0,
    expired=0,
    by_staleness={0: 9, 1: 15, 2: 8},
    trainer_version=137,
    engine_versions={"engine-0": 136, "engine-1": 137},
    engines_gone=False,
    max_staleness=2,
    max_staleness_trained=2,
    groups_per_step=16,
    bytes=120_000,
    tokens=9_000,
    tokens_pushed=80_000,
    tokens_trained=70_000,
    tokens_masked=0,
    dropped_tokens={"stale": 700},
    bytes_consumed=100_000,
    bytes_quarantined=0,
    capacity_groups=None,
    capacity_bytes=None,
    num_shards=1,
    oldest_ready_age_s=12.0,
    push_blocked=0,
    push_blocked_s=0.0,
    lineage="a1b2",
    trained_by_staleness={0: 400, 1: 900, 2: 892},
    trained_by_age={1.0: 100, 5.0: 1500, inf: 2192},
    trained_age_sum_s=8000.0,
    counters={},
)


def step_record(step: int, t: float, reward: float = 0.5, **changes: float) -> Record:
    """The step that trained version `step`; records count steps from 1."""
    return Record(
        t=t,
        kind="step",
        values={
            "step": step + 1,
            "version": step,
            "num_updates": 1,
            "num_skipped_updates": 0,
            "num_empty_updates": 0,
            "reward_mean": reward,
            "zero_variance_fraction": 0.25,
            "loss": -0.01,
            "grad_norm": 0.4,
            "entropy": 1.5,
            "ratio_mean_abs_dev": 0.02,
            "clip_fraction": 0.01,
            "tis_clipped_fraction": 0.002,
            "truncated_fraction": 0.0,
            "staleness_mean": 1.25,
            "staleness_max": 2,
            "staleness_counts": json.dumps({"0": 2, "1": 8, "2": 6}),
            "ratio_max_abs_dev": 0.25 if step else 0.5,
            "logprob_diff_mean": 2e-6,
            "logprob_diff_max": 1e-5 * (step + 1),
            "response_length_mean": 3.0,
            "lease_wait_s": 0.25,
            "step_s": 0.5,
            "snapshot_s": 0.05,
            "snapshot_wait_s": 0.0,
            "checkpoint_s": 0.0,
            **changes,
        },
    )


def publish_record(version: int, at: float, mode: str = "full") -> Record:
    """A version of 2.5 MB that was copied at `at` and served by both engines 0.9 s later."""
    values: dict[str, float | int | str] = {
        "version": version,
        "mode": mode,
        "epoch": 1,
        "snapshot_at": at,
        "snapshot_s": 0.05,
        "wire_at": at + 0.1,
        "wire_s": 0.4,
        "verify_at": at + 0.5,
        "verify_s": 0.05,
        "converged_at": at + 0.9,
        "convergence_s": 0.9,
        "bytes": 2_500_000,
        "wire_bytes": 250_000 if mode == "delta" else 2_500_000,
        "density": 0.05 if mode == "delta" else 1.0,
    }
    if mode == "delta":
        values |= {"encode_at": at + 0.06, "encode_s": 0.04}
    return Record(t=at + 0.9, kind="publish", values=values)


def skipped_record(version: int, at: float) -> Record:
    values = {"version": version, "mode": "skipped", "snapshot_at": at, "snapshot_s": 0.15}
    return Record(t=at, kind="publish", values=values)


def commit_record(engine: str, version: int, paused_at: float, pause_s: float = 0.1) -> Record:
    return Record(
        t=paused_at + pause_s,
        kind="commit",
        values={
            "engine": engine,
            "version": version,
            "seen_at": paused_at - 0.05,
            "merge_s": 0.02,
            "gate_wait_s": 0.04,
            "paused_at": paused_at,
            "resumed_at": paused_at + pause_s,
            "pause_s": pause_s,
            "load_s": 0.8 * pause_s,
        },
    )


def event_record(event: str, who: str, t: float = 0.0) -> Record:
    values = {"event": event, "who": who, "detail": "it was killed"}
    return Record(t=t, kind="weights_event", values=values)


def weights_records(version: int, at: float, mode: str = "full") -> list[Record]:
    """A publish and the commits of two engines, one after the other."""
    commits = [
        commit_record(f"engine-{number}", version, at + 0.6 + 0.15 * number) for number in range(2)
    ]
    return [*commits, publish_record(version, at, mode)]


def eval_record(version: int, t: float, accuracy: float) -> Record:
    values = {"version_min": version, "version_max": version, "accuracy": accuracy}
    return Record(t=t, kind="eval", values={**values, "num_prompts": 64, "seconds": 0.8})


def buffer_record(
    t: float,
    stats: BufferStats = STATS,
    *,
    waits: Waits | None = None,
    tokens_generated: float = 0.0,
) -> Record:
    counters = {"tokens_generated": tokens_generated}
    return Record(t=t, kind="buffer", values=buffer_values(stats, waits or {}, counters))


def record_all(run_dir: RunDir, records: Sequence[Record]) -> None:
    with MetricsLog(run_dir.metrics) as log:
        for record in records:
            log.append(record.kind, record.values, t=record.t)


def run_records(num_steps: int = 20) -> list[Record]:
    """Returns records of a run that learns, with two evaluations and a receiver left out."""
    records = [eval_record(0, 999.0, 0.31)]
    for step in range(num_steps):
        t = 1000.0 + step
        waits, stats = {("trainer", "rollout"): step * 0.25}, replace(STATS, running=step % 5)
        records.append(step_record(step, t, reward=step / 20))
        records.append(buffer_record(t, stats, waits=waits, tokens_generated=step * 100))
        records += weights_records(step + 1, t, mode="delta" if step % 2 else "full")
    records.append(eval_record(num_steps, 1020.0, 0.92))
    records.append(commit_record("engine-1", num_steps, 1021.0, pause_s=0.7))
    records.append(event_record("excluded", "receiver-0"))
    return records


def write_checkpoint(run_dir: RunDir, step: int, version: int) -> None:
    """A checkpoint without weights, the newest of the run."""
    store = CheckpointStore(run_dir.path / "checkpoints")
    store.begin(step)
    store.commit(
        TrainState(
            step=step,
            version=version,
            num_updates=3,
            lineage="one",
            consumed_group_ids=(),
            task_positions={0: 30},
            untrained_prompts=(PromptRef(task="reverse", index=28),),
        )
    )


def recorded_group(
    group_id: str, *, task: str = "sums", rewards: Sequence[float] = (0.0, 1.0), length: int = 5
) -> TrajectoryGroup:
    """A group with these rewards, whose trajectories have `length` trained tokens."""
    group = make_group(group_id, 3, newest=4, num_tokens=3 + length, size=len(rewards))
    pairs = zip(group.trajectories, rewards, strict=True)
    trajectories = tuple(replace(one, reward=reward) for one, reward in pairs)
    prompt = PromptRef(task=task, index=0)
    return replace(group, prompt=prompt, trajectories=trajectories)


def record_groups(
    run_dir: RunDir, groups: Sequence[TrajectoryGroup], said: str = "", **limits: int
) -> None:
    """Records the groups as a worker does, with a conversation whose answer is `said`."""
    log = RolloutLog(run_dir.path, "worker-0", 1.0, 0, **limits)

    async def write() -> None:
        for group in groups:
            answers = (Message(role="assistant", content=said),)
            await log.write(group, "a prompt", {0: answers, 1: answers})

    asyncio.run(write())
