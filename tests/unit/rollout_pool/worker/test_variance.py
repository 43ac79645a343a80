"""Which groups without variance are left out, and how many."""

from __future__ import annotations

from rollout_pool.worker.variance import MAX_SAVED_GROUPS, VarianceFilter, Verdict

OUT, ALL_EQUAL = Verdict.leave_out, Verdict.keep_all_equal


def judged(variance: VarianceFilter, number: int) -> list[Verdict]:
    return [variance.judge(teaches=False) for _ in range(number)]


def test_filter_keeps_and_reports_groups_beyond_its_budget() -> None:
    verdicts = judged(VarianceFilter(max_ratio=2.0), 6)
    assert verdicts == [OUT, OUT, ALL_EQUAL, OUT, OUT, ALL_EQUAL]


def test_filter_budget_below_one_per_group_adds_up() -> None:
    verdicts = judged(VarianceFilter(max_ratio=0.5), 4)
    assert verdicts == [ALL_EQUAL, OUT, ALL_EQUAL, ALL_EQUAL]
    assert judged(VarianceFilter(max_ratio=0.0), 3) == [ALL_EQUAL] * 3


def test_filter_budget_is_limited() -> None:
    variance = VarianceFilter(max_ratio=2.0)
    assert {variance.judge(teaches=True) for _ in range(1000)} == {Verdict.keep}
    verdicts = judged(variance, 2 * MAX_SAVED_GROUPS + 1)
    assert verdicts == [OUT] * 2 * MAX_SAVED_GROUPS + [ALL_EQUAL]
