"""Stacks of processes that really hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.environment import PROCESS_VARIABLE, RUN_VARIABLE
from processes import stacks
from processes.stacks import collect, write_stacks

PROGRAM = """
import sys, threading
if sys.argv[1] == "listens":
    from processes.stacks import dump_on_signal
    dump_on_signal()
lock = threading.Lock()
def wait_for_the_other_rank():
    print("hangs", flush=True)
    lock.acquire()
lock.acquire()
wait_for_the_other_rank()
"""

Hang = Iterator[subprocess.Popen[bytes]]


def hang(tmp_path: Path, listens: str) -> Hang:
    marks = {RUN_VARIABLE: str(tmp_path), PROCESS_VARIABLE: "trainer-1"}
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, listens],
            env={**os.environ, **marks},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"hangs\n"
        yield process
        process.kill()


@pytest.fixture
def hung(tmp_path: Path) -> Hang:
    yield from hang(tmp_path, "listens")


@pytest.fixture
def deaf(tmp_path: Path) -> Hang:
    yield from hang(tmp_path, "is deaf")


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_by_py_spy", lambda pid, limit_s: ("", "Permission Denied"))


def test_stack_of_a_stopped_process_names_its_function_and_it_stays_stopped(
    hung: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    hung.send_signal(signal.SIGSTOP)
    os.waitpid(hung.pid, os.WUNTRACED)
    text = collect(str(tmp_path), ["trainer-"], 60.0)
    if "ermission" in text:
        pytest.skip("this machine lets no process read another's memory")
    assert f"---- trainer-1 {hung.pid} (stopped)" in text
    assert "wait_for_the_other_rank" in text
    assert Path(f"/proc/{hung.pid}/stat").read_text().split()[2] == "T"


@pytest.mark.usefixtures("without_py_spy")
def test_process_writes_its_stacks_itself_where_py_spy_may_not_read_them(
    hung: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    text = collect(str(tmp_path), ["trainer-"], 60.0)
    assert "in wait_for_the_other_rank" in text and hung.poll() is None


@pytest.mark.usefixtures("without_py_spy")
def test_process_that_would_be_ended_by_the_signal_gets_none(
    deaf: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert "Permission Denied" in collect(str(tmp_path), ["trainer-"], 60.0)
    assert deaf.poll() is None


def test_processes_of_other_names_and_without_time_left_are_not_read(
    hung: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert "0 processes" in collect(str(tmp_path), ["engine-"], 60.0)
    assert "no time was left for it" in collect(str(tmp_path), ["trainer-"], 0.0)


def test_file_is_named_by_time_and_part(tmp_path: Path) -> None:
    path = write_stacks(tmp_path, "trainer-1", "all")
    assert path.parent == tmp_path / "stacks" and path.read_text() == "all"
    assert path.name.endswith("-trainer-1.txt")
