"""Drives the launchers of deploy/cluster with programs that stand for ssh, Slurm, Ray and the run
and write down their calls. `make soak-hosts` trains with them over three machines."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from controller.commands.stop import GRACE_S, NUM_TIMED_WAITS
from tests.support.repository import ROOT

LIMIT_S = 60.0
HEAD = "10.0.0.5"
WORDS = ("launch", "--experiment", "quickstart", "run.name=night")
PROGRAMS = {
    ".venv/bin/ray": """
        for word in "$@"; do case $word in --temp-dir=*) private=${word#*=} ;; esac; done
        mkdir -p "$private/session_2026/logs"
        echo said >"$private/session_2026/logs/gcs.out"
        stat -c %a "$RAY_AUTH_TOKEN_PATH" "$(dirname "$private")" >>SCENE/modes
        echo "$(cat "$RAY_AUTH_TOKEN_PATH")" >>SCENE/tokens
        if [[ " $* " == *" --address="* ]] && [ -e SCENE/worker-fails ]; then
            echo no room; exit 1
        fi
        trap 'tell ray has ended; exit 1' TERM
        if [[ " $* " == *" --address="* ]] && [ -e SCENE/worker-hangs ]; then
            tell_and_hang worker hangs
        fi
        tell_and_hang "mode=$RAY_AUTH_MODE${RAY_AUTH_TOKEN-} ray $*"
    """,
    ".venv/bin/leash": """
        mkdir -p runs/night/logs
        trap 'tell leash saves; exit 130' TERM
        if [ -e SCENE/leash-exits ]; then tell "leash $*" && exit "$(cat SCENE/leash-exits)"; fi
        tell_and_hang "leash $*"
    """,
    ".venv/bin/python": f"""
        [ "$2" = address ] && echo {HEAD} && exit
        [ "$RAY_AUTH_MODE" = token ] && [ -z "${{RAY_AUTH_TOKEN:-}}" ] || exit 1
        until [ "$(grep -c ' ray start' SCENE/calls)" -ge "$4" ]; do sleep 0.05; done
    """,
    "bin/ssh": """
        if [ "$1" = -G ]; then echo "hostname $2"; exit; fi
        tell "ssh $*"
        exec env -i PATH="$PATH" HOME="$HOME" bash -c "${*: -1}"
    """,
    "bin/srun": """
        tell "srun $*"
        while [[ $1 == --* ]]; do shift; done
        exec "$@"
    """,
    "bin/sbatch": 'tell "sbatch $*"',
    "bin/scontrol": """
        tell "scontrol $*"
        if [ "$2" = hostnames ]; then printf '%s\\n' $3; fi
        if [ "$2" = job ]; then cat SCENE/job-state; fi
    """,
}
PRELUDE = """#!/usr/bin/env bash
    set -u
    tell() { echo "$*" >>SCENE/calls; }
    tell_and_hang() { sleep 600 & sleep=$!; trap 'kill "$sleep"' EXIT; tell "$*"; wait "$sleep"; }
"""


class Scene:
    """A checkout with the launchers, and what was called in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(ROOT / "deploy" / "cluster", path / "deploy" / "cluster")
        shutil.copy(ROOT / "deploy" / "ray.env", path / "deploy")
        for name, text in PROGRAMS.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((PRELUDE + text).replace("SCENE", str(path)))
            file.chmod(0o755)
        self.environment = {"PATH": f"{path}/bin:/usr/bin:/bin", "HOME": str(path)}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [f"deploy/cluster/{script}.sh", *words],
            cwd=self.path,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, script: str, *words: str, **variables: str) -> tuple[int, str]:
        """Its exit code and output."""
        process = self.start(script, *words, **variables)
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output

    def write(self, name: str, text: str = "") -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def calls(self, *beginnings: str) -> list[str]:
        """Lists those that begin so, or all."""
        file = self.path / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(beginnings or "")]

    def wait_for_call(self, beginning: str) -> None:
        until(lambda: bool(self.calls(beginning)))

    def close(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT_S)
        for child in psutil.process_iter(["cmdline"]):  # what a failed test left
            if str(self.path) in " ".join(child.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def in_a_job(machines: str = "n1 n2 n3", here: str = "n1", restarts: int = 0) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": machines,
        "SLURMD_NODENAME": here,
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_RESTART_COUNT": str(restarts),
    }


def assert_token_is_private(scene: Scene, output: str, nodes: int) -> None:
    tokens = (scene.path / "tokens").read_text().split()
    assert len(tokens) == nodes and len({*tokens}) == 1 and re.fullmatch("[0-9a-f]{64}", tokens[0])
    assert set((scene.path / "modes").read_text().split()) == {"600", "700"}
    told = [output, (scene.path / "calls").read_text()]
    told += [file.read_text() for file in (scene.path / "runs").rglob("*") if file.is_file()]
    assert not any(tokens[0] in text for text in told)


# One node -----------------------------------------------------------------------------------------


def private_folders(scene: Scene) -> list[str]:
    return re.findall(r"--temp-dir=(/tmp/ray-\w+)/ray", "\n".join(scene.calls("mode")))


def test_node_has_the_limits_of_a_cluster_and_its_token_and_leaves_nothing(scene: Scene) -> None:
    scene.write("token", "secret")
    (scene.path / "token").chmod(0o600)
    variables = {"RAY_AUTH_TOKEN_PATH": str(scene.path / "token"), "LOGS": str(scene.path / "logs")}
    node = scene.start("node", "worker", HEAD, "--num-cpus=2", RAY_AUTH_TOKEN="other", **variables)
    scene.wait_for_call("mode")
    (call,) = scene.calls("mode")
    assert call.startswith("mode=token ray start --block ") and call.endswith(" --num-cpus=2")
    assert f" --address={HEAD}:6379 --node-ip-address={HEAD} " in call and "secret" not in call
    (private,) = private_folders(scene)
    assert Path(private).is_dir()
    node.terminate()
    assert node.wait(LIMIT_S) == 0
    assert scene.calls("ray") == ["ray has ended"]
    assert not Path(private).exists()
    assert [file.name for file in (scene.path / "logs").rglob("*.out")] == ["gcs.out"]


@pytest.mark.parametrize(
    ("mode", "words", "fix"),
    [
        (0o644, ("head", HEAD), "chmod 600"),
        (None, ("head", HEAD), "make one as docs/cluster.md says"),
        (0o600, ("head",), "node.sh head 10.0.0.5"),
        (0o600, ("leader", HEAD), "node.sh worker 10.0.0.5"),
    ],
)
def test_node_refuses_what_it_cannot_use(
    scene: Scene, mode: int | None, words: tuple[str, ...], fix: str
) -> None:
    if mode is not None:
        scene.write(".ray/auth_token", "secret")
        (scene.path / ".ray/auth_token").chmod(mode)
    code, output = scene.run("node", *words)
    assert (code, fix in output) == (2, True), output
    assert scene.calls() == []


def test_node_that_fails_passes_its_exit_code_on(scene: Scene) -> None:
    scene.write("worker-fails")
    scene.write(".ray/auth_token", "secret")
    (scene.path / ".ray/auth_token").chmod(0o600)
    assert scene.run("node", "worker", HEAD)[0] == 1


# ssh ----------------------------------------------------------------------------------------------


def test_ssh_starts_the_head_then_each_host_then_the_run_and_ends_all(scene: Scene) -> None:
    scene.write("leash-exits", "0")
    code, output = scene.run("ssh", *WORDS, HOSTS="b c", RAY_AUTH_TOKEN="of another cluster")
    assert code == 0, output
    head, one, two = scene.calls("mode")
    assert f"--head --port=6379 --node-ip-address={HEAD}" in head
    assert all(f" --address={HEAD}:6379 " in worker for worker in (one, two))
    hosts = re.findall(r" (\w+) cd ", "\n".join(scene.calls("ssh")))
    assert sorted(hosts) == ["b", "c"]
    in_order = [call.split()[0] for call in scene.calls("mode", "leash", "ray")]
    assert in_order == ["mode=token"] * 3 + ["leash"] + ["ray"] * 3
    (run,) = scene.calls("leash")
    assert run == (
        "leash launch --experiment quickstart run.name=night run.dir=runs run.name=night"
        f" cluster.ray_address={HEAD}:6379"
    )
    assert_token_is_private(scene, output, nodes=3)
    assert not any(Path(folder).exists() for folder in private_folders(scene))
    logs = scene.path / "runs" / "night" / "logs"
    assert {"ray-b.log", "ray-c.log"} <= {file.name for file in logs.iterdir()}
    assert [*logs.rglob("gcs.out")] and not (scene.path / "runs" / ".night.nodes").exists()


def test_ssh_lets_the_run_end_after_ctrl_c_before_it_ends_the_nodes(scene: Scene) -> None:
    launcher = scene.start("ssh", *WORDS, HOSTS="b")
    scene.wait_for_call("leash")
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 130
    assert scene.calls("leash", "ray")[1:] == ["leash saves", "ray has ended", "ray has ended"]


def test_ssh_ends_the_nodes_also_if_it_is_killed(scene: Scene) -> None:
    launcher = scene.start("ssh", *WORDS, HOSTS="b")
    scene.wait_for_call("leash")
    launcher.kill()
    until(lambda: scene.calls("ray") == ["ray has ended"] * 2)
    until(lambda: not any(Path(folder).exists() for folder in private_folders(scene)))


def test_ssh_ends_the_other_nodes_if_one_does_not_start(scene: Scene) -> None:
    scene.write("worker-fails")
    code, output = scene.run("ssh", *WORDS, HOSTS="b")
    assert code == 2 and "a Ray node ended at its start" in output and "no room" in output
    assert scene.calls("ray") == ["ray has ended"] and scene.calls("leash") == []
    assert not (scene.path / "runs" / ".night.nodes" / "token").exists()


def test_ssh_ends_the_nodes_after_ctrl_c_before_all_have_joined(scene: Scene) -> None:
    scene.write("worker-hangs")
    launcher = scene.start("ssh", *WORDS, HOSTS="b")
    scene.wait_for_call("worker hangs")
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=LIMIT_S)  # also the one that waits for them has ended
    assert launcher.returncode == 130
    assert scene.calls("ray") == ["ray has ended"] * 2 and scene.calls("leash") == []


def test_ssh_ends_the_nodes_of_a_run_that_fails(scene: Scene) -> None:
    scene.write("leash-exits", "1")
    assert scene.run("ssh", *WORDS, HOSTS="b")[0] == 1
    assert scene.calls("ray") == ["ray has ended"] * 2


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("", "HOSTS is missing"),
        (" ", "HOSTS is missing"),
        ("b c b", "HOSTS names b twice"),
        ("-oProxyCommand=x", "is no name of a machine"),
    ],
)
def test_ssh_refuses_hosts_with_the_fix(scene: Scene, hosts: str, problem: str) -> None:
    code, output = scene.run("ssh", *WORDS, HOSTS=hosts)
    assert code == 2 and problem in output
    assert 'make launch CLUSTER=ssh HOSTS="10.0.0.6 10.0.0.7"' in output
    assert scene.calls() == []


def test_this_machine_is_refused_as_one_of_the_others() -> None:
    nodes = [sys.executable, str(ROOT / "deploy/cluster/nodes.py"), "address", "127.0.0.1"]
    told = subprocess.run(nodes, capture_output=True, text=True, timeout=LIMIT_S)
    assert told.returncode == 3 and "127.0.0.1 is this machine" in told.stderr


@pytest.mark.parametrize(("exit_code", "is_advised"), [(3, True), (1, False)])
def test_ssh_advises_on_hosts_only_where_they_name_this_machine(
    scene: Scene, exit_code: int, is_advised: bool
) -> None:
    scene.write(".venv/bin/python", f"#!/bin/sh\nexit {exit_code}\n")
    code, output = scene.run("ssh", *WORDS, HOSTS="b")
    assert code == (2 if is_advised else exit_code)
    assert ("name other machines" in output) == is_advised


@pytest.mark.parametrize(("script", "variables"), [("ssh", {"HOSTS": "b"}), ("slurm", None)])
def test_fresh_checkout_is_refused_with_the_fix(
    scene: Scene, script: str, variables: dict[str, str] | None
) -> None:
    shutil.rmtree(scene.path / ".venv")
    code, output = scene.run(script, *WORDS, **variables or in_a_job())
    assert code == 2 and output.startswith("cluster: no .venv in ") and "make install" in output


def test_dry_run_of_ssh_prints_every_command_and_starts_none(scene: Scene) -> None:
    code, output = scene.run("ssh", *WORDS, "task.path=my file", HOSTS="b c", DRY="1")
    assert code == 0 and scene.calls() == [] and not (scene.path / "runs").exists()
    head, one, two, run = output.splitlines()
    assert f"node.sh head {HEAD}" in head and one.startswith("ssh ") and " c cd" in two
    assert "leash launch" in run and "my\\ file" in run


def test_resume_needs_the_name_of_the_run(scene: Scene) -> None:
    code, output = scene.run("ssh", "resume", HOSTS="b")
    assert code == 2 and "RUN is missing" in output


# Slurm --------------------------------------------------------------------------------------------


def test_slurm_submits_itself_outside_a_job(scene: Scene) -> None:
    options = "--nodes=3 --time=1:00:00"
    dry, output = scene.run("slurm", *WORDS, SBATCH=options, DRY="1")
    assert dry == 0 and scene.calls() == []
    assert scene.run("slurm", *WORDS, SBATCH=options)[0] == 0
    wanted = f"sbatch --signal=B:TERM@600 {options} deploy/cluster/slurm.sh {' '.join(WORDS)}"
    assert scene.calls() == [wanted] == [output.strip()]
    header = (ROOT / "deploy/cluster/slurm.sh").read_text()
    assert re.findall(r"^#SBATCH --(requeue|exclusive|no-kill)$", header, re.M)


@pytest.mark.parametrize("verb", ["doctor", "dry-run"])
def test_slurm_job_may_only_look_at_its_machines(scene: Scene, verb: str) -> None:
    scene.write("leash-exits", "1")
    code, output = scene.run("slurm", verb, "run.dir=runs/looked", **in_a_job())
    assert code == 1, output
    assert len(scene.calls("srun")) == 3 and scene.calls("ray") == ["ray has ended"] * 3
    (look,) = scene.calls("leash")
    assert look.startswith(f"leash {verb} ") and look.endswith(f"ray_address={HEAD}:6379")
    assert scene.calls("scontrol requeue") == []
    assert [*(scene.path / "runs/looked").iterdir()] == [], "no run keeps the logs of its nodes"


@pytest.mark.parametrize("verb", ["doctor", "dry-run"])
def test_slurm_look_leaves_a_live_run_of_its_name_and_is_not_queued_again(
    scene: Scene, verb: str
) -> None:
    record = '{"state": "running"}'
    scene.write("runs/night/run.json", record)
    scene.write("runs/night/logs/ray-n1.log", "of the run")
    scene.write("runs/.night.nodes/token", "of the run")
    scene.write("job-state", "JobState=RUNNING")
    job = scene.start("slurm", verb, "run.name=night", **in_a_job("n1 n2", restarts=1))
    scene.wait_for_call("leash")
    job.terminate()
    job.communicate(timeout=LIMIT_S)
    assert scene.calls("leash")[1:] == ["leash saves"]
    assert scene.calls("scontrol requeue") == []
    assert {file.name for file in (scene.path / "runs").iterdir()} == {"night", ".night.nodes"}
    assert (scene.path / "runs/night/run.json").read_text() == record
    assert (scene.path / "runs/night/logs/ray-n1.log").read_text() == "of the run"
    assert (scene.path / "runs/.night.nodes/token").read_text() == "of the run"


def test_look_keeps_the_logs_of_nodes_that_do_not_start(scene: Scene) -> None:
    scene.write("worker-fails")
    code, output = scene.run("ssh", "doctor", "run.name=night", HOSTS="b")
    assert code == 2 and scene.calls("leash") == [], output
    (log,) = (scene.path / "runs").glob(".night.look-*.nodes/logs/ray-b.log")
    assert "no room" in log.read_text() and not (log.parents[1] / "token").exists()


def test_ssh_may_only_look_at_its_machines(scene: Scene) -> None:
    scene.write("leash-exits", "0")
    code, output = scene.run("ssh", "doctor", "--json", HOSTS="b c")
    assert code == 0, output
    (look,) = scene.calls("leash")
    assert re.fullmatch(
        rf"leash doctor --json run.dir=runs run.name=\S+ cluster.ray_address={HEAD}:6379", look
    )
    assert len(scene.calls("mode")) == 3 and scene.calls("ray") == ["ray has ended"] * 3
    assert {file.name for file in (scene.path / "runs").iterdir()} <= {"night"}


def test_slurm_is_refused_where_it_is_not(scene: Scene) -> None:
    (scene.path / "bin/sbatch").unlink()
    code, output = scene.run("slurm", *WORDS)
    assert code == 2 and "no sbatch on PATH" in output
    code, output = scene.run("slurm", *WORDS, **in_a_job(here="login"))
    assert code == 2 and "--nodelist=n1 make launch CLUSTER=slurm" in output
    code, output = scene.run("slurm", *WORDS, LEAD_S="249")
    assert code == 2 and "at least 250 seconds" in output
    assert scene.calls("srun", "leash") == []


def test_slurm_starts_a_node_on_each_machine_of_its_job_then_the_run(scene: Scene) -> None:
    scene.write("leash-exits", "0")
    code, output = scene.run("slurm", *WORDS, **in_a_job())
    assert code == 0, output
    first, *others = scene.calls("srun")
    assert "--nodelist=n1 " in first and first.endswith(f"node.sh head {HEAD}")
    assert sorted(re.findall(r"--nodelist=(\w+)", "\n".join(others))) == ["n2", "n3"]
    assert all(step.endswith(f"node.sh worker {HEAD}") for step in others)
    (run,) = scene.calls("leash")
    assert run == (
        "leash launch cluster.stop_timeout_s=75 --experiment quickstart run.name=night"
        f" run.dir=runs run.name=night cluster.ray_address={HEAD}:6379"
    )
    assert scene.calls("ray") == ["ray has ended"] * 3
    assert scene.calls("scontrol requeue") == []
    assert_token_is_private(scene, output, nodes=3)


def test_slurm_job_of_one_machine_leaves_ray_to_the_launch(scene: Scene) -> None:
    scene.write("leash-exits", "0")
    code, _ = scene.run("slurm", *WORDS, **in_a_job(machines="n1"))
    assert code == 0 and scene.calls("srun") == []
    assert scene.calls("leash")[0].endswith(" cluster.ray_address=null")


@pytest.mark.parametrize("lead_s", [250, 600])
def test_slurm_job_has_time_to_save_and_be_queued_again_before_its_limit(
    scene: Scene, lead_s: int
) -> None:
    scene.write("leash-exits", "0")
    scene.run("slurm", *WORDS, LEAD_S=str(lead_s), **in_a_job("n1 n2"))
    (stop_timeout_s,) = re.findall(r"stop_timeout_s=(\d+)", scene.calls("leash")[0])
    script = (ROOT / "deploy/cluster/run.sh").read_text()
    (nodes_s,) = re.findall(r"^END_S=(\d+)$", script, re.M)
    assert GRACE_S + NUM_TIMED_WAITS * int(stop_timeout_s) + int(nodes_s) <= lead_s - 30


@pytest.mark.parametrize(
    ("state", "is_queued_again"), [("RUNNING", True), ("COMPLETING", False), ("PREEMPTED", False)]
)
def test_slurm_job_saves_at_sigterm_and_is_queued_again_if_it_is_not_being_ended(
    scene: Scene, state: str, is_queued_again: bool
) -> None:
    scene.write("job-state", f"JobId=77 JobState={state} Requeue=1")
    job = scene.start("slurm", *WORDS, **in_a_job("n1 n2"))
    scene.wait_for_call("leash")
    job.terminate()
    job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130
    last = ["scontrol requeue 77"] * is_queued_again
    ended = ["leash saves", "ray has ended", "ray has ended"]
    looked = ["scontrol show job --oneliner 77"]
    calls = scene.calls("leash", "ray", "scontrol show job", "scontrol requeue")
    assert calls[1:] == [*ended, *looked, *last]


def test_slurm_job_whose_run_fails_is_not_queued_again(scene: Scene) -> None:
    scene.write("leash-exits", "1")
    scene.write("job-state", "JobState=RUNNING")
    assert scene.run("slurm", *WORDS, **in_a_job("n1 n2"))[0] == 1
    assert scene.calls("ray") == ["ray has ended"] * 2 and scene.calls("scontrol requeue") == []


def test_slurm_job_that_was_queued_again_goes_on_from_the_checkpoint(scene: Scene) -> None:
    scene.write("leash-exits", "0")
    scene.write("runs/night/checkpoints/latest", "step-4")
    scene.write("runs/night/run.json", '{\n "name": "night",\n "state": "running"\n}\n')
    scene.run("slurm", *WORDS, **in_a_job("n1 n2", restarts=1))
    (run,) = scene.calls("leash")
    assert run == (
        "leash resume cluster.stop_timeout_s=75 --dir runs --run night"
        f" cluster.ray_address={HEAD}:6379"
    )
    record = (scene.path / "runs/night/run.json").read_text()
    assert '"state": "failed"' in record  # its controller is gone with the job's machines


def test_slurm_job_without_a_checkpoint_is_launched_anew(scene: Scene) -> None:
    scene.write("leash-exits", "0")
    scene.write("runs/night/run.json", '{"state": "failed"}')
    scene.run("slurm", *WORDS, **in_a_job("n1 n2", restarts=1))
    assert scene.calls("leash")[0].startswith("leash launch ")
    assert len([*(scene.path / "runs").glob("night-before-its-first-checkpoint-*")]) == 1
