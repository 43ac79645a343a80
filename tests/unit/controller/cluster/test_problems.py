"""Each rule about the machines of a cluster, with planted facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.load import load_config
from controller.cluster.facts import NodeFacts
from controller.cluster.needs import Needs, needs_of
from controller.cluster.problems import Problem, problems
from controller.start.plan import make_plan

GIB = 2**30
VERSIONS: dict[str, str | None] = {
    "Leash": "0.1.0 (aaaa)",
    "Python": "3.11.7",
    "torch": "2.13.0+cu130",
    "sglang": "0.5.20",
    "NCCL": "2.28.9",
    "driver": "580.65.06",
    "Ray": "2.60.0",
}
A = NodeFacts(
    name="host-a",
    address="10.0.0.5",
    interface="eth0",
    towards="10.0.0.5",
    versions=VERSIONS,
    num_cpus=16,
    num_gpus=8,
    memory=512 * GIB,
    most_files=65536,
    locked_memory=None,
    stage_free=100 * GIB,
    stage_dir="/dev/shm",
    tmp_free=100 * GIB,
    run_dir_free=1000 * GIB,
)
B = replace(A, name="host-b", address="10.0.0.6", towards="10.0.0.6")
C = replace(A, name="host-c", address="10.0.0.7", towards="10.0.0.7")
NEEDS = Needs(
    uses_gpu=True,
    num_engines=8,
    engine_gpus=1,
    stage_bytes=28 * GIB,
    host_bytes=205 * GIB,
    version_bytes=14 * GIB,
    checkpoint_bytes=252 * GIB,
    most_files=4096,
    min_bytes_per_s=50e6,
)


def only(*nodes: NodeFacts, needs: Needs = NEEDS) -> Problem:
    (found,) = problems(nodes, needs)
    return found


def test_machines_that_agree_and_have_room_have_no_problem() -> None:
    slower = replace(B, next_node="host-a", bytes_per_s=60e6, clock_s=-0.9)
    head = {**VERSIONS, "torch": "2.13.0+cpu", "NCCL": None, "driver": None}  # has no GPUs
    assert problems([replace(A, versions=head, num_gpus=0, locked_memory=1), slower], NEEDS) == []
    assert problems([A], NEEDS) == []


@pytest.mark.parametrize(
    ("name", "value", "breaks"),
    [
        ("Leash", "0.1.0 (bbbb)", True),
        ("NCCL", "2.27.5", True),
        ("Python", "3.11.9", False),
        ("torch", "2.12.1", False),
        ("sglang", "0.5.19", False),
        ("driver", "595.1", False),
        ("Ray", "2.59.0", False),
    ],
)
def test_other_version_is_named_with_its_machines(name: str, value: str, breaks: bool) -> None:
    other = {**VERSIONS, name: value}
    found = only(A, replace(B, versions=other), replace(C, versions=other))
    has = str(VERSIONS[name]).partition("+")[0]
    assert found.line.startswith(f"host-b, host-c: {name} {value}, and host-a has {has}; ")
    assert found.breaks is breaks


def test_nccl_of_a_run_without_gpus_breaks_nothing() -> None:
    other = replace(B, versions={**VERSIONS, "NCCL": "2.27.5"})
    assert not only(A, other, needs=replace(NEEDS, uses_gpu=False, engine_gpus=0)).breaks


def test_nccl_of_a_machine_without_gpus_is_compared_with_nothing() -> None:
    head = replace(A, versions={**VERSIONS, "NCCL": "2.27.5"}, num_gpus=0)
    assert problems([head, B, C], NEEDS) == []


def test_sources_are_compared_by_their_digest_alone() -> None:
    renumbered = replace(B, versions={**VERSIONS, "Leash": "0.1.1.dev3 (aaaa)"})
    assert problems([A, renumbered], NEEDS) == []


def test_driver_that_could_not_be_tried_is_a_warning() -> None:
    found = only(A, replace(B, gpu_warning="its NVIDIA driver is 550.1; update the driver"))
    assert found.line.startswith("host-b: its NVIDIA driver") and not found.breaks


def test_machines_of_one_name_are_told_apart() -> None:
    twin = replace(B, name=A.name, stage_free=GIB)
    assert not only(A, twin).breaks, "the other one has room"


def test_sglang_that_is_missing_breaks_a_launch() -> None:
    assert only(replace(A, versions={**VERSIONS, "sglang": None})).breaks


def test_small_shared_memory_breaks_a_launch_where_no_engine_has_another_place() -> None:
    small = replace(B, stage_free=GIB)
    found = only(A, small)
    assert "host-b: /dev/shm has 1 GiB free, and a machine with an engine needs 28" in found.line
    assert "--shm-size" in found.what and not found.breaks
    both = problems([replace(A, stage_free=GIB), small], NEEDS)
    assert [(one.node, one.breaks) for one in both] == [("host-a", True), ("host-b", True)]
    assert only(replace(A, stage_free=GIB)).breaks
    assert problems([A, replace(small, num_gpus=0)], NEEDS) == [], "no engine can be there"


def test_gpus_that_cannot_be_used_break_a_launch_where_the_others_are_too_few() -> None:
    broken = replace(B, gpu_problem="its NVIDIA driver is 550.1; update the driver")
    assert not only(A, broken).breaks
    found = only(A, broken, needs=replace(NEEDS, num_engines=9))
    assert (found.line, found.breaks) == (
        "host-b: its NVIDIA driver is 550.1; update the driver",
        True,
    )
    on_cpu = replace(NEEDS, uses_gpu=False, engine_gpus=0)
    assert problems([A, broken], on_cpu) == []


def test_memory_of_all_machines_must_be_that_of_the_run() -> None:
    small = [replace(node, memory=90 * GIB) for node in (A, B)]
    found = only(*small)
    assert "host-a, host-b: 180 GiB of memory, and the run needs about 205" in found.line
    assert found.breaks
    assert problems([replace(node, memory=100 * GIB) for node in (A, B)], NEEDS) == []


def test_clock_is_wrong_only_beyond_the_error_of_its_reading() -> None:
    found = only(A, replace(B, clock_s=-75.0, clock_error_s=0.5))
    assert "host-b: its clock is 1m 15s behind" in found.line and not found.breaks
    assert "2.0 s ahead" in only(A, replace(B, clock_s=2.0, clock_error_s=0.5)).what
    assert problems([A, replace(B, clock_s=2.0, clock_error_s=1.5)], NEEDS) == []


@pytest.mark.parametrize(
    ("address", "says", "breaks"),
    [
        ("127.0.1.1", "Ray knows it as 127.0.1.1 (lo), which no other machine reaches", True),
        ("169.254.7.1", "Ray knows it as 169.254.7.1 (lo), a link-local address", False),
        ("fe80::1%lo", "Ray knows it as fe80::1%lo (lo), a link-local address", False),
        ("192.168.0.6", "from 10.0.0.6, and Ray knows it as 192.168.0.6 (lo)", False),
    ],
)
def test_address_that_others_may_not_reach_is_named(address: str, says: str, breaks: bool) -> None:
    found = only(A, replace(B, address=address, interface="lo"))
    assert says in found.what and "--node-ip-address" in found.what
    assert (found.node, found.breaks) == ("host-b", breaks)
    assert problems([replace(A, address=address)], NEEDS) == [], "alone it needs no address"


def test_closed_ports_and_a_slow_network_are_named() -> None:
    found = only(A, replace(B, unreached=("host-a",)))
    assert "host-b: it cannot connect to free ports of host-a; open all ports" in found.line
    assert found.breaks
    slow = only(A, replace(B, next_node="host-a", bytes_per_s=14 * 2**20))
    assert "host-b: 14 MiB/s to host-a, 17m 04s a version; below weight_sync.min" in slow.line
    assert not slow.breaks


def test_run_dir_must_be_shared_by_machines_that_get_processes() -> None:
    own = replace(B, sees_run_dir=False)
    found = only(A, own)
    assert "host-b: run.dir is not the folder of that path on host-a" in found.line
    assert found.breaks
    assert problems([A, replace(own, num_gpus=0)], NEEDS) == []
    on_cpu = replace(NEEDS, uses_gpu=False, engine_gpus=0)
    assert only(A, replace(own, num_gpus=0), needs=on_cpu).breaks


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"most_files": 1024}, "may open 1024 files, and one with all requests at once takes 4096"),
        ({"locked_memory": 8 * 2**20}, "8 MiB may be locked"),
        ({"run_dir_free": GIB}, "1 GiB free in run.dir, and 3 checkpoints take 252 GiB"),
        ({"tmp_free": 2**20}, "1 MiB free in /tmp"),
    ],
)
def test_low_limit_or_full_disk_is_a_warning(changed: dict[str, int], says: str) -> None:
    found = only(A, replace(B, **changed))  # type: ignore[arg-type]
    assert found.node == "host-b" and says in found.what and not found.breaks


def test_problems_that_break_a_launch_come_first() -> None:
    found = problems([A, replace(B, tmp_free=1, sees_run_dir=False)], NEEDS)
    assert [problem.breaks for problem in found] == [True, False]


def test_needs_are_those_of_the_settings() -> None:
    config = load_config([], "qwen2.5-7b-gsm8k")
    needs = needs_of(config, make_plan(config, 16, 64, 80 * GIB), num_nodes=2)
    assert (needs.uses_gpu, needs.num_engines, needs.engine_gpus) == (True, 8, 1)
    assert needs.stage_bytes == pytest.approx(0.9 * 2 * 14e9, rel=0.01)
    assert needs.checkpoint_bytes == pytest.approx(3 * 12 * 7e9, rel=0.01)
    assert needs.host_bytes == pytest.approx(205e9, rel=0.1)
