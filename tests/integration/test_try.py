"""`leash try` with the model that it serves itself, as a user starts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.environment import RUN_VARIABLE
from configs.schema import ScratchModelConfig
from tests.support.launches import (
    RUN,
    Machine,
    end_all,
    finish,
    processes_of,
    try_task,
    wait_for_line,
)
from trainer_pool.model.scratch import build_scratch_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

STARTING = "starting an SGLang server"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Before the test; all that it starts is known by an environment variable, as a run's is."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / RUN))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    yield Machine.look()
    end_all(tmp_path)


def server_of(tmp_path: Path) -> tuple[psutil.Process, Path]:
    """The server that was started for this test, and its folder."""
    pids = [int(line.split()[0]) for line in processes_of(tmp_path)]
    found = [p for p in psutil.process_iter(["cmdline"]) if p.pid in pids]  # less those that ended
    program = " -m rollout_pool.engines.sglang.server "
    [server] = [p for p in found if program in " ".join(p.info["cmdline"] or [])]
    [log] = {file.path for file in server.open_files() if file.path.endswith("engine.log")}
    return server, Path(log).parent


def test_task_is_tried_with_the_untrained_model(tmp_path: Path, machine: Machine) -> None:
    process = try_task("task=capitals", "--episodes=2", 'task.stop=["."]')
    before = wait_for_line(process, "an untrained model of 428k parameters: its answers are random")
    assert STARTING in before
    _, folder = server_of(tmp_path)
    output = finish(process)
    assert process.returncode == 0, output
    assert output.count("  user: The capital of ") == output.count("  -> reward 0 (task 0)") == 2
    assert "mean reward of 2 episodes: 0\n" in output
    assert not folder.exists()
    machine.assert_nothing_left(tmp_path)


def test_signal_in_the_middle_of_the_start_ends_the_server(
    tmp_path: Path, machine: Machine
) -> None:
    process = try_task("task=capitals")
    wait_for_line(process, STARTING)
    process.send_signal(signal.SIGTERM)
    output = finish(process, timeout_s=60)
    assert process.returncode == 130 and output.endswith("leash: stopped\n"), output
    machine.assert_nothing_left(tmp_path)


def test_death_of_the_server_is_reported_with_the_end_of_its_log(
    tmp_path: Path, machine: Machine
) -> None:
    build_scratch_model(ScratchModelConfig(), tmp_path / "model", seed=1)
    process = try_task("task=capitals", f"--model={tmp_path}/model", "--episodes=100000")
    before = wait_for_line(process, "episode 2 of")
    assert "untrained" not in before, "it may be trained"
    server, folder = server_of(tmp_path)
    with (folder / "engine.log").open("a") as log:
        log.write("it was like this\n")
    os.kill(server.pid, signal.SIGKILL)
    output = finish(process, timeout_s=60)
    assert process.returncode == 1, output
    assert "the last: engine did not answer /generate" in output and "it was like this" in output
    machine.assert_nothing_left(tmp_path)
