"""The processes of a run are found and ended, and no others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil
import pytest

from configs.environment import RUN_VARIABLE
from processes import runs
from processes.child import exit_of
from processes.runs import _environment, end_processes, run_processes

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


def test_end_processes_ends_those_of_the_run_and_no_other(tmp_path: Path) -> None:
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


def test_process_that_has_just_been_executed_is_found(tmp_path: Path) -> None:
    environment = {**os.environ, RUN_VARIABLE: str(tmp_path)}
    for _ in range(1000):  # without a second look one in some hundred is missed
        with subprocess.Popen(["/bin/sleep", "60"], env=environment) as process:
            found = _environment(psutil.Process(process.pid))
            process.kill()
        assert found.get(RUN_VARIABLE) == str(tmp_path)


class Executed:
    """A process whose program is executed at the 50th look at its environment."""

    pid = 1

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.num_looks = 0

    def environ(self) -> dict[str, str]:
        self.num_looks += 1
        return self.environment if self.num_looks >= 50 else {}

    def exe(self) -> str:
        return "/bin/sleep"

    def end_of_environment(self, pid: int) -> int:
        return 0x7FFD0000 if self.num_looks >= 50 else 0


def test_program_is_waited_for_while_it_is_being_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ({RUN_VARIABLE: "x"}, {}):
        process = Executed(environment)
        monkeypatch.setattr(runs, "_end_of_environment", process.end_of_environment)
        assert _environment(cast(psutil.Process, process)) == environment
        # One that has none is not waited for.
        assert process.num_looks == (50 if environment else 51)


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


async def test_end_of_a_process_is_told_by_the_kernel() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        waiting = asyncio.create_task(exit_of(process.pid))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        process.kill()
        await asyncio.wait_for(waiting, 60)
