"""The guard of a launch: real processes and real signals to a process group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.environment import LAUNCHER_VARIABLE
from controller.signals import Stopped, StopRequest
from processes.child import has_ended

GUARDED = """
import signal, subprocess, sys, time
from controller.forked import launcher_descriptor
from controller.signals import run_guarded

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

def run(stop, announce_folder):
    announce_folder("folder")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    while not stop.is_set:
        time.sleep(0.01)
    print("asked; the child", "lives" if child.poll() is None else "is gone", flush=True)
    child.kill()
    return 7

def finish(folder, was_asked, exit_code):
    print(folder, was_asked, exit_code, flush=True)
    return 3

sys.exit(run_guarded(run, finish, launcher_descriptor()))
"""


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """Listens to the signals of this process, which gets its own handlers back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    stop = StopRequest()
    stop.listen()
    yield stop
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Guarded:
    """A guard with a controller that waits for a signal, and a child of that controller."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.child = psutil.Process(int(process.stdout.readline()))
        (self.controller,) = psutil.Process(process.pid).children()

    def output(self) -> str:
        text, _ = self.process.communicate(timeout=60)
        return text


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """Has the guard forked, as far as that one knows."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def guarded(launcher: subprocess.Popen[bytes]) -> Iterator[Guarded]:
    command = [sys.executable, "-c", GUARDED]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, LAUNCHER_VARIABLE: str(launcher.pid)},
    ) as process:
        guarded = Guarded(process)
        yield guarded
        for left in (process, guarded.controller, guarded.child):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


AGAIN = """
import os, signal, sys
from controller.signals import run_guarded

def run(stop, announce_folder):
    announce_folder("folder")
    os.kill(os.getpid(), signal.SIGKILL)

def goes_on(stop, announce_folder):
    announce_folder("the same")
    print("goes on", stop.is_set, flush=True)
    return 0

def finish(folder, was_asked, exit_code):
    print(folder, was_asked, exit_code, flush=True)
    return goes_on if exit_code < 0 else 5

sys.exit(run_guarded(run, finish))
"""


def test_controller_that_was_killed_is_followed_by_what_finish_returns() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "folder False -9\ngoes on False\nthe same False 0\n"
    assert ended.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_group_is_one_request_and_reaches_no_child(
    guarded: Guarded, number: signal.Signals
) -> None:
    os.killpg(guarded.process.pid, number)
    assert guarded.output() == "asked; the child lives\nfolder True 7\n"
    assert guarded.process.returncode == 3


def test_controller_ends_in_order_when_its_guard_is_killed(guarded: Guarded) -> None:
    guarded.process.kill()
    assert guarded.output() == "asked; the child lives\n"
    assert has_ended(guarded.controller.pid, 60.0)


def test_end_of_the_process_that_had_it_forked_is_one_request(
    guarded: Guarded, launcher: subprocess.Popen[bytes]
) -> None:
    launcher.kill()
    assert guarded.output() == "asked; the child lives\nfolder True 7\n"
    assert guarded.process.returncode == 3


def test_controller_that_is_killed_leaves_its_folder_to_the_guard(guarded: Guarded) -> None:
    guarded.controller.kill()
    guarded.child.kill()  # it holds the pipe that the test reads
    assert guarded.output() == "folder False -9\n"
    assert guarded.process.returncode == 3


def test_guard_that_stood_still_was_not_asked(guarded: Guarded) -> None:
    guard = psutil.Process(guarded.process.pid)
    guard.suspend()
    time.sleep(1.2)  # past the end of a wait with a time-out
    guard.resume()
    guarded.controller.kill()
    guarded.child.kill()
    assert guarded.output() == "folder False -9\n"


def test_signal_to_a_guard_that_stands_still_arrives_when_it_goes_on(guarded: Guarded) -> None:
    guard = psutil.Process(guarded.process.pid)
    guard.suspend()
    guard.terminate()
    guard.resume()
    assert guarded.output() == "asked; the child lives\nfolder True 7\n"


def test_guard_that_is_told_to_end_as_its_controller_is_killed_was_asked(guarded: Guarded) -> None:
    guard = psutil.Process(guarded.process.pid)
    guard.suspend()
    guarded.controller.kill()
    guarded.child.kill()
    guard.terminate()
    guard.resume()
    assert guarded.output() == "folder True -9\n"


def test_stop_request_does_not_raise_where_a_signal_arrives(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.is_set
    with pytest.raises(Stopped):
        stop.check()


def test_interrupting_ends_a_wait(stop: StopRequest) -> None:
    with pytest.raises(Stopped), stop.interrupting():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def test_interrupting_keeps_a_signal_that_a_callback_swallows(
    stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda gone: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped), stop.interrupting():
        del thing
        assert reference() is None
    assert capfd.readouterr().err == ""


async def test_wait_ends_at_a_signal_while_the_loop_sleeps(stop: StopRequest) -> None:
    waiting = asyncio.create_task(stop.wait())
    await asyncio.sleep(0)
    with subprocess.Popen(["/bin/kill", "-INT", str(os.getpid())]):
        await asyncio.wait_for(waiting, 60)


HUNG_UP = """
import os, signal, sys
from controller.signals import StopRequest

stop = StopRequest()
stop.listen()
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGHUP)
print("a line that no terminal takes", flush=True)
sys.exit(5 if stop.is_set else 1)
"""


def test_hangup_sets_the_stop_request_and_output_no_longer_fails() -> None:
    terminal, slave = os.openpty()
    command = [sys.executable, "-c", HUNG_UP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=slave, text=True) as process:
        os.close(slave)
        said = b""
        while not said.endswith(b"\n"):  # a line may take two writes
            said += os.read(terminal, 100)
        os.close(terminal)
        process.communicate("\n", timeout=60)
    assert process.returncode == 5


NEVER_LOADED = """
import sys, time

print("loading", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launch_interrupted_during_imports_prints_one_line(
    tmp_path: Path, number: signal.Signals
) -> None:
    # A library of the controller's that never comes to the end of its import.
    (tmp_path / "hydra.py").write_text(NEVER_LOADED)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "controller.main", "launch", f"run.dir={tmp_path / 'runs'}"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        os.killpg(process.pid, number)
        assert process.stderr.read() == "leash: stopped\n"
        assert process.wait(timeout=60) == 130
    assert not (tmp_path / "runs").exists()
