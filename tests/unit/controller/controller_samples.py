"""Made-up records and buffer numbers of a run that learns."""

from __future__ import annotations

import json
from dataclasses import replace

from buffer.stats import BufferStats
from controller.metrics import Record

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
    retries_exhausted=0,
    expired=0,
    by_staleness={0: 9, 1: 15, 2: 8},
    trainer_version=137,
    engine_versions={"engine-0": 136, "engine-1": 137},
    max_staleness=2,
    max_staleness_trained=2,
    groups_per_step=16,
    bytes=120_000,
    tokens=9_000,
    tokens_pushed=80_000,
    tokens_trained=70_000,
)


def stats_at(version: int) -> BufferStats:
    return replace(STATS, trainer_version=version)


def step_record(step: int, t: float, reward: float = 0.5) -> Record:
    """The step that trained version `step`; records count steps from 1."""
    return Record(
        t=t,
        kind="step",
        values={
            "step": step + 1,
            "version": step,
            "reward_mean": reward,
            "loss": -0.01,
            "grad_norm": 0.4,
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
            "wire_s": 0.1,
            "pause_s_max": 0.02 + 0.01 * step,
            "checkpoint_s": 0.0,
            "publish_bytes": 2_500_000,
        },
    )


def eval_record(version: int, t: float, accuracy: float) -> Record:
    values = {"version_min": version, "version_max": version, "accuracy": accuracy}
    return Record(t=t, kind="eval", values={**values, "num_prompts": 64, "seconds": 0.8})
