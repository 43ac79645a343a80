"""Launches as a user starts them, and what must be left of one when it is over."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from configs.environment import FORK_SERVERS_VARIABLE, RUN_VARIABLE
from controller.run_dir import RunDir
from tests.support import forked

RUN = f"run-{uuid4().hex[:8]}"
"""Its own name: other runs on this machine stage weights in folders of theirs."""

SMALL = (
    "trainer.num_steps=4",
    "trainer.groups_per_step=4",
    "trainer.warm_start.num_steps=8",
    "trainer.checkpoint_every=2",
    "rollout.group_size=4",
    "task.eval_size=16",
    "run.panel=false",
    # What larger runs have, and the quickstart does not.
    "trainer.num_ranks=2",
    "rollout.engine.radix_cache=true",
    "weight_sync.pause_mode=resubmit",
)


LEASH = [sys.executable, "-m", "controller.main"]
"""It has a launch or its resumption forked by itself."""
FORKED = [sys.executable, forked.__file__, "controller.main"]
"""Any other command, with the imports done."""


def launch_command(
    runs: Path, name: str, *overrides: str, experiment: str = "quickstart"
) -> list[str]:
    settings = [*SMALL, f"run.dir={runs}", f"run.name={name}", *overrides]
    return [*LEASH, "launch", "--experiment", experiment, *settings]


_started: list[subprocess.Popen[str]] = []


def start(
    runs: Path,
    name: str,
    *overrides: str,
    experiment: str = "quickstart",
    is_forked: bool = True,
) -> subprocess.Popen[str]:
    """`is_forked`: by the servers of all tests; else it starts its own, as a user's does."""
    command = launch_command(runs, name, *overrides, experiment=experiment)
    return _start(command, is_forked=is_forked)


def resume(runs: Path, *overrides: str) -> subprocess.Popen[str]:
    """Continues the run below `runs`."""
    return _start([*LEASH, "resume", "--dir", str(runs), *overrides])


def attach(runs: Path) -> subprocess.Popen[str]:
    """A controller for the run below `runs`, which goes on without one."""
    return _start([*FORKED, "attach", "--dir", str(runs)])


def try_task(*words: str) -> subprocess.Popen[str]:
    """`leash try` with these words."""
    return _start([*FORKED, "try", *words])


def serve_sandbox(*words: str) -> subprocess.Popen[str]:
    """`leash sandbox` with these words."""
    return _start([*LEASH, "sandbox", *words], is_forked=False)


def _start(command: list[str], *, is_forked: bool = True) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if not is_forked:
        environment.pop(FORK_SERVERS_VARIABLE, None)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_all(runs: Path) -> None:
    """Ends what a failed test left: no run goes on loading the machine of the next."""
    for process in _started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        if process.stdout is not None:  # else a later test is told of an open file
            process.stdout.close()
    _started.clear()
    for line in processes_of(runs):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(line.split()[0])).kill()


def kill_controller(run: Path, *, with_guard: bool = False) -> None:
    """Neither it nor its guard has time to react to the other's end."""
    controller = psutil.Process(RunDir(path=run).read_record().pid)
    guard = controller.parent()
    assert guard is not None
    if with_guard:
        guard.suspend()
    controller.kill()
    if with_guard:
        guard.kill()


def finish(process: subprocess.Popen[str], timeout_s: float = 500.0) -> str:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"the launch did not end:\n{output[-4000:]}") from None
    return output


def result_of(output: str) -> dict[str, Any]:
    last = output.strip().splitlines()[-1]
    assert last.startswith("RESULT "), output[-4000:]
    result = json.loads(last.removeprefix("RESULT "))
    assert isinstance(result, dict)
    return result


def processes_of(runs: Path) -> list[str]:
    """Processes that carry a run below `runs` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LEASH_RUN", "").startswith(str(runs)):
                found.append(f"{process.pid} {process.name()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for_line(process: subprocess.Popen[str], text: str, timeout_s: float = 580.0) -> str:
    assert process.stdout is not None
    seen = ""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        seen += line
        if text in line:
            return seen
        assert line or process.poll() is None, f"ended before {text!r}:\n{seen[-4000:]}"
    raise AssertionError(f"no {text!r} within {timeout_s} s:\n{seen[-4000:]}")


def mapped_inodes() -> set[int]:
    """Returns inodes of files in shared memory; semaphores are mapped under other names."""
    inodes: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    inodes.add(int(line.split()[4]))
    return inodes


def abandoned_folders() -> set[str]:
    """Lists folders of Ray, SGLang and fork servers below /tmp that no living process names."""
    kinds = ("leash-fork-*", "leash-ray-*", "leash-sglang-*")
    folders = {str(path) for kind in kinds for path in Path("/tmp").glob(kind)}
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return {folder for folder in folders if not any(folder in line for line in lines)}


@dataclass(frozen=True)
class Machine:
    """Records this machine's state before a launch, to be compared with that after it."""

    shared_memory: frozenset[str]
    listeners: frozenset[str]
    folders: frozenset[str]

    @classmethod
    def look(cls) -> Machine:
        return cls(
            shared_memory=frozenset(os.listdir("/dev/shm")),
            listeners=frozenset(orphans_listening()),
            folders=frozenset(abandoned_folders()),
        )

    def assert_nothing_left(self, runs: Path) -> None:
        assert processes_of(runs) == []
        assert [name for name in os.listdir("/dev/shm") if name.startswith(f"leash-{RUN}")] == []
        assert list(runs.glob("**/*.sock")) == []
        # Others on this machine come and go: a folder of a run that is only just starting is in no
        # command line yet, and a file of it not mapped.
        deadline = time.monotonic() + 60
        while left := self._left():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def _left(self) -> set[str]:
        new = [e for e in os.scandir("/dev/shm") if e.name not in self.shared_memory]
        # None of this run is alive any more: what is mapped belongs to others.
        mapped = mapped_inodes()
        files = {e.name for e in new if os.path.isfile(e) and e.inode() not in mapped}
        others = abandoned_folders() - self.folders | orphans_listening() - self.listeners
        return others | {name for name in files if os.path.exists(f"/dev/shm/{name}")}


def orphans_listening() -> set[str]:
    """TCP ports and named unix sockets of processes whose parent is gone: others here have one.

    Those of a living run whose controller another test has killed are left out.
    """
    sockets = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
    sockets += [c for c in psutil.net_connections("unix") if c.laddr]
    found = set[str]()
    for socket in sockets:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(socket.pid) if socket.pid is not None else None
            if process and process.ppid() == 1 and RUN_VARIABLE not in process.environ():
                found.add(f"{process.name()} {socket.laddr}")
    return found


def listens_beyond_loopback(runs: Path) -> list[str]:
    """Every socket of a run below `runs` that other machines could connect to."""
    own = {int(line.split()[0]): line for line in processes_of(runs)}
    assert len(own) > 3
    found = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert any(c.pid in own for c in found)
    return [
        f"{own[c.pid]} {c.laddr}" for c in found if c.pid in own and not is_loopback(c.laddr.ip)
    ]


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)  # as a socket for both families shows it
    return (mapped or address).is_loopback


def assert_saved(run: Path) -> None:
    """A run that was stopped in training leaves the model and the figures of its last step."""
    result = json.loads((run / "result.json").read_text())
    places = ("groups_trained", "groups_quarantined", "groups_ready", "groups_leased")
    assert result["steps"] >= 2 and result["tokens_generated"] > 0
    dropped = sum(result["groups_dropped"].values())
    assert result["groups_pushed"] == sum(result[place] for place in places) + dropped > 0
    assert list((run / "final_model").glob("*.safetensors"))
    newest = (run / "checkpoints" / "latest").read_text().strip()
    assert newest == f"step-{result['steps']:06d}", "no step is lost"
    assert (run / "learning_by_step.png").is_file()


def command_on(runs: Path, *words: str) -> str:
    """Runs a command on the run below `runs` and returns its output."""
    command = [*FORKED, *words, "--dir", str(runs)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout
