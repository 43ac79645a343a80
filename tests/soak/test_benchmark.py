"""The benchmark runs to its end and tells every figure; which ones depends on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "buffer.py"
FIGURES = {
    "vs_ray_1k",
    "vs_ray_16k",
    "vs_raw_set_get",
    "p99_growth_1e6",
    "max_script_ms",
    "wakeup_ms",
    "idle_commands_per_s",
    "memory_ratio",
}


def test_the_benchmark_of_the_buffer_ends_with_all_its_figures(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--short"],
        cwd=tmp_path,  # it does not depend on where it is started
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    last = run.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert set(result) >= FIGURES
    assert all(value >= 0 for value in result.values()), result
