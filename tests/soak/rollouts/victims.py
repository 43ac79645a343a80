"""Which processes of a run are killed, and when they count as being back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from configs.environment import PROCESS_VARIABLE, RUN_VARIABLE
from processes import tree

KILL_S = 10.0


class Kind(StrEnum):
    engine = "engine's server"
    engine_actor = "engine's actor"
    worker = "worker"
    scoring = "scoring process"
    scorer = "scorer actor"
    receiver = "receiver of weights"
    trainer = "trainer rank"


OF_THE_ROLLOUT_POOL = tuple(kind for kind in Kind if kind is not Kind.trainer)

_WORDS = {
    Kind.engine: "rollout_pool.engines.sglang.server",
    Kind.engine_actor: "ray::EngineActor",
    Kind.worker: "ray::WorkerActor",
    Kind.scoring: "rollout_pool.rewards.process",
    Kind.scorer: "ray::ScorerActor",
    Kind.receiver: "weight_sync.receiver.app",
    Kind.trainer: "ray::TrainerActor",
}
"""Part of the command line of such a process, and of no other of the run."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Member:
    kind: Kind
    name: str
    """Name of the actor that it is, or that started it."""
    pid: int

    def kill(self) -> None:
        """By SIGKILL: an engine's server with its scheduler and all else that it started.

        What tracks Python's semaphores is spared: it removes them when the others are gone.
        """
        if self.kind is Kind.engine:
            tree.kill(tree.family(self.pid), KILL_S)
        else:
            os.kill(self.pid, signal.SIGKILL)


def members(run: Path) -> dict[Kind, list[Member]]:
    """All live processes that may be killed."""
    found: dict[Kind, list[Member]] = {kind: [] for kind in Kind}
    for member in _members(run):
        found[member.kind].append(member)
    return found


def _members(run: Path) -> Iterator[Member]:
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            kind = next((kind for kind, word in _WORDS.items() if word in line), None)
            if kind is None or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if environment.get(RUN_VARIABLE) == str(run) and PROCESS_VARIABLE in environment:
            yield Member(kind=kind, name=environment[PROCESS_VARIABLE], pid=process.pid)
