"""Names of the actors, by which restarted ones and a new controller find each other in Ray."""

from __future__ import annotations

from rollout_pool.types import RolloutSpec

TEACHER = "teacher"
TEACHER_KEY = "LEASH_TEACHER_KEY"
"""Variable with the key of a served teacher, for the actors that score."""


def engine_name(index: int) -> str:
    return f"engine-{index}"


def worker_names(spec: RolloutSpec) -> list[str]:
    return [f"worker-{index}" for index in range(spec.config.num_workers)]


def scorer_names(spec: RolloutSpec) -> list[str]:
    return [f"scorer-{index}" for index in range(spec.config.reward_actors)]
