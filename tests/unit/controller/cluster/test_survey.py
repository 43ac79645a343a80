"""The survey of machines that are slow, or leave meanwhile. A stand-in for Ray answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from configs.load import load_config
from controller.cluster import survey as module
from controller.cluster.facts import Asked, node_facts
from controller.cluster.survey import RayNode, Survey, survey

LATE = object()
FACTS = node_facts(Asked(run_dir="/tmp", stage_dir=None), "127.0.0.1", 4, 0)


def node(number: int) -> RayNode:
    return RayNode(
        id=f"{number + 1:056x}",  # as Ray demands
        name=f"host-{number}",
        address=f"10.0.0.{number}",
        num_cpus=4,
        num_gpus=0,
        kind=None,
    )


def surveyed(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    answers: Sequence[dict[str, Any]],
    living: Sequence[int],
) -> Survey:
    """`answers`: of each machine by method, over those of a sound one; `living`: at the end."""
    nodes = [node(number) for number in range(len(answers))]
    listed = iter([nodes, [nodes[number] for number in living]])
    probes = iter(answers)

    def probe() -> object:
        sound = {"look": FACTS, "clock": 0.0, "open_port": 1, "unreached": [], "send": 1e9}
        told = {**sound, **next(probes)}
        methods = {
            name: SimpleNamespace(remote=lambda *args, one=[value]: Ref(one[0]))
            for name, value in told.items()
        }
        return SimpleNamespace(**methods)

    class Ref:
        def __init__(self, value: object) -> None:
            self.value = value

    def get(ref: Ref, timeout: float = 0) -> object:
        if isinstance(ref.value, RayError):
            raise ref.value
        return ref.value

    def wait(refs: Sequence[Ref], **limits: float) -> tuple[list[Ref], list[Ref]]:
        return [], [ref for ref in refs if ref.value is LATE]

    created = SimpleNamespace(remote=probe)
    remote = SimpleNamespace(options=lambda **options: created)
    stand_in = SimpleNamespace(
        remote=lambda kind: remote, get=get, wait=wait, kill=lambda actor: None
    )
    monkeypatch.setattr(module, "ray", stand_in)
    monkeypatch.setattr(module, "ray_nodes", lambda: next(listed))
    return survey(load_config([]), folder, start_s=0.01)


def test_machine_without_an_answer_in_time_is_a_warning_and_one_that_fails_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [{}, {"look": LATE}, {"look": RayError("no module named leash")}]
    seen = surveyed(monkeypatch, tmp_path, answers, living=[0, 1, 2])
    late, failed = seen.silent
    assert "host-1: no process that Ray starts there has answered within 0.01 s" in late.line
    assert not late.breaks
    assert "host-2: it could not be looked at (no module named leash)" in failed.line
    assert failed.breaks


def test_machine_that_has_left_is_no_problem_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = RayError("the actor died")
    answers = [{"unreached": [1]}, {"unreached": gone}, {"look": gone}]
    seen = surveyed(monkeypatch, tmp_path, answers, living=[0])
    assert [one.unreached for one in seen.nodes] == [()] and seen.silent == []


def test_ports_that_could_not_be_tested_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [{"unreached": [1]}, {"unreached": RayError("out of memory")}]
    seen = surveyed(monkeypatch, tmp_path, answers, living=[0, 1])
    assert [one.unreached for one in seen.nodes] == [(FACTS.name,), ()]
    (found,) = seen.silent
    assert "its ports were not tested (out of memory)" in found.line and not found.breaks
