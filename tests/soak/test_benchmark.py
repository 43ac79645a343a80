"""The benchmark runs to its end and reports every figure; their values depend on the machine."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

FIGURES = {
    "vs_ray_16k",
    "vs_raw_set_get",
    "p99_growth_1e6",
    "max_script_ms",
    "wakeup_ms",
    "idle_commands_per_s",
    "memory_ratio",
}


def test_buffer_benchmark_ends_with_all_its_figures(benchmark_result) -> None:
    result = benchmark_result("buffer.py", 300)
    assert set(result) >= FIGURES
