"""Which engine gets a call, and when none does."""

from __future__ import annotations

import asyncio

import pytest

from rollout_pool.router import Router


class NamedEngine:
    def __init__(self, name):
        self.name = name
        self.version = None

    def note_version(self, version):
        self.version = version

    async def generate(self, requests, sampling):
        return
        yield


def router(count, versions=None, *, trainer=0, max_staleness=0, wait_timeout_s=5.0):
    router = Router([NamedEngine(f"engine-{i}") for i in range(count)], wait_timeout_s)
    if versions is None:
        versions = {f"engine-{i}": 0 for i in range(count)}
    router.follow(versions, trainer, max_staleness)
    return router


async def name_of(router, avoid=()):
    async with router.assign(1, avoid) as engine:
        return engine.name


async def test_a_call_goes_to_the_engine_with_the_fewest_tokens_in_flight():
    two = router(2)
    async with two.assign(100) as first, two.assign(10) as second, two.assign(20) as third:
        assert [first.name, second.name, third.name] == ["engine-0", "engine-1", "engine-1"]
        assert two.tokens_in_flight == {"engine-0": 100, "engine-1": 30}
    assert two.tokens_in_flight == {"engine-0": 0, "engine-1": 0}


async def test_load_is_given_back_when_a_call_fails():
    one = router(1)
    with pytest.raises(ZeroDivisionError):
        async with one.assign(100):
            raise ZeroDivisionError
    assert one.tokens_in_flight == {"engine-0": 0}


async def test_an_engine_to_avoid_is_taken_only_if_there_is_no_other():
    two = router(2)
    assert await name_of(two, avoid={"engine-0"}) == "engine-1"
    assert await name_of(two, avoid={"engine-0", "engine-1"}) == "engine-0"
    assert two.has_other({"engine-0"}) and not two.has_other({"engine-0", "engine-1"})
    two.follow({"engine-0": 0}, 0, 0)
    assert not two.has_other({"engine-0"})


async def test_an_engine_that_serves_nothing_or_lags_too_far_gets_no_call():
    three = router(3, {"engine-1": 4, "engine-2": 6}, trainer=7, max_staleness=2)
    assert {await name_of(three, avoid={"engine-1"}), await name_of(three)} == {"engine-2"}
    three.follow({"engine-1": 4, "engine-2": 6}, 7, 3)
    assert await name_of(three, avoid={"engine-2"}) == "engine-1"


async def test_an_engine_is_told_which_version_its_requests_will_meet():
    engine = NamedEngine("engine-0")
    Router([engine], 5.0).follow({"engine-0": 6}, 7, 2)
    assert engine.version == 6


async def test_a_call_waits_until_an_engine_is_at_an_allowed_version():
    one = router(1, {"engine-0": 3}, trainer=4)
    waiting = asyncio.create_task(name_of(one))
    await asyncio.sleep(0.05)
    one.follow({}, 4, 0)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    one.follow({"engine-0": 4}, 4, 0)
    assert await waiting == "engine-0"


async def test_a_call_that_waits_too_long_is_told_why():
    one = router(1, {"engine-0": 3}, trainer=5, max_staleness=1, wait_timeout_s=0.05)
    with pytest.raises(
        TimeoutError,
        match=r"engine-0 .*buffer\.wait_timeout_s=0\.05.*'engine-0': 3.*version 5.*staleness is 1",
    ):
        await name_of(one)
