"""The benchmark of the rollout pool runs to its end; its figures depend on the machine."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

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
def test_rollout_benchmark_ends_with_all_its_figures(benchmark_result) -> None:
    result = benchmark_result("rollout.py", _RUN_S)
    assert set(result) >= FIGURES
