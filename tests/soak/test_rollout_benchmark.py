"""The benchmark of the rollout pool runs to its end; its figures depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rollout.py"
FIGURES = {
    "vs_sync",
    "vs_stream",
    "vs_partial",
    "wasted_tokens",
    "engine_utilisation",
    "pool_efficiency",
    "stub_requests_per_s",
    "stub_in_flight",
    "reward_overlap",
}
_RUN_S = 600


@pytest.mark.timeout(_RUN_S + 60)
def test_the_benchmark_of_the_rollout_pool_ends_with_all_its_figures(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--short"],
        cwd=tmp_path,  # it does not depend on where it is started
        capture_output=True,
        text=True,
        timeout=_RUN_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    last = run.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert set(result) >= FIGURES
    assert all(value >= 0 for value in result.values()), result
