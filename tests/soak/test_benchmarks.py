"""The benchmarks' short forms run to their end; what they measure depends on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = {
    "buffer.py": "vs_ray_16k vs_ray_16k_lean vs_raw_set_get p99_growth_1e6 max_script_ms wakeup_ms "
    "idle_commands_per_s memory_ratio",
    "weight_sync.py": "vs_per_tensor vs_per_tensor_one_rank vs_raw_wire trainer_stall_vs_memcpy "
    "decode_while_moving decode_in_publish direct_decode_in_publish pause_vs_bare_load "
    "direct_pause_vs_bare_load max_rescoring_difference pause_resubmit_tiny "
    "standstill_resubmit_tiny pause_retract_tiny pause_in_place_tiny pause_direct_tiny",
    "rollout.py": "vs_sync vs_stream vs_partial short_leash_vs_sync wasted_tokens "
    "engine_utilisation pool_efficiency prefill_ratio_group prefill_ratio_group_without "
    "prefix_speedup_group prefill_ratio_turns prefill_ratio_turns_without prefix_speedup_turns "
    "recovery_s recovery_s_without "
    "stub_requests_per_s stub_in_flight reward_overlap",
}


def run(script: str, *arguments: str, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine wants a core of its own")
@pytest.mark.parametrize("script", FIGURES)
def test_benchmark_ends_with_all_its_figures(script: str, tmp_path: Path) -> None:
    # It does not depend on where it is started.
    ended = run(script, "--short", cwd=tmp_path, timeout_s=540)
    assert ended.returncode == 0, ended.stderr[-4000:]
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result: dict[str, float] = json.loads(last.removeprefix("RESULT "))
    assert set(FIGURES[script].split()) <= set(result)
    assert all(value >= 0 for value in result.values()), result
    assert result.get("max_rescoring_difference", 0) <= 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["weights_nccl.py", "weights_commit.py"])
def test_gpu_benchmark_says_that_there_is_no_gpu(script: str, tmp_path: Path) -> None:
    ended = run(f"gpu/{script}", cwd=tmp_path, timeout_s=120)
    assert ended.returncode == 2 and "needs a CUDA device" in ended.stderr
