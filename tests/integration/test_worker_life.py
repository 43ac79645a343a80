"""A rollout worker is killed in the middle of a run, which goes on with what it had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from controller.metrics.records import read_metrics

pytestmark = pytest.mark.slow

RUN = f"run-{uuid4().hex[:8]}"
SETTINGS = (
    "trainer.num_steps=8",
    "trainer.groups_per_step=4",
    "trainer.warm_start.num_steps=20",
    "trainer.checkpoint_every=4",
    "rollout.group_size=4",
    "rollout.eval_every=0",
    "task.eval_size=16",
    "run.panel=false",
    f"run.name={RUN}",
)


def worker_pid(runs: Path) -> int | None:
    """Of the Ray worker process that holds rollout worker 0; none between two lives."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            is_ours = environment.get("LEASH_RUN", "").startswith(str(runs))
            if is_ours and "WorkerActor" in " ".join(process.cmdline()):
                return process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


def wait_for(condition, timeout_s: float, process: subprocess.Popen[str]):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return found


@pytest.mark.timeout(400)
def test_a_killed_worker_comes_back_and_no_prompt_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "controller.main", "launch", *SETTINGS, f"run.dir={tmp_path}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / RUN / "metrics.jsonl"

    def has_trained() -> bool:
        return metrics.exists() and any(r.kind == "step" for r in read_metrics(metrics))

    try:
        wait_for(has_trained, 240, process)
        killed = wait_for(lambda: worker_pid(tmp_path), 10, process)
        os.kill(killed, signal.SIGKILL)
        output, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    last = output.strip().splitlines()[-1]
    assert process.returncode == 0 and last.startswith("RESULT "), output[-4000:]
    result = json.loads(last.removeprefix("RESULT "))
    assert result["steps"] == 8 and result["is_conserved"]
    assert result["groups_trained"] == 8 * 4
    assert result["rollout"]["workers_restarted"] == 1
    assert result["prompts_quarantined"] == 0
