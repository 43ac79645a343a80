"""A launch over two machines, set up word for word as docs/cluster.md says; its engine dies."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.metrics.history import read_metrics
from tests.support.hosts import PAGE, Host, hold_room, joined_hosts, missing, start_ray
from tests.support.launches import finish, launch_command, wait_for_line
from tests.support.repository import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

RUN = "two"
LIMIT_S = 900.0
CUT_S = 8.0
"""`make soak-hosts` cuts for a minute."""

LISTENERS = """
import json, psutil
found = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
who = {p.pid: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
print(json.dumps([(c.laddr.ip, c.laddr.port, who[c.pid]) for c in found if c.pid in who]))
"""
REMAINS = """
import contextlib, glob, psutil, time

def processes():
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "LEASH_RUN" in process.environ() and process.pid != psutil.Process().pid:
                yield str(process)

deadline = time.monotonic() + 60  # Ray ends the workers of a job that is over in its own time
while (left := [*processes()]) and time.monotonic() < deadline:
    time.sleep(0.5)
print(*left, *glob.glob("/dev/shm/leash-*"), *glob.glob("/tmp/leash-*"))
"""
ROWS = {
    "gcs_server": "Ray's head (GCS)",
    "ray/dashboard/dashboard.py": "Ray's dashboard",
    "valkey-server|redis-server": "Redis",
    r"sglang|receiver\.app": "engines (HTTP), receivers of weights (HTTP)",
    "ray::TrainerActor": "process groups: gloo, NCCL",
    r"raylet|ray(::|-dashboard|/|\.util)|controller\.main": "Ray's node managers",
}
"""Words of the command line of whoever listens, and how its row in the page's table begins."""
OF_RAY = r"gcs_server|raylet|ray::\w+Agent|ray/"
RAY_WORKER_PORTS = range(10002, 20000)


def listeners(host: Host) -> list[tuple[str, int, str]]:
    return [(ip, port, who) for ip, port, who in json.loads(host.python(LISTENERS))]


def strangers(host: Host, found: list[tuple[str, int, str]]) -> list[str]:
    """Lists sockets that listen beyond loopback and are not on the page."""
    return [
        f"{host.name} {ip}:{port} {who[:200]}"
        for ip, port, who in found
        if not is_in_the_table(host, ip.removeprefix("::ffff:"), port, who)
    ]


def is_in_the_table(host: Host, ip: str, port: int, who: str) -> bool:
    if ip.startswith("127.") or ip == "::1":
        return True
    row = next((row for words, row in ROWS.items() if re.search(words, who)), None)
    if row is None or f"\n| {row}" not in PAGE:
        return False
    # Ray's processes listen on every interface, and so does Ray's own part of ours.
    is_of_ray = re.search(OF_RAY, who) is not None or port in RAY_WORKER_PORTS
    return ip == host.address or (ip in ("0.0.0.0", "::") and is_of_ray)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with joined_hosts(tmp_path, 2) as (first, second):
        yield first, second


def leave_something(host: Host, run: Path, name: str) -> None:
    """As a process there does that is killed before it can clear up."""
    listed = run / "leftovers" / host.name / name
    host.check(f"mkdir -p /dev/shm/leash-{name} {listed.parent}")
    host.check(f"echo /dev/shm/leash-{name} > {listed}")


def check_doctor(first: Host, second: Host, shared: Path) -> None:
    """It finds nothing that breaks a launch, and then a stale checkout and a small /dev/shm."""
    doctor = f".venv/bin/leash doctor cluster.ray_address=auto run.dir={shared / 'runs'}"
    told = first.check(doctor)
    assert "breaks a launch" not in told and "not shared" not in told, told
    module = ROOT / "buffer" / "errors.py"
    (shared / "stale.py").write_text(f"{module.read_text()}# changed\n")
    second.check(f"mount --bind {shared / 'stale.py'} {module}")
    second.check("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    told = first.check(f"{doctor} 2>&1 || echo refused")
    assert re.search(r"breaks a launch: host-b: Leash \S+ \(\w+\), and host-a has", told), told
    assert "warning: host-b: /dev/shm has 1 MiB free" in told and told.endswith("refused\n"), told
    second.check(f"umount -l {module} /dev/shm")  # a process of Ray may hold a file


def step_sizes(run: Path) -> list[float]:
    """The number of groups of each step so far."""
    return [step.number("num_groups") for step in read_metrics(run / "metrics.jsonl", "step")]


def test_launch_over_two_hosts_set_up_by_the_page_ends_with_the_log_of_a_dead_engine(
    tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    first, second = hosts
    start_ray(hosts, (1, 4))
    check_doctor(first, second, tmp_path)
    holder = hold_room(second, 3)  # one rank on each machine
    wait_for_line(holder, "held", LIMIT_S)
    runs = tmp_path / "runs"
    settings = (
        "cluster.ray_address=auto",
        "run.prometheus_port=0",
        "trainer.num_steps=1000",
        "rollout.engine.max_restarts=0",
        # A batch that is never full: each step takes what is ready.
        "trainer.groups_per_step=512",
        "trainer.min_groups_per_step=2",
        "trainer.batch_timeout_s=0.1",
        "buffer.selector=shortest",
        "buffer.on_stale=mask_tokens",
        "weight_sync=in_place",
        "rollout.tail=interrupt_and_resume",
        "rollout.keep_partial=false",
        "rollout.max_groups_in_flight=32",
    )
    launch = first.start(" ".join(launch_command(runs, RUN, *settings)))
    wait_for_line(launch, "step 2/", LIMIT_S)
    holder.communicate(timeout=LIMIT_S)
    assert holder.returncode == 0
    found = {host: listeners(host) for host in hosts}
    leave_something(second, runs / RUN, "engine-7")
    wait_for_line(launch, "step 4/", LIMIT_S)
    assert read_metrics(runs / RUN / "metrics.jsonl", "commit")[-1].number("version") >= 2
    first.cut(second)  # in the middle of collectives, requests and weights
    time.sleep(CUT_S)
    first.heal(second)
    wait_for_line(launch, f"step {len(step_sizes(runs / RUN)) + 3}/", LIMIT_S)
    sizes = step_sizes(runs / RUN)
    assert all(1 <= size < 512 for size in sizes) and min(sizes) < 24
    tune = f".venv/bin/python -m controller.main tune --dir {runs}"
    assert "_step 2 -> 24" in first.check(f"{tune} trainer.min_groups_per_step=24")
    # One step may have asked for its batch before, and the file lags behind by a moment.
    last = len(step_sizes(runs / RUN)) + 3
    wait_for_line(launch, f"step {last + 3}/", LIMIT_S)
    assert min(step_sizes(runs / RUN)[last:]) >= 24
    for host in hosts:  # one of them has the engine; each sees its own processes alone
        host.check("pkill -KILL -f '[r]ollout_pool.engines.sglang.server' || true")
    output = finish(launch, LIMIT_S)
    assert launch.returncode == 1, output[-6000:]
    assert "engine-0" in output.split("last lines of")[-1]
    result = json.loads((runs / RUN / "result.json").read_text())
    assert result["state"] == "failed"
    assert result["rollout"]["samples_interrupted"] > 0
    for host in hosts:
        assert any("ray::TrainerActor" in who for _, _, who in found[host]), host.name
        assert host.python(REMAINS).strip() == "", host.name
    assert not (runs / RUN / "leftovers").exists()

    leave_something(second, runs / RUN, "engine-8")
    told = first.check(f".venv/bin/python -m controller.main stop --dir {runs}")
    assert "host-b may still hold files of the run" in told
    told = second.check(f".venv/bin/python -m controller.main stop --dir {runs}")
    assert f"nothing of {RUN} is left on this host; its controller is on host-a" in told
    assert second.python(REMAINS).strip() == ""
    assert not (runs / RUN / "leftovers").exists()
    assert strangers(first, found[first]) + strangers(second, found[second]) == []
