"""The process that owns the Ray of a run on this machine, as controllers see it.

controller ── starts ──► keeper ── starts ──► Ray ──► engines, workers, ranks, ...
    │                      │
    └── is killed          └── waits for another controller, at most run.attach_timeout_s;
                               then ends the run: controller/keeper.py
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from configs.run_files import read_json
from controller.run_dir import RunDir
from processes.child import Adopted, Child

RECORD = "keeper.json"
"""In the run's private folder: the keeper's process and the address of its Ray."""
STOP_S = 5.0


class KeeperError(RuntimeError):
    """Ray did not start; the message is Ray's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Record:
    pid: int
    started: float
    address: str


@dataclass(slots=True, frozen=True)
class RayKeeper:
    """The keeper of a run as its controller sees it.

    keeper = await RayKeeper.start(run_dir.path, log, {"num_cpus": 8})
    ray.init(address=keeper.address)
    keeper.process.stop(timeout_s=20)     # Ray ends with it
    """

    process: Child | Adopted
    address: str

    @classmethod
    async def start(cls, run_dir: Path, log: Path, options: dict[str, Any]) -> RayKeeper:
        """Start Ray with these options of ray.init. Raises KeeperError."""
        command = [sys.executable, "-m", "controller.keeper", str(run_dir), json.dumps(options)]
        child = Child(command, log, speaks=True, outlives=True)
        line = await child.first_line()
        answer = json.loads(line) if line else {"error": f"it ended early; {log} may say why."}
        if "error" in answer:
            child.stop(STOP_S)
            raise KeeperError(answer["error"])
        return cls(child, answer["address"])

    @classmethod
    def find(cls, run_dir: RunDir) -> RayKeeper | None:
        """The one that outlived its controller, if it lives."""
        if run_dir.temporary is None:
            return None
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            record = read_json(run_dir.temporary / RECORD, _Record)
            keeper = cls(Adopted(record.pid, record.started), record.address)
            if keeper.process.wait(0) is None:
                return keeper
        return None
