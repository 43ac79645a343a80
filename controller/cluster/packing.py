"""Predicts where Ray would place the processes of a run on the machines of a cluster (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from controller.start.placement import CPUS_PER_PROCESS
from controller.start.plan import Plan


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """CPUs and GPUs of one machine."""

    cpus: float
    gpus: float


def packed(plan: Plan, rooms: Sequence[Room]) -> list[Counter[str]] | None:
    """Processes by kind on each machine, if nothing else runs there; None if they do not fit.

    As Ray packs a placement group: as much as fits goes to the machine with the largest part of its
    room left, then to the next.
    """
    config, devices = plan.config, plan.devices
    groups = [
        ("rank", config.trainer.ranks, devices.rank_gpus),
        *[("engine", 1, devices.engine_gpus)] * config.rollout.num_engines,
        ("worker", config.rollout.num_workers, 0.0),
    ]
    if config.task.served_teacher is not None:
        groups.append(("teacher", 1, devices.engine_gpus))
    left, placed = [[room.cpus, room.gpus] for room in rooms], [Counter[str]() for _ in rooms]
    for kind, count, gpus in sorted(groups, key=lambda group: -group[2]):
        while count:
            fits = [number for number, (cpu, gpu) in enumerate(left) if cpu >= 1 and gpu >= gpus]
            if not fits:
                return None
            best = max(fits, key=lambda number: _part_left(left[number], gpus))
            while count and left[best][0] >= CPUS_PER_PROCESS and left[best][1] >= gpus:
                left[best][0] -= CPUS_PER_PROCESS
                left[best][1] -= gpus
                placed[best][kind] += 1
                count -= 1
    return placed


def _part_left(room: Sequence[float], gpus: float) -> float:
    """Mean over the resources that are asked for."""
    cpu, gpu = room
    parts = [(cpu - CPUS_PER_PROCESS) / cpu]
    if gpus:
        parts.append((gpu - gpus) / gpu)
    return sum(parts) / len(parts)
