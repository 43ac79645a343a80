"""The real path end to end, for a few steps: Redis, Ray, SGLang and ZeRO-3 as a user starts them.

`make soak` sends more signals than CI does, each at another line of the log (LEASH_SOAK_SIGNALS).
"""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pytest

from controller.metrics.records import read_metrics
from rollout_pool.worker.record import read_recorded

pytestmark = pytest.mark.slow

RUN = f"run-{uuid4().hex[:8]}"
"""Its own name: other runs on this machine stage weights in folders of theirs."""

SMALL = (
    "trainer.num_steps=4",
    "trainer.groups_per_step=4",
    "trainer.warm_start.num_steps=20",
    "trainer.checkpoint_every=2",
    "rollout.group_size=4",
    "task.eval_size=16",
    "run.panel=false",
)


def launch_command(
    runs: Path, name: str, *overrides: str, experiment: str = "quickstart"
) -> list[str]:
    settings = [*SMALL, f"run.dir={runs}", f"run.name={name}", *overrides]
    command = [sys.executable, "-m", "controller.main", "launch"]
    return [*command, "--experiment", experiment, *settings]


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def launches_end(tmp_path: Path) -> Iterator[None]:
    """A test that fails in the middle leaves no run behind that loads the machine of the next."""
    yield
    for process in _started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
    _started.clear()
    for line in processes_of(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(line.split()[0])).kill()


def start(
    runs: Path, name: str, *overrides: str, experiment: str = "quickstart"
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        launch_command(runs, name, *overrides, experiment=experiment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str], timeout_s: float = 300.0) -> str:
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


def wait_for_line(process: subprocess.Popen[str], text: str, timeout_s: float = 300.0) -> str:
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
    """Of files in shared memory; a semaphore is mapped under another name than it has."""
    inodes: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    inodes.add(int(line.split()[4]))
    return inodes


def abandoned_folders() -> set[str]:
    """Of Ray and SGLang below /tmp that no living process has in its command line."""
    kinds = ("leash-ray-*", "leash-sglang-*")
    folders = {str(path) for kind in kinds for path in Path("/tmp").glob(kind)}
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return {folder for folder in folders if not any(folder in line for line in lines)}


def assert_nothing_left(runs: Path, shared_memory: set[str]) -> None:
    assert processes_of(runs) == []
    entries = [file for file in os.scandir("/dev/shm") if file.name not in shared_memory]
    assert [entry.name for entry in entries if entry.name.startswith(f"leash-{RUN}")] == []
    if new := [entry for entry in entries if entry.is_file()]:  # a run's folders are named above
        # None of this run is alive any more: what is mapped belongs to others on this machine.
        mapped = mapped_inodes()
        left = [file.name for file in new if file.inode() not in mapped and os.path.exists(file)]
        assert left == []
    assert list(runs.glob("**/*.sock")) == []


@pytest.mark.parametrize(("experiment", "max_staleness"), [("quickstart", 0), ("alphabet-sort", 1)])
def test_a_launch_trains_keeps_the_law_and_leaves_nothing(
    tmp_path: Path, experiment: str, max_staleness: int
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    settings = (f"buffer.max_staleness={max_staleness}", "rollout.log_rate=1")
    process = start(tmp_path, RUN, *settings, experiment=experiment)
    output = finish(process)
    assert process.returncode == 0, output[-6000:]
    result = result_of(output)
    dropped = sum(result["groups_dropped"].values())
    places = result["groups_trained"] + dropped + result["groups_ready"] + result["groups_leased"]
    assert result["groups_pushed"] == places
    assert result["groups_trained"] == 4 * 4
    assert result["steps"] == 4
    assert result["versions_published"] == 4
    assert result["max_staleness_trained"] <= max_staleness
    assert result["tokens_trained"] > 0
    assert result["logprob_diff_max"] <= 1e-4
    if max_staleness == 0:
        assert result["ratio_max_abs_dev"] <= 1e-3  # importance ratios are 1 within numeric error
    run = tmp_path / RUN
    assert_turns(run, at_least=3 if experiment == "alphabet-sort" else 1)
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.md",
        "result.json",
        "learning_by_step.png",
        "timeline.png",
    ):
        assert (run / name).is_file(), name
    assert (run / "checkpoints").is_dir()
    assert_weights_travelled(run, result, num_versions=4)
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert "core_worker.cc" not in output, "Ray complained"
    assert [str(p) for p in (run, *run.rglob("*")) if p.stat().st_mode & 0o077] == []
    assert_nothing_left(tmp_path, shared_memory)


def assert_turns(run: Path, at_least: int) -> None:
    """Some episode of the newest recorded group has so many answers, in one trajectory."""
    recorded = read_recorded(run, None)
    assert recorded is not None
    trajectories = recorded.group.trajectories
    assert len({t.episode for t in trajectories}) == len(trajectories) == 4
    begins = [np.diff(t.loss_mask.astype(int), prepend=0) == 1 for t in trajectories]
    assert max(int(begin.sum()) for begin in begins) >= at_least


def assert_weights_travelled(run: Path, result: dict[str, Any], num_versions: int) -> None:
    """Every version left the trainer or was overtaken, and the engine ended at the last one."""
    records = read_metrics(run / "metrics.jsonl")
    publishes = {int(r.number("version")): r for r in records if r.kind == "publish"}
    commits = [r for r in records if r.kind == "commit"]
    assert sorted(publishes) == list(range(num_versions + 1))
    assert publishes[num_versions].values["mode"] != "skipped"
    versions = [int(r.number("version")) for r in commits]
    assert versions == sorted(set(versions)) and versions[-1] == num_versions
    for commit in commits:
        assert 0 < commit.number("load_s") <= commit.number("pause_s")
        assert commit.number("paused_at") < commit.number("resumed_at")
    for publish in publishes.values():
        if publish.values["mode"] != "skipped":
            assert publish.number("wire_bytes") == publish.number("bytes") > 0
            assert publish.number("convergence_s") > publish.number("stage_s") > 0
    for name in ("engine_pause_s", "snapshot_s", "convergence_s"):
        assert 0 < result[name]["p50"] <= result[name]["max"]
    assert "excluded" not in result["weights_events"]


def orphans_listening() -> set[str]:
    """TCP ports and named unix sockets of processes whose parent is gone: others here have one."""
    sockets = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
    sockets += [c for c in psutil.net_connections("unix") if c.laddr]
    found = set[str]()
    for socket in sockets:
        with contextlib.suppress(psutil.NoSuchProcess):
            if socket.pid is not None and psutil.Process(socket.pid).ppid() == 1:
                found.add(f"{psutil.Process(socket.pid).name()} {socket.laddr}")
    return found


STEPS_OF_THE_START = (
    "Redis",
    "Ray",
    "placement",
    "receivers, engines, workers, trainer ranks",
    "task and model",
    "model from scratch",
    "warm start",
    "checkpoint engine",
    "version 0 to the engines",
)
"""Each is a line of the log when it is done: a signal at it meets the step that comes next."""
SIGNALS = (
    ("step 2/", signal.SIGTERM),
    ("✓ Redis", signal.SIGINT),
    ("✓ Redis", signal.SIGTERM),
    *((f"✓ {step}", signal.SIGINT) for step in STEPS_OF_THE_START[1:]),
    ("step 1/", signal.SIGINT),
)
NUM_SIGNALS = int(os.environ.get("LEASH_SOAK_SIGNALS", "2"))


@pytest.mark.parametrize(("line", "number"), SIGNALS[:NUM_SIGNALS])
def test_signal_to_the_group_at_a_line_of_the_log_ends_the_run_and_leaves_nothing(
    tmp_path: Path, line: str, number: signal.Signals
) -> None:
    shared_memory, listeners = set(os.listdir("/dev/shm")), orphans_listening()
    temporary = abandoned_folders()
    process = start(tmp_path, RUN, "trainer.num_steps=1000")
    seen = wait_for_line(process, line)
    if line == "✓ Redis":
        wait_for_ray_folder(tmp_path / RUN)
    os.killpg(process.pid, number)  # as Ctrl-C and `timeout` do: every process of the shell's job
    output = seen + finish(process, timeout_s=90)
    assert process.returncode == 130, output[-4000:]
    assert "Traceback" not in output and "Exception ignored" not in output, output[-4000:]
    run = tmp_path / RUN
    if run.exists():  # a signal at the first line may come before there is a folder
        assert json.loads((run / "run.json").read_text())["state"] == "stopped"
        assert json.loads((run / "result.json").read_text())["state"] == "stopped"
        assert "**Stopped" in (run / "summary.md").read_text()
        assert not (run / "redis.url").exists() and not (run / "ray").is_symlink()
    if line == "step 2/":
        assert_saved(run)
    assert_nothing_left(tmp_path, shared_memory)
    assert orphans_listening() <= listeners
    assert abandoned_folders() <= temporary


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


def wait_for_ray_folder(run: Path) -> None:
    """It is noted just before Ray starts, which says no line until it has started."""
    deadline = time.monotonic() + 60
    while not (run / "ray").is_symlink():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def processes_with(runs: Path, word: str) -> list[psutil.Process]:
    """Processes of a run below `runs` whose command line has this word."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if word in (p.info["cmdline"] or [])
        if p.environ().get("LEASH_RUN", "").startswith(str(runs))
    ]


def events_of(runs: Path) -> set[str]:
    records = read_metrics(runs / RUN / "metrics.jsonl", "weights_event")
    return {str(record.values["event"]) for record in records}


def test_an_engine_that_is_dead_for_good_ends_the_run_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    settings = ("trainer.num_steps=1000", "rollout.engine.max_restarts=0")
    process = start(tmp_path, RUN, *settings)
    wait_for_line(process, "step 2/")
    (server,) = processes_with(tmp_path, "rollout_pool.engines.sglang_server")
    server.kill()
    output = finish(process, timeout_s=90)
    assert process.returncode == 1, output[-4000:]
    assert "engine-0" in output and "engine-0" in output.split("last lines of")[-1]
    assert json.loads((tmp_path / RUN / "result.json").read_text())["state"] == "failed"
    assert_nothing_left(tmp_path, shared_memory)


@pytest.mark.parametrize(
    ("module", "event"),
    [
        ("rollout_pool.engines.sglang_server", "engine_restarted"),
        ("weight_sync.receiver.app", "receiver_restarted"),
    ],
)
def test_an_engine_or_a_receiver_that_dies_is_started_again_and_training_goes_on(
    tmp_path: Path, module: str, event: str
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    process = start(tmp_path, RUN, "trainer.num_steps=1000")
    wait_for_line(process, "step 2/")
    (victim, *_) = processes_with(tmp_path, module)
    victim.kill()
    # Far more steps than the groups that were under way: new ones come, by new weights.
    wait_for_line(process, "step 20/")
    assert event in events_of(tmp_path)
    commits = read_metrics(tmp_path / RUN / "metrics.jsonl", "commit")
    assert commits[-1].number("version") >= 10
    process.send_signal(signal.SIGINT)
    finish(process, timeout_s=60)
    assert process.returncode == 130
    assert_nothing_left(tmp_path, shared_memory)


def command_on(runs: Path, verb: str) -> str:
    """What a command on the run below `runs` says."""
    command = [sys.executable, "-m", "controller.main", verb, "--dir", str(runs)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def test_stop_from_another_shell_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    process = start(tmp_path, RUN, "trainer.num_steps=1000")
    wait_for_line(process, "step 2/")
    assert listens_beyond_loopback(tmp_path) == []
    assert "run" in command_on(tmp_path, "status")
    command_on(tmp_path, "stop")
    finish(process, timeout_s=30)
    assert process.returncode == 130
    assert json.loads((tmp_path / RUN / "run.json").read_text())["state"] == "stopped"
    assert_saved(tmp_path / RUN)
    assert_nothing_left(tmp_path, shared_memory)


def test_stop_clears_up_behind_a_controller_that_was_killed(tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    temporary = abandoned_folders()
    process = start(tmp_path, RUN, "trainer.num_steps=1000")
    wait_for_line(process, "step 2/")
    run = tmp_path / RUN
    process.kill()  # its guard, which would clear up by itself
    os.kill(json.loads((run / "run.json").read_text())["pid"], signal.SIGKILL)
    finish(process, timeout_s=30)
    command_on(tmp_path, "stop")
    assert json.loads((run / "run.json").read_text())["state"] == "stopped"
    assert not (run / "redis.url").exists()
    written = json.loads((run / "result.json").read_text())
    assert written["state"] == "stopped" and written["steps"] >= 2
    (run / "summary.md").unlink()
    assert result_of(command_on(tmp_path, "report")) == written
    assert "**Stopped" in (run / "summary.md").read_text()
    assert_nothing_left(tmp_path, shared_memory)
    assert abandoned_folders() <= temporary
