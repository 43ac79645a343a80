"""How long one that fails is left alone."""

from __future__ import annotations

from weight_sync.coordinator.broadcast import Backoff


class Somebody:
    pass


def test_rest_doubles_with_each_failure_up_to_its_limit_and_ends_with_a_success() -> None:
    now = 0.0
    backoff: Backoff[Somebody] = Backoff(10.0, 35.0, clock=lambda: now)
    who = Somebody()
    assert not backoff.has_failed(who) and not backoff.is_resting(who)
    assert [backoff.failed(who) for _ in range(4)] == [10.0, 20.0, 35.0, 35.0]
    now = 34.9
    assert backoff.is_resting(who) and not backoff.is_resting(Somebody())
    now = 35.0
    assert not backoff.is_resting(who) and backoff.has_failed(who)
    backoff.worked(who)
    assert not backoff.has_failed(who) and backoff.failed(who) == 10.0
