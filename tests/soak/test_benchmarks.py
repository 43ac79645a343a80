"""The benchmarks' short forms run to their end; what they measure depends on the machine.

tests/unit/test_gpu_benchmarks.py has those of `benchmarks.gpu`, and `benchmarks.training.packing`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.gpu import head
from benchmarks.report import Report
from benchmarks.rollouts.gpu_engine import ROOFLINES, Roofline
from tests.support.hosts import missing

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
RULES = (
    "ours", "in_place", "colocated", "sync", "one_off", "partial", "quota", "counter", "window",
    "requeue", "repack",
)  # fmt: skip
WORKS = (
    "balanced", "generation_bound", "training_bound", "long_tailed", "multi_turn", "reward_heavy",
)  # fmt: skip
FIGURES = {
    "training.checkpoint": "stall_vs_copy deepspeed_vs_copy step_beside_vs_step durable_s "
    "memory_copy_vs_copy",
    "loops.end_to_end": "quickstart_leash_seconds quickstart_leash_step_s "
    "quickstart_leash_tokens_per_s quickstart_leash_cpu_s quickstart_leash_reward "
    "quickstart_leash_accuracy",
    "training.head": "memory_ratio_32k memory_ratio_131k time_ratio_h1024 time_ratio_h256 "
    "memory_ratio_131k_with_entropy time_ratio_h256_with_entropy",
    "training.long_rows": "gradient_tiled_2_ranks gb_tiled_2_ranks counted_gb_tiled_2_ranks",
    "training.models": "llama_rope_llama3 largest",
    "training.routing": "staleness_0 own_0 replayed_0 own_0_bfloat16 replayed_0_bfloat16 own_1 "
    "own_2 replayed_1 replayed_2 own_4 replayed_4 own_8 replayed_8 bytes compressed_bytes",
    "loops.staleness": "decoupled_PPO_TIS_0 decoupled_PPO_TIS_4",
    "buffer": "vs_ray_16k vs_ray_16k_lean vs_raw_set_get p99_growth_1e6 max_script_ms wakeup_ms "
    "idle_commands_per_s memory_ratio",
    "weight_sync": "vs_per_tensor vs_per_tensor_one_rank vs_raw_wire cpu_vs_raw_wire "
    "trainer_stall_vs_memcpy decode_while_moving decode_in_publish direct_decode_in_publish "
    "pause_vs_bare_load "
    "standstill_vs_bare_load direct_pause_vs_bare_load max_rescoring_difference "
    "pause_resubmit_tiny standstill_resubmit_tiny pause_retract_tiny pause_in_place_tiny "
    "pause_direct_tiny",
    "weight_sync --only chains": "chains_1_s chains_2_s chains_ratio",
    "rollout": "vs_sync vs_stream vs_partial short_leash_vs_sync wasted_tokens "
    "engine_utilisation pool_efficiency prefill_ratio_group prefill_ratio_group_without "
    "prefix_speedup_group prefill_ratio_turns prefill_ratio_turns_without prefix_speedup_turns "
    "recovery_s recovery_s_without "
    "stub_requests_per_s stub_in_flight cost_worker_ms cost_scheduler_ms stub_core_samples_per_s "
    "fleet_worker_us_2 fleet_redis_us_4 fleet_core_samples_per_s_4 fleet_growth_4 fleet_idle_4 "
    "fleet_join_ms_4 fleet_version_ms_4 fleet_bare_us_4 fleet_stub_us_4 "
    "reward_overlap gpu_vs_sync gpu_vs_stream gpu_vs_partial "
    "gpu_wasted_tokens gpu_early_length_ours_5 gpu_early_length_postpone_5 "
    "gpu_early_length_interrupt_and_resume_5 gpu_simulated_sync_5 gpu_simulated_ours_5 "
    "gpu_of_bound_one_off_train_0.5 gpu_of_bound_counter_train_0.5 gpu_of_bound_ours_train_0.5 "
    "scale_simulated_ours scale_of_bound scale_of_bound_in_place scale_length_ours scale_vs_sync "
    "scale_vs_partial scale_vs_counter",
    "rollout --only works": " ".join(
        f"works_of_bound_{rule}_{work} works_age_{rule}_{work} works_wasted_{rule}_{work}"
        for rule in RULES
        for work in WORKS
    ),
    "rollout --only rules": " ".join(
        f"rules_of_the_bound_{rule}_{work} rules_oldest_{rule}_{work} rules_in_place_{work}"
        for rule in RULES
        for work in WORKS
    ),
}


def run(script: str, *arguments: str, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # the folder of runs and files is another
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine wants a core of its own")
@pytest.mark.parametrize("script", FIGURES)
def test_benchmark_ends_with_all_its_figures(script: str, tmp_path: Path) -> None:
    if "chains" in script and (why := missing()) is not None:
        pytest.skip(why)
    ended = run(*script.split(), "--short", cwd=tmp_path, timeout_s=540)
    # The first error says why; what its end tears down follows.
    assert ended.returncode == 0, f"{ended.stderr[:3000]}\n...\n{ended.stderr[-1000:]}"
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result: dict[str, float] = json.loads(last.removeprefix("RESULT "))
    assert set(FIGURES[script].split()) <= set(result)
    assert all(value >= 0 for value in result.values()), result
    assert result.get("max_rescoring_difference", 0) <= 1e-3
    assert result.get("llama_rope_llama3", 0) <= 1e-4
    assert result.get("staleness_0", 0) <= 1e-5


def test_errors_of_output_heads_are_those_of_bfloat16() -> None:
    """The GPU's script on a CPU, also with a head that turns the entropy around."""

    def wrong(hidden: Tensor, weight: Tensor, targets: Tensor, entropy_weight: float) -> Tensor:
        return head.full(hidden, weight, targets, -entropy_weight)

    problem, report = head.Problem.random(64, 512, 32, "cpu"), Report("")
    head.report_errors(report, "full", head.full, problem)
    head.report_errors(report, "tiled", head.tiled, problem)
    head.report_errors(report, "wrong", wrong, problem)
    head.report_errors(report, "liger", head.full, problem, has_entropy=False)
    result = report.result
    for part in ("loss", "hidden", "weight"):
        for suffix in ("", "_with_entropy"):
            assert result[f"error_{part}_tiled{suffix}"] < 5e-3
            assert result[f"error_{part}_full{suffix}"] < 2e-2
        assert result[f"error_{part}_wrong"] < 2e-2
        assert result[f"error_{part}_wrong_with_entropy"] > 0.1
        assert f"error_{part}_liger" in result
        assert f"error_{part}_liger_with_entropy" not in result
    assert result["error_hidden_tiled"] > 0 and result["error_hidden_full"] > 0


def test_emulated_gpu_is_as_fast_as_published_figures() -> None:
    gpu, alone = Roofline(), Roofline().step_s(1, 500)
    weights_s = 2 * gpu.parameters / 3.35e12
    assert 0.65 <= weights_s / alone <= 0.8  # 77% of the bandwidth at one request (A100, bf16)
    assert 256 / gpu.step_s(256, 256 * 500) == pytest.approx(16_215, rel=0.15)  # ShareGPT, SGLang
    # LLaMA 7B in FP8 with 32 heads for keys and values: 64 requests of 128 and 2048 tokens
    llama_7b = Roofline(parameters=6.74e9 / 2, kv_bytes=2 * 32 * 32 * 128)
    assert 64 / llama_7b.step_s(64, 64 * (128 + 1024)) == pytest.approx(5367, rel=0.15)


def test_token_and_request_that_stand_for_many_take_the_time_of_all() -> None:
    many = ROOFLINES["1.5b"]
    one = dataclasses.replace(many, tokens=1, requests=1)
    tokens, requests = many.tokens, many.requests
    steps_s = tokens * one.step_s(8 * requests, 300 * tokens * requests)
    assert many.step_s(8, 300) == pytest.approx(steps_s)
    assert many.prefill_s(300) == pytest.approx(one.prefill_s(300 * tokens * requests))


@pytest.mark.parametrize("script", ["algorithms.parity", "loops.end_to_end"])
def test_comparison_with_others_says_what_it_needs(script: str, tmp_path: Path) -> None:
    """The other systems are not installed here; all of its own is loaded."""
    ended = run(script, "--rivals", str(tmp_path), cwd=tmp_path, timeout_s=120)
    assert ended.returncode == 2
    assert re.search("not installed there; `make bench-(parity|e2e)` does it", ended.stderr)
