"""Reads what would be submitted to Kubernetes, and runs the pod's script with a false `leash`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from controller.commands.stop import GRACE_S, NUM_TIMED_WAITS
from tests.support.repository import ROOT

LIMIT_S = 60.0
VARIABLES = {"IMAGE": "registry/leash:1", "NODES": "3", "GPUS": "8", "SHM": "9Gi", "DRY": "1"}


def submit(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "deploy/cluster/k8s.sh"), *words],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def manifest(*words: str) -> dict[str, Any]:
    told = submit("launch", *words, **VARIABLES)
    assert told.returncode == 0, told.stderr
    (document,) = yaml.safe_load_all(told.stdout)
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return manifest("run.name=night", 'task.path=it\'s "my" $HOME/file')


@pytest.fixture(scope="module")
def pod(job: dict[str, Any]) -> dict[str, Any]:
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def test_job_has_a_cluster_with_a_token_and_so_many_equal_machines(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"] == {"generateName": "night-"}
    assert job["spec"]["shutdownAfterJobFinishes"] is True and job["spec"]["backoffLimit"] == 3
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['rayVersion']} " in (ROOT / "deploy/requirements-gpu.lock").read_text()
    (workers,) = cluster["workerGroupSpecs"]
    assert {workers[f"{name}eplicas"] for name in ("r", "minR", "maxR")} == {2}
    assert workers["template"] == cluster["headGroupSpec"]["template"]


def test_pod_mounts_its_memory_and_the_runs_and_names_what_kuberay_wants(
    pod: dict[str, Any],
) -> None:
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "runs": "/runs"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "9Gi"}
    (claim,) = yaml.safe_load_all((ROOT / "deploy/cluster/k8s-runs.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"] and limits["nvidia.com/gpu"] == "8"
    assert container["envFrom"] == [{"secretRef": {"name": "leash", "optional": True}}]
    for probe in ("readinessProbe", "livenessProbe"):
        patience_s = container[probe]["failureThreshold"] * container[probe]["periodSeconds"]
        assert patience_s > 120 and container[probe]["httpGet"]["port"] == 52365
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert stop == ["/opt/leash/deploy/cluster/k8s_job.sh", "stop"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] < 600
    assert "terminationGracePeriodSeconds" not in container["readinessProbe"]  # Kubernetes refuses


def test_pod_has_the_limits_of_every_cluster(pod: dict[str, Any]) -> None:
    given = {pair["name"]: pair["value"] for pair in pod["containers"][0]["env"]}
    limits = dict(re.findall(r"export (\w+)=(\d+)", (ROOT / "deploy/ray.env").read_text()))
    assert len(limits) == 4 and limits.items() <= given.items()


def test_image_has_the_scripts_where_the_job_looks_for_them(job: dict[str, Any]) -> None:
    entrypoint = job["spec"]["entrypoint"].split()
    assert entrypoint == ["/opt/leash/deploy/cluster/k8s_job.sh", "run"]
    text = (ROOT / "deploy/Containerfile").read_text()
    assert "WORKDIR /opt/leash" in text and "ENV PATH=/opt/leash/.venv/bin:" in text
    assert os.access(ROOT / "deploy/cluster/k8s_job.sh", os.X_OK)


@pytest.mark.parametrize(
    ("words", "without", "fix"),
    [
        (("launch",), "IMAGE", "IMAGE is missing"),
        (("launch", "run.name=Night_1"), None, "small letters"),
        (("launch", "run.dir=/data"), None, "runs are in /runs"),
        (("resume",), None, "RUN is missing"),
    ],
)
def test_submission_is_refused_with_the_fix(
    words: tuple[str, ...], without: str | None, fix: str
) -> None:
    given = {name: value for name, value in VARIABLES.items() if name != without}
    told = submit(*words, **given)
    assert (told.returncode, told.stdout) == (2, "") and fix in told.stderr


def submit_by_kubectl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A false one leaves its words and what was submitted in files beside it."""
    kubectl = folder / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\necho "$@" >"$0.call"; cat >"$0.got"; echo rayjob.ray.io/night-1\n'
    )
    kubectl.chmod(0o755)
    return submit(*words, **{**VARIABLES, "DRY": "", "PATH": f"{folder}:{os.environ['PATH']}"})


def test_launch_submits_what_a_dry_run_prints(tmp_path: Path) -> None:
    told = submit_by_kubectl(tmp_path, "launch", "run.name=night")
    assert "kubectl delete rayjob night-1 ends it in order" in told.stdout
    assert (tmp_path / "kubectl.call").read_text() == "create -o name -f -\n"
    submitted = yaml.safe_load((tmp_path / "kubectl.got").read_text())
    dry = manifest("run.name=night")
    ids = [
        pair.pop("value")
        for document in (submitted, dry)
        for pair in document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
            "containers"
        ][0]["env"]
        if pair["name"] == "JOB"
    ]
    assert submitted == dry and ids[0] != ids[1]
    assert all(re.fullmatch("[0-9a-f]{16}", number) for number in ids)


# The pod's script ---------------------------------------------------------------------------------


LEASH = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>calls
if [ "$1" = stop ]; then kill "$(<pid)" && exit; fi
[ -e trains ] || exit "$(cat exit-code 2>/dev/null || echo 7)"
trap 'sed -i s/running/stopped/ runs/night/run.json; kill "$sleep"; exit 130' TERM
sleep 600 & sleep=$!
mkdir -p runs/night
printf '"host": "%s"\\n"state": "running"\\n' "$(hostname)" >runs/night/run.json
echo "$$" >pid.new && mv pid.new pid
wait "$sleep"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """With the folder of runs in it, and a `leash` that trains until it is stopped."""
    shutil.copytree(ROOT / "deploy/cluster", tmp_path / "deploy/cluster")
    script = tmp_path / "deploy/cluster/k8s_job.sh"
    text = script.read_text().replace("/runs", str(tmp_path / "runs"))
    script.write_text(text.replace("NOTICE_S=20", "NOTICE_S=1"))
    leash = tmp_path / ".venv/bin/leash"
    leash.parent.mkdir(parents=True)
    leash.write_text(LEASH)
    leash.chmod(0o755)
    yield tmp_path
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)


def start(checkout: Path, verb: str, words: str = "", job: str = "1") -> subprocess.Popen[bytes]:
    script = str(checkout / "deploy/cluster/k8s_job.sh")
    environment = {"PATH": os.environ["PATH"], "RUN": "night", "JOB": job, "WORDS": words}
    return subprocess.Popen([script, verb], env=environment)


def test_job_in_the_pod_runs_the_words_as_they_were_typed_and_passes_the_exit_code(
    checkout: Path, pod: dict[str, Any]
) -> None:
    given = {pair["name"]: pair["value"] for pair in pod["containers"][0]["env"]}
    assert start(checkout, "run", given["WORDS"]).wait(LIMIT_S) == 7
    words = (checkout / "calls").read_text().splitlines()
    assert words[0] == "launch" and 'task.path=it\'s "my" $HOME/file' in words
    assert words[-1] == "cluster.ray_address=auto"
    stop_timeout_s = int(words[-2].removeprefix("cluster.stop_timeout_s="))
    needed_s = GRACE_S + NUM_TIMED_WAITS * stop_timeout_s
    assert needed_s < int(given["RAY_JOB_STOP_WAIT_TIME_S"]) < pod["terminationGracePeriodSeconds"]


def test_look_at_the_machines_is_made_once_whatever_it_finds(checkout: Path) -> None:
    told = submit("doctor", **VARIABLES)
    (document,) = yaml.safe_load_all(told.stdout)
    containers = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ]
    (words,) = [pair["value"] for pair in containers[0]["env"] if pair["name"] == "WORDS"]
    assert words.startswith("doctor run.dir=/runs ")
    (checkout / "runs").mkdir()
    (checkout / "exit-code").write_text("1")
    assert start(checkout, "run", words).wait(LIMIT_S) == 1
    assert (checkout / "calls").read_text().splitlines()[0] == "doctor"
    assert start(checkout, "run", words).wait(LIMIT_S) == 2, "another attempt of the job"
    assert (checkout / "calls").read_text().count("doctor") == 1


def test_look_that_is_submitted_leaves_a_live_run_of_its_name_alone(checkout: Path) -> None:
    """Also one on a machine of this name, a job that was refused, and as its pods end."""
    assert submit_by_kubectl(checkout, "doctor", "run.name=night").returncode == 0
    document = yaml.safe_load((checkout / "kubectl.got").read_text())
    (container,) = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ]
    given = {pair["name"]: pair["value"] for pair in container["env"]}
    assert document["metadata"] == {"generateName": "night-"} and given["RUN"] == "night"
    runs, record = checkout / "runs", '"host": "{}"\n"state": "running"\n'
    (runs / "night/checkpoints").mkdir(parents=True)
    (runs / "night/checkpoints/latest").write_text("step-4")
    (runs / "night/job").write_text("live\n")
    (runs / ".night.refused").write_text("another\n")
    (checkout / "exit-code").write_text("1")
    for host, verb, code in ((os.uname().nodename, "run", 1), ("the-head", "stop", 0)):
        (runs / "night/run.json").write_text(record.format(host))
        before = contents(runs / "night")
        assert start(checkout, verb, given["WORDS"], given["JOB"]).wait(LIMIT_S) == code
        assert contents(runs / "night") == before
    assert (runs / ".night.refused").read_text().split() == ["another", given["JOB"]]
    assert sorted(path.name for path in runs.iterdir()) == [".night.refused", "night"]
    words = (checkout / "calls").read_text().splitlines()
    assert words[0] == "doctor" and "stop" not in words


def contents(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_pod_ended", [False, True])
def test_job_in_the_pod_lets_the_run_stop_in_order(checkout: Path, is_pod_ended: bool) -> None:
    """It is no descendant of the job: Ray would signal it, and its Redis, with the job."""
    (checkout / "trains").touch()
    running = start(checkout, "run", f"launch run.dir={checkout}/runs run.name=night")
    deadline = time.monotonic() + LIMIT_S
    while not (checkout / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run = int((checkout / "pid").read_text())
    descendants = psutil.Process(running.pid).children(recursive=True)
    assert run not in {child.pid for child in descendants}
    job = checkout / "runs/night/job"
    while not (job.exists() and job.read_text() == "1\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if is_pod_ended:
        assert start(checkout, "stop").wait(LIMIT_S) == 0
        assert "stopped" in (checkout / "runs/night/run.json").read_text()
    else:
        running.terminate()
    assert running.wait(LIMIT_S) == 130
    assert (checkout / "calls").read_text().split()[-5:-3] == ["stop", "--dir"]
    assert "stop" in (checkout / "runs/night/job").read_text().split()


def test_pod_of_a_worker_waits_for_the_end_of_the_run_only_if_a_stop_was_asked_for(
    checkout: Path,
) -> None:
    record = checkout / "runs/night/run.json"
    record.parent.mkdir(parents=True)
    record.write_text('"host": "the-head"\n"state": "running"\n')
    (record.parent / "job").write_text("1\n")
    assert start(checkout, "stop").wait(LIMIT_S) == 0
    (record.parent / "job").write_text("1\nstop\n")
    waiting = start(checkout, "stop")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(4)
    record.write_text('"host": "the-head"\n"state": "stopped"\n')
    assert waiting.wait(LIMIT_S) == 0
    assert not (checkout / "calls").exists()


@pytest.mark.parametrize("job", [None, "1", "2"])
def test_job_in_the_pod_goes_on_only_with_a_run_that_it_began(
    checkout: Path, job: str | None
) -> None:
    """Another job's run of that name may live, and is left to what `leash launch` says of it."""
    run = checkout / "runs/night"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/latest").write_text("step-4")
    record = '"host": "another"\n"state": "running"\n'
    (run / "run.json").write_text(record)
    if job is not None:
        (run / "job").write_text(f"{job}\n")
    start(checkout, "run", f"launch run.dir={checkout}/runs run.name=night").wait(LIMIT_S)
    verb = (checkout / "calls").read_text().split()[0]
    is_kept = (run / "run.json").read_text() == record
    assert (verb, is_kept) == (("resume", False) if job == "1" else ("launch", True))


@pytest.mark.parametrize(
    ("exit_code", "job", "num_launches"), [("2", "1", 1), ("2", "2", 2), ("7", "1", 2)]
)
def test_job_in_the_pod_ends_at_once_if_its_words_were_refused_before(
    checkout: Path, exit_code: str, job: str, num_launches: int
) -> None:
    (checkout / "runs").mkdir()
    (checkout / "exit-code").write_text(exit_code)
    words = f"launch run.dir={checkout}/runs run.name=night"
    for attempt in ("1", job):
        assert start(checkout, "run", words, attempt).wait(LIMIT_S) == int(exit_code)
    assert (checkout / "calls").read_text().split().count("launch") == num_launches
