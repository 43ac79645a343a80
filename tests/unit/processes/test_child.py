"""Child processes: how they are bound to their parent, watched and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processes.child import Adopted, Child, has_ended, started_at
from processes.die_with_parent import bound

PROGRAM = """
import os, sys
key = sys.stdin.readline().strip()
print(f"key {key}", flush=True)
print("in the log", file=sys.stderr, flush=True)
for line in sys.stdin:
    print(line.strip(), file=sys.stderr, flush=True)
os._exit(7)
"""
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "child.log"


def start(program: str, log: Path, **options: object) -> Child:
    return Child([sys.executable, "-c", program], log, secret="a-key", speaks=True, **options)  # type: ignore[arg-type]


async def test_child_reads_its_secret_and_ends_with_its_input(log: Path) -> None:
    child = start(PROGRAM, log)
    assert await child.first_line() == b"key a-key\n"
    assert b"a-key" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert child.wait(0.05) is None
    assert child.stop(60.0, b"last words\n") == 7 == child.stop(60.0)
    assert await child.exit() == 7
    assert log.read_text() == "in the log\nlast words\n"


def test_bound_program_inherits_only_what_it_is_given() -> None:
    ends = os.pipe()
    for end in ends:
        os.set_inheritable(end, True)
    listing = (
        "import os; print([n for n in range(3, 1024) if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    try:
        for kept in ([], [ends[1]]):
            command = bound([sys.executable, "-c", listing], kept)
            # As uvloop starts processes.
            shown = subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, check=True)
            assert shown.stdout.decode() == f"{kept}\n"
    finally:
        for end in ends:
            os.close(end)


def test_process_dies_with_the_writer_of_its_pipe_also_while_it_holds_the_lock() -> None:
    its_end, our_end = os.pipe()
    program = (
        "import re; from processes.die_with_parent import die_with_writer; "
        f"die_with_writer({its_end}); print(flush=True); re.match('(a+)+$', 'a' * 64 + 'b')"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[its_end]) as process:
        os.close(its_end)
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert process.poll() is None
        os.close(our_end)
        assert process.wait(60) == -signal.SIGKILL


async def test_exit_of_a_killed_child_reaches_every_waiter_but_one_that_was_cancelled(
    log: Path,
) -> None:
    child = start(PROGRAM, log)
    waiters = [asyncio.create_task(child.exit()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    psutil.Process(child.pid).kill()
    assert await asyncio.gather(*waiters[1:]) == [-signal.SIGKILL] * 2
    assert waiters[0].cancelled()
    child.stop(0.0)


async def test_first_line_of_a_child_that_dies_at_its_start_is_empty(log: Path) -> None:
    child = start("raise SystemExit(3)", log)
    assert (await child.first_line(), await child.exit()) == (b"", 3)
    assert child.stop(0.0) == 3


async def test_stop_kills_the_group_of_a_child_that_does_not_end(log: Path) -> None:
    child = start(STUBBORN, log)
    grandchild = psutil.Process(int(await child.first_line()))
    assert child.stop(0.1) == -signal.SIGKILL
    assert await asyncio.to_thread(has_ended, grandchild.pid, 60.0)


async def test_stop_can_spare_what_the_child_started(log: Path) -> None:
    child = start(STUBBORN, log)
    grandchild = psutil.Process(int(await child.first_line()))
    assert child.stop(0.1, whole_group=False) == -signal.SIGKILL
    assert grandchild.is_running()
    grandchild.kill()


async def test_what_a_child_started_ends_with_it_however_it_ends(log: Path) -> None:
    crashes = STUBBORN.rpartition("time.sleep(600)")[0] + "raise SystemExit(3)"
    child = Child([sys.executable, "-c", crashes], log, speaks=True)
    grandchild = int(await child.first_line())
    assert await child.exit() == 3
    assert await asyncio.to_thread(has_ended, grandchild, 60.0)


def test_program_that_cannot_be_run_is_an_os_error(tmp_path: Path, log: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Child([str(tmp_path / "none")], log, secret="a-key")


PARENT = """
import sys, time
from pathlib import Path
from processes.child import Child
program, secret = "import time; time.sleep(600)", None
if sys.argv[2] == "pipe":
    program, secret = "import sys; sys.stdin.read()", "a-key"
outlives = sys.argv[2] == "outlives"
child = Child([sys.executable, "-c", program], Path(sys.argv[1]), secret=secret, outlives=outlives)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["signal", "pipe"])
def parent(request: pytest.FixtureRequest, log: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT, str(log), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_child_ends_when_its_parent_is_killed(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert has_ended(child, 60.0)


@pytest.mark.parametrize("parent", ["outlives"], indirect=True)
def test_child_that_outlives_its_parent_can_be_adopted_and_stopped(
    parent: subprocess.Popen[str],
) -> None:
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    started = started_at(pid)
    parent.kill()
    parent.wait()
    with pytest.raises(psutil.NoSuchProcess):
        Adopted(pid, started - 1.0)  # an earlier process of this number
    adopted = Adopted(pid, started)
    assert adopted.wait(0.2) is None
    assert adopted.stop(60.0) == 0 == adopted.wait() == adopted.stop(0.0)
