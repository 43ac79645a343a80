"""One command trains over three machines, by each launcher of deploy/cluster that can be had here.

`ssh` and Slurm are programs that run their commands on the machines (reached_hosts.py).
`make soak-hosts` runs it; what they do in detail is tested in tests/unit/deploy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.metrics.history import read_metrics
from tests.soak.crash.size import size
from tests.support.hosts import Host, joined_hosts, missing
from tests.support.launches import SMALL, finish, result_of, wait_for_line
from tests.support.reached_hosts import ReachedHosts

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not size("CUT_S", 0), reason="only by `make soak-hosts`"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

LIMIT_S = 600.0
NUM_STEPS = 12
REMAINS = """
import glob, psutil
words = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
ours = [found for found in words if "raylet" in found or "node.sh" in found or "ray::" in found]
print(*(found for found in ours if "psutil" not in found))  # which is this program
print(*glob.glob("/tmp/ray-*"), *glob.glob("/tmp/leash-*"), *glob.glob("/dev/shm/leash-*"))
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with joined_hosts(tmp_path, 3) as all_three:
        yield all_three


@pytest.fixture
def reached(tmp_path: Path, hosts: list[Host]) -> Iterator[ReachedHosts]:
    with contextlib.closing(ReachedHosts(hosts, tmp_path / "bin")) as reached:
        yield reached


def make(reached: ReachedHosts, runs: Path, words: str) -> str:
    """The line of shell, with the settings of the run."""
    given = [*SMALL, f"run.dir={runs}", "run.name=three", f"trainer.num_steps={NUM_STEPS}"]
    return f"export PATH={reached.path}:$PATH\nexec make launch {words} ARGS='{' '.join(given)}'"


def assert_nothing_is_left(hosts: list[Host], runs: Path) -> None:
    for host in hosts:
        assert host.python(REMAINS).split() == [], host.name
    assert not (runs / ".three.nodes").exists()
    logs = {file.name for file in (runs / "three" / "logs").glob("ray-*")}
    assert {f"ray-{host.name}" for host in hosts} <= logs


def test_ssh_trains_over_three_machines_and_leaves_nothing_on_any(
    tmp_path: Path, hosts: list[Host], reached: ReachedHosts
) -> None:
    runs = tmp_path / "runs"
    words = "CLUSTER=ssh HOSTS='10.0.0.6 10.0.0.7'"
    launch = hosts[0].start(make(reached, runs, words))
    output = finish(launch, LIMIT_S)
    assert launch.returncode == 0, output[-6000:]
    assert result_of(output)["state"] == "finished"
    assert_nothing_is_left(hosts, runs)


def test_slurm_job_saves_ahead_of_its_limit_and_goes_on_when_it_is_queued_again(
    tmp_path: Path, hosts: list[Host], reached: ReachedHosts
) -> None:
    runs = tmp_path / "runs"
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": ",".join(host.address for host in hosts),
        "SLURMD_NODENAME": hosts[0].address,
        "SLURM_CPUS_ON_NODE": "2",
    }
    command = make(reached, runs, "CLUSTER=slurm")
    first = hosts[0].start(command, job)
    wait_for_line(first, "step 3/", LIMIT_S)
    hosts[0].check("pkill -TERM -f '^bash deploy/cluster/slurm.sh'")
    finish(first, LIMIT_S)
    assert reached.calls_of_scontrol()[-1] == "requeue 77"
    record = json.loads((runs / "three" / "run.json").read_text())
    assert record["state"] == "stopped" and (runs / "three" / "final_model").is_dir()
    assert_nothing_is_left(hosts, runs)

    second = hosts[0].start(command, {**job, "SLURM_RESTART_COUNT": "1"})
    output = finish(second, LIMIT_S)
    assert second.returncode == 0, output[-6000:]
    steps = [step.count("step") for step in read_metrics(runs / "three" / "metrics.jsonl", "step")]
    assert steps == [*range(1, NUM_STEPS + 1)]
    assert_nothing_is_left(hosts, runs)
