"""Which engine gets a call."""

from __future__ import annotations

import pytest

from rollout_pool.router import Router


class NamedEngine:
    def __init__(self, name):
        self.name = name

    async def generate(self, requests, sampling):
        return
        yield


def router(count):
    return Router([NamedEngine(f"engine-{i}") for i in range(count)])


def test_a_call_goes_to_the_engine_with_the_fewest_tokens_in_flight():
    two = router(2)
    with two.assign(100) as first, two.assign(10) as second, two.assign(20) as third:
        assert [first.name, second.name, third.name] == ["engine-0", "engine-1", "engine-1"]
        assert two.tokens_in_flight == {"engine-0": 100, "engine-1": 30}
    assert two.tokens_in_flight == {"engine-0": 0, "engine-1": 0}


def test_load_is_given_back_when_a_call_fails():
    one = router(1)
    with pytest.raises(ZeroDivisionError), one.assign(100):
        raise ZeroDivisionError
    assert one.tokens_in_flight == {"engine-0": 0}


def test_an_engine_to_avoid_is_taken_only_if_there_is_no_other():
    two = router(2)
    with two.assign(1, avoid={"engine-0"}) as engine:
        assert engine.name == "engine-1"
    with two.assign(1, avoid={"engine-0", "engine-1"}) as engine:
        assert engine.name == "engine-0"
