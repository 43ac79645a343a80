"""Shares of the stages of a run, from records whose shares are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.metrics.history import Record
from controller.watch.stages import Stage, stages
from tests.support.controller.records import buffer_record, step_record, weights_records

COUNTED = {
    "queue_s:engine-0": 1.0,
    "queue_s:engine-1": 2.0,
    "engine_queue_s:engine-0": 1.0,
    "first_token_s:engine-0": 3.0,
    "decode_s:engine-0": 4.0,
    "decode_s:engine-1": 4.0,
    "episode_s:environment": 4.0,
    "episode_s:siblings": 2.0,
    "tokens_generated": 900.0,
}


def counts_at(t: float, seconds: float) -> Record:
    sample = buffer_record(t)
    counts = {f"count.{name}": seconds * number for name, number in COUNTED.items()}
    return replace(sample, values={**sample.values, **counts})


def shares_of(found: list[Stage], of: str) -> dict[str, float]:
    return {one.name: round(one.share, 4) for one in found if one.of == of}


def test_shares_are_of_the_time_of_episodes_trainer_versions_and_engines() -> None:
    parts = {"step_passes_s": 0.25, "step_update_s": 0.125, "checkpoint_wait_s": 0.05}
    steps = [step_record(n, 10.0 * n, checkpoint_s=0.2, **parts) for n in range(1, 3)]
    first, second = weights_records(1, 4.0), weights_records(2, 14.0)
    records = [counts_at(0.0, 0.0), *first, steps[0], *second, steps[1], counts_at(20.0, 1.0)]
    found = stages(records)
    assert shares_of(found, "episodes") == {
        "queue": 0.2,
        "prefill": 0.1,
        "decode": 0.4,
        "environment": 0.2,
        "siblings": 0.1,
    }
    assert shares_of(found, "trainer") == {
        "lease": 0.25,
        "passes": 0.25,
        "update": 0.125,
        "rest of step": 0.125,
        "snapshot": 0.05,
        "checkpoint": 0.15,
        "checkpoint wait": 0.05,
    }
    # Each version took 0.9 s.
    assert shares_of(found, "versions") == {
        "snapshot": 0.0556,
        "wire": 0.4444,
        "verify": 0.0556,
        "commit": 0.4444,
    }
    # Each engine committed twice in 20 s.
    assert shares_of(found, "engines") == {"gate": 0.004, "pause": 0.01}
    waited = {(one.of, one.name): one.waits_for for one in found if one.waits_for}
    assert waited["trainer", "lease"] == "rollouts" and ("trainer", "passes") not in waited


def test_wait_for_ranks_that_lease_later_is_none_for_rollouts() -> None:
    steps = [step_record(n, 10.0 * n, lease_wait_s=0.05, lease_ranks_s=0.2) for n in range(1, 3)]
    found = {(one.name, one.waits_for): one.share for one in stages(steps) if one.of == "trainer"}
    assert found["ranks", "other ranks"] == pytest.approx(4 * found["lease", "rollouts"])


def test_shares_are_of_the_last_time_alone_and_none_without_records() -> None:
    old = [counts_at(0.0, 0.0), step_record(1, 1.0, lease_wait_s=50.0), counts_at(2.0, 100.0)]
    new = [counts_at(700.0, 100.0), step_record(2, 701.0), counts_at(702.0, 100.0)]
    assert shares_of(stages([*old, *new]), "trainer")["lease"] == pytest.approx(0.3125)
    assert shares_of(stages([*old, *new]), "episodes") == {}
    assert shares_of(stages([*old, *new], 1000.0), "trainer")["lease"] > 0.9
    assert stages([]) == []
