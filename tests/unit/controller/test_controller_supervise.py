from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
from ray.exceptions import ActorDiedError, RayActorError

from configs.environment import RUN_VARIABLE
from controller.watch.supervise import (
    death,
    end_processes,
    exit_of,
    failure,
    last_lines,
    run_processes,
)

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


IDLE = "import time; time.sleep(600)"


def start(code: str, run_id: str) -> subprocess.Popen[str]:
    environment = {**os.environ, RUN_VARIABLE: run_id}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_every_process_of_the_run_ends_and_no_other(tmp_path: Path) -> None:
    mine, other = str(tmp_path / "mine"), str(tmp_path / "other")
    with start(STUBBORN, mine) as stubborn, start(IDLE, other) as bystander:
        try:
            assert stubborn.stdout is not None
            child = int(stubborn.stdout.readline())
            assert {p.pid for p in run_processes(mine)} == {stubborn.pid, child}
            killed = end_processes(mine, timeout_s=2.0)
            assert len(killed) == 2, "a child inherits that SIGTERM is ignored"
            assert run_processes(mine) == []
            assert psutil.Process(bystander.pid).is_running()
        finally:
            stubborn.kill()
            bystander.kill()


def test_shared_memory_of_killed_processes_is_removed(tmp_path: Path) -> None:
    file = Path("/dev/shm") / f"leash-test-{os.getpid()}"
    file.write_bytes(bytes(4096))
    code = f"""
import mmap, time
with open({str(file)!r}, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print(1, flush=True)
time.sleep(600)
"""
    with start(code, str(tmp_path)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            end_processes(str(tmp_path), timeout_s=2.0)
        finally:
            process.kill()
    assert not file.exists()


async def test_the_end_of_a_process_is_told_by_the_kernel() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        waiting = asyncio.create_task(exit_of(process.pid))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        process.kill()
        await asyncio.wait_for(waiting, 5)


def test_the_last_lines_of_a_log_hold_no_escape(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_bytes(b"loaded\nprompt: \x1b]52;c;ZXZpbA==\x07 \xe2\x80\xaeevil\x9b2J\n")
    said = str(failure("engine-0", "died", log))
    assert "\x1b" not in said and "\x07" not in said and "\u202e" not in said
    assert "␛]52;c;" in said


def test_a_failure_ends_with_the_last_lines_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    message = str(failure("engine-0", "died (exit code -9)", log))
    assert message.startswith("engine-0 died (exit code -9)") and message.endswith("line 99")
    assert "line 84" not in message and "line 85" in message


def test_a_missing_or_empty_log_is_said_to_be_so(tmp_path: Path) -> None:
    assert "No such file" in last_lines(tmp_path / "none.log")
    (tmp_path / "empty.log").touch()
    assert "is empty" in last_lines(tmp_path / "empty.log")


LOST_NODE = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tactor_id: 8ebf6bba976b384aad971eb501000000
\tpid: 4711
\tip: 10.0.0.2
The actor died because its node has died. Node Id: 2f6d0c
\tthe actor's node was terminated unexpectedly: health check failed for too long
"""


def test_death_with_a_lost_node_names_the_node_instead_of_a_healthy_log(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("all is well")
    message = str(death("engine-0", ActorDiedError(), log))
    assert message.startswith("engine-0 died") and message.endswith("all is well")
    message = str(death("engine-0", RayActorError(None, LOST_NODE), log))
    assert message.startswith("engine-0 is lost with its node 10.0.0.2 (health check failed")
    assert "all is well" not in message and str(log) in message
