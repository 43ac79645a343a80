"""`make stacks` on a run that goes on, and on one of which nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from configs.environment import PROCESS_VARIABLE, RUN_VARIABLE
from controller.run_dir import RunDir


def test_stacks_of_each_process_and_the_controller_are_written(
    run_dir: RunDir, leash: Callable[..., str]
) -> None:
    marks = {RUN_VARIABLE: run_dir.run_id, PROCESS_VARIABLE: "worker-0"}
    command = [sys.executable, "-c", "input(print('up', flush=True))"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **marks}
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        path = Path(leash("stacks").strip())
        process.kill()
    assert path.parent == run_dir.path / "stacks" and path.name.endswith("-by-hand.txt")
    text = path.read_text()
    assert f"---- worker-0 {process.pid} (" in text and "---- controller (" in text


def test_run_without_processes_is_refused(run_dir: RunDir, leash: Callable[..., str]) -> None:
    run_dir.end("finished")
    run_dir.write_record(replace(run_dir.read_record(), process_started=0.0))  # it is gone
    assert "none of its processes is on this machine" in leash("stacks", exit_code=2)
