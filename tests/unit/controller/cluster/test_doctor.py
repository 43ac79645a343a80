"""`leash doctor` and `leash dry-run` from their command lines, on one machine."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from configs.load import load_config
from controller.cluster.dry_run import check_gpu_memory, packed, step_sentence
from controller.cluster.facts import Asked, NodeFacts, node_facts
from controller.commands.simulate import Question
from controller.main import _parser, main
from controller.start.plan import make_plan

GIB = 2**30
SEVEN_B = ("model=pretrained", "model.path=Qwen/Qwen2.5-7B-Instruct")


def roomy_facts(asked: Asked, address: str, *counts: float) -> NodeFacts:
    """Facts on this machine, with room and limits that suit every run."""
    room = {"memory": 2**50, "stage_free": 2**50, "tmp_free": 2**50, "run_dir_free": 2**50}
    found = replace(node_facts(asked, address, 8, 0), **room)
    return replace(found, most_files=2**20, locked_memory=None)


def test_doctor_prints_what_it_found_as_tables_and_as_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.cluster.doctor.node_facts", roomy_facts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", f"run.dir={tmp_path / 'runs'}"]) == 0
    printed = capsys.readouterr().out
    assert socket.gethostname() in printed and "Nothing is wrong" in printed
    assert not (tmp_path / "runs").exists()
    assert main(["doctor", "--json", f"run.dir={tmp_path / 'runs'}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"][0]["versions"]["Ray"] and found["problems"] == []


def test_doctor_fails_with_the_refusals_of_a_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = [f"run.prometheus_port={port}", f"run.dir={tmp_path}"]
        large = ["rollout.engine.tp_size=4096", "rollout.engine.max_running_requests=1000000"]
        assert main(["doctor", *settings, *large]) == 1
    printed, error = capsys.readouterr()
    name = socket.gethostname()
    assert f"breaks a launch: {name}: run.prometheus_port={port}: cannot listen" in printed
    assert f"breaks a launch: {name}: /dev/shm has " in printed
    assert re.search(r"a launch would fail, for \d of these reasons", error)


def test_cluster_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:  # it has the port, and does not listen
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert main(["doctor", f"cluster.ray_address={address}"]) == 1
        error = capsys.readouterr().err
        assert f"no Ray cluster answers at cluster.ray_address='{address}'" in error
        assert main(["dry-run", f"cluster.ray_address={address}"]) == 0
    assert "Planned without the cluster: no Ray cluster" in capsys.readouterr().out


def test_dry_run_says_memory_of_the_host_and_an_estimate_of_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["cluster.num_gpus=16", "trainer.num_ranks=8", "rollout.num_engines=8"]
    sizes = ["model.scratch.hidden_size=512", "rollout.max_response_tokens=64"]
    assert main(["dry-run", "--gpu", "H100", *settings, *sizes]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Host memory, all on one machine: about " in printed
    assert "Seconds of a step: about " in printed and "simulated and not measured" in printed
    assert "answers of 16,64 tokens (median, 99th percentile; LENGTHS= says others)" in printed
    assert main(["dry-run", *settings]) == 0
    assert "Seconds of a step: estimated where the GPUs are known" in capsys.readouterr().out
    assert main(["dry-run", "--gpu", "TPU"]) == 2
    assert "GPU='TPU': must be one of A100" in capsys.readouterr().err


def test_step_that_is_not_simulated_is_said_with_its_reason() -> None:
    config = load_config(["trainer.num_ranks=1", "rollout.tail=postpone"])
    plan = make_plan(config, 2, 8)
    assert "no estimate (rollout.tail=postpone: is not simulated" in step_sentence(
        plan, "H100", None
    )
    shared = make_plan(load_config([]), 1, 8)
    assert "a rank and an engine share a GPU" in step_sentence(shared, "H100", None)


def test_model_that_cannot_fit_into_known_gpus_is_refused() -> None:
    def plan_of(*settings: str) -> None:
        check_gpu_memory(make_plan(load_config([*SEVEN_B, *settings]), 16, 64), "L40S")

    with pytest.raises(ValueError, match=r"trainer\.num_ranks=1: a rank needs .* an L40S has 44"):
        plan_of("trainer.num_ranks=1")
    plan_of("trainer.num_ranks=8", "rollout.num_engines=8")
    large = ("model.path=Qwen/Qwen2.5-32B-Instruct", "trainer.num_ranks=15")
    with pytest.raises(ValueError, match=r"tp_size=1: each GPU of an engine needs .*; raise it"):
        plan_of(*large, "trainer.offload_optimizer=true", "rollout.num_engines=1")


def test_processes_are_packed_as_ray_would() -> None:
    settings = ["trainer.num_ranks=8", "rollout.num_engines=8", "rollout.num_workers=2"]
    plan = make_plan(load_config([*SEVEN_B, *settings]), 16, 64)
    assert packed(plan, [(4, 0), *[(64, 8)] * 2]) == [
        Counter(),
        Counter(rank=8, worker=2),
        Counter(engine=8),
    ]
    assert packed(plan, [(64, 15)]) is None
    wide = make_plan(load_config([*SEVEN_B, *settings[:1], "rollout.engine.tp_size=2"]), 16, 64)
    assert packed(wide, [(16, 1)] * 10) is None, "an engine is on one machine"


def test_questions_of_dry_run_have_the_defaults_of_simulate() -> None:
    usual = vars(_parser().parse_args(["simulate"]))
    assert {name: usual[name] for name in asdict(Question())} == asdict(Question())
