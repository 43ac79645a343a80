"""The benchmarks of the checkpoint engine run to their end; their figures depend on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = {
    "vs_per_tensor",
    "vs_raw_wire",
    "trainer_stall_vs_memcpy",
    "decode_while_moving",
    "pause_vs_bare_load",
    "max_rescoring_difference",
}
_RUN_S = 900


@pytest.mark.timeout(_RUN_S + 60)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the engine wants a core of its own")
def test_weights_benchmark_ends_with_all_its_figures(benchmark_result) -> None:
    result = benchmark_result("weight_sync.py", _RUN_S)
    assert set(result) >= FIGURES
    assert result["max_rescoring_difference"] <= 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["weights_nccl.py", "weights_commit.py"])
def test_gpu_benchmark_says_that_there_is_no_gpu(script: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu" / script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2 and "needs a CUDA device" in run.stderr
