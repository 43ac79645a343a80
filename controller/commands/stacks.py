"""`make stacks`: the stacks of all processes of a run on this machine, from any shell."""

from __future__ import annotations

import psutil

from controller.run_dir import RunDir
from processes.stacks import DUMP_S, collect, stacks_of, write_stacks

LIMIT_S = 120.0


def print_stacks(run_dir: RunDir) -> None:
    """Write them into the run's folder and print where. Raises ValueError if the run is over."""
    record = run_dir.read_record()
    text = collect(run_dir.run_id, [""], LIMIT_S)
    if record.is_here and record.is_alive:
        text += "\n" + stacks_of("controller", psutil.Process(record.pid), DUMP_S) + "\n"
    if "----" not in text:
        raise ValueError(f"RUN={run_dir.name!r}: none of its processes is on this machine")
    print(write_stacks(run_dir.path, "by-hand", text))
