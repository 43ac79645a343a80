"""Scripts for a GPU start, and say what they lack, where there is little more than torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.all import SCRIPTS, run
from benchmarks.gpu.device import take_older_torch
from benchmarks.weights import model
from tests.support.repository import ROOT
from trainer_pool.model import attention

PACKING = (
    "packed_vs_padded packed_vs_sorted padding problems_packed_vs_padded problems_packed_vs_sorted "
    "problems_shared_vs_packed shared_vs_packed gradient_difference"
)
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        if name.partition(".")[0] not in ("ray", "deepspeed", "sglang"):
            return self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_older_torch_gets_the_keys_of_each_head_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert take_older_torch() is None  # the one that is locked

    def attend(query: Tensor, key: Tensor, value: Tensor, border: int, *, scale: float) -> Tensor:
        assert (border, scale) == (7, 0.5)
        return torch.cat([key, value], dim=1)

    monkeypatch.setattr(attention, "varlen_attn", attend)
    assert str(torch.__version__) in str(take_older_torch())
    query, key = torch.zeros(3, 4, 2), torch.arange(12.0).view(3, 2, 2)
    varlen_attn: Any = attention.varlen_attn
    got = varlen_attn(query, key, -key, 7, scale=0.5, enable_gqa=True)
    assert torch.equal(got, torch.cat([key[:, [0, 0, 1, 1]], -key[:, [0, 0, 1, 1]]], dim=1))


def test_path_of_packages_that_the_user_has_set_reaches_the_processes_of_a_benchmark() -> None:
    program = "import os, benchmarks; print(os.environ['PYTHONPATH'])"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": "/some/packages"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == f"{ROOT}:/some/packages"


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print('a table'); print('RESULT {\"mfu\": 0.3}')", {"mfu": 0.3}),
        ("import sys; sys.exit('needs a CUDA device')", "exit code 1: needs a CUDA device"),
        ("print('no result')", "exit code 0: no result"),
        ("raise SystemExit(2)", "exit code 2: "),
    ],
)
def test_outcome_of_a_script_is_its_figures_or_why_there_are_none(
    program: str, outcome: object
) -> None:
    assert run([sys.executable, "-c", program], limit_s=60.0) == outcome


def test_script_that_hangs_is_given_up_at_its_limit() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run(command, limit_s=0.5) == "was not done within --limit-s=0.5"


def test_script_that_is_given_up_removes_what_it_has_in_memory(tmp_path: Path) -> None:
    program = """
import sys, tempfile, time
with tempfile.TemporaryDirectory(dir=sys.argv[1]):
    open(sys.argv[1] + "/begun", "w").close()
    time.sleep(600)
"""
    limit_s = 1.0
    while not (tmp_path / "begun").exists():  # it may have had no time to begin
        run([sys.executable, "-c", program, str(tmp_path)], limit_s=limit_s)
        limit_s *= 2
    assert [*tmp_path.iterdir()] == [tmp_path / "begun"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
@pytest.mark.long
def test_all_scripts_end_with_one_result_where_there_is_no_gpu_ray_deepspeed_and_sglang(
    tmp_path: Path,
) -> None:
    """Each asks for a GPU before it needs a package."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.all"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    *shown, last = ended.stdout.splitlines()
    assert not any(line.startswith("RESULT") for line in shown)
    result = json.loads(last.removeprefix("RESULT "))
    assert ended.returncode == 2 and set(PACKING.split()) <= result["packing"].keys()
    assert min(result["packing"].values()) >= 0
    assert result["packing"]["gradient_difference"] <= 1e-5
    assert result["not_run"].keys() == SCRIPTS.keys() - {"packing"}
    assert all("needs a CUDA device" in why for why in result["not_run"].values())


def test_folder_in_memory_of_a_killed_benchmark_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SHARED_MEMORY", tmp_path)
    (tmp_path / "leash-benchmark-killed" / "weights").mkdir(parents=True)
    with model.folder_in_memory() as lives, model.folder_in_memory() as other:
        assert {*tmp_path.iterdir()} == {lives, other}
    assert not any(tmp_path.iterdir())
