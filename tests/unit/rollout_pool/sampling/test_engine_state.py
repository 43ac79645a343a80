"""The limit on samples in flight, with engines of any size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.sampling.engine_state import (
    MAX_DELAY_S,
    START,
    AdaptiveLimit,
    Breaker,
    BreakerState,
    LoadSample,
)


def seen(**fields):
    return LoadSample(
        **{
            "num_in_flight": 0,
            "peak_in_flight": fields.get("num_in_flight", 0),
            "num_running": 0,
            "num_queued": 0,
            "kv_usage": 0.0,
            "expected_usage": 0.0,
            **fields,
        }
    )


def in_use(limit, **fields):
    """A load report of an engine without free slots."""
    return seen(num_in_flight=limit.value, num_running=limit.value, **fields)


def after(limit, looks, **fields):
    for _ in range(looks):
        limit.update(in_use(limit, **fields))
    return limit.value


SAMPLES = st.builds(
    LoadSample,
    num_in_flight=st.integers(0, 300),
    peak_in_flight=st.integers(0, 300),
    num_running=st.integers(0, 300),
    num_queued=st.integers(0, 300),
    kv_usage=st.floats(0, 1),
    expected_usage=st.floats(0, 5),
    num_preempted=st.integers(0, 3),
)


@given(most=st.integers(1, 256), looks=st.lists(SAMPLES, max_size=40))
def test_limit_never_leaves_its_bounds(most, looks):
    limit = AdaptiveLimit(most)
    for look in looks:
        limit.update(look)
        assert 1 <= limit.value <= most


@given(most=st.integers(1, 256), looks=st.lists(SAMPLES, max_size=20), last=SAMPLES)
def test_limit_never_rises_under_overload_nor_falls_without(most, looks, last):
    limit = AdaptiveLimit(most)
    for look in [seen(), *looks]:
        limit.update(look)
    before = limit.value
    limit.update(last)
    if last.num_preempted or last.kv_usage >= 0.95:
        assert limit.value <= before
    elif last.num_queued <= 1:
        assert limit.value >= before


def test_limit_is_the_maximum_until_the_first_load_report():
    limit = AdaptiveLimit(64)
    assert limit.value == 64
    limit.update(seen(num_in_flight=3))
    assert limit.value == START
    busy = AdaptiveLimit(64)
    busy.update(seen(num_in_flight=40, kv_usage=0.9))
    assert busy.value == 40


def test_limit_doubles_while_twice_the_tokens_would_fit_and_then_grows_linearly():
    limit = AdaptiveLimit(256)
    limit.update(seen())
    assert [after(limit, 1, kv_usage=0.1) for _ in range(2)] == [2 * START, 4 * START]
    assert [after(limit, 1, kv_usage=0.5) for _ in range(3)] == [72, 80, 88]
    assert after(limit, 5, kv_usage=0.86) == 88  # nearly full is no room
    assert after(limit, 5, expected_usage=0.9) == 88  # nor is what will be


def test_limit_does_not_grow_while_it_is_not_used():
    limit = AdaptiveLimit(256)
    for _ in range(10):
        limit.update(seen(num_in_flight=5, num_running=5))
    assert limit.value == START


def test_limit_recovers_fast_then_carefully_then_faster_after_a_fall():
    limit = AdaptiveLimit(256)
    limit.update(seen(num_in_flight=100, num_running=100, kv_usage=0.96))
    assert limit.value == 80
    values = [after(limit, 1, kv_usage=0.5) for _ in range(40)]
    assert values[:4] == [90, 91, 92, 93]
    assert values[35:38] == [125, 126, 134]


@pytest.mark.parametrize("overload", [{"num_preempted": 1}, {"kv_usage": 0.97}])
def test_limit_falls_once_per_overload(overload):
    limit = AdaptiveLimit(100)
    limit.update(seen(num_in_flight=100, num_running=100))
    for _ in range(4):
        limit.update(seen(num_in_flight=95, num_running=95, **overload))
    assert limit.value == 76  # of the 95 that were there
    limit.update(seen(num_in_flight=70, num_running=70, **overload))
    assert limit.value == 56


def test_limit_falls_for_a_lasting_queue_only():
    limit = AdaptiveLimit(100)
    limit.update(seen(num_in_flight=100))
    for _ in range(5):
        assert after(limit, 2, num_queued=30) == 100
        assert after(limit, 1, num_queued=0) == 100
    assert after(limit, 3, num_queued=30) == 90
    short = AdaptiveLimit(100)
    short.update(seen(num_in_flight=100))
    assert after(short, 9, num_queued=5) == 100


def test_limit_restarts_for_a_new_engine():
    limit = AdaptiveLimit(256)
    limit.update(seen())
    after(limit, 1, kv_usage=0.99)
    assert limit.value < START
    limit.restart()
    limit.update(seen())
    assert limit.value == START


class Engine:
    """Runs samples of unknown lengths, and preempts those that do not fit."""

    def __init__(self, capacity, dice):
        self.capacity = capacity
        self.dice = dice
        self.samples = []  # [held, final]
        self.queue = []
        self.num_preempted = 0
        self.num_recomputed = 0
        self.num_ended = 0

    def give(self, count):
        for _ in range(count):
            self.queue.append([20, 20 + min(2000, int(self.dice.lognormvariate(4.5, 1.0)))])

    def step(self, tokens):
        """Every sample gets so many tokens."""
        while self.queue and self.held + self.queue[0][0] < self.capacity:
            self.samples.append(self.queue.pop(0))
        for sample in self.samples:
            sample[0] = min(sample[1], sample[0] + tokens)
        self.num_ended += sum(sample[0] == sample[1] for sample in self.samples)
        self.samples = [sample for sample in self.samples if sample[0] < sample[1]]
        while self.held > self.capacity:
            lost = self.samples.pop()
            self.num_recomputed += lost[0]
            self.queue.insert(0, lost)
            self.num_preempted += 1

    @property
    def held(self):
        return sum(sample[0] for sample in self.samples)


def run(engine, limit, looks=400):
    """An engine that is always given as much as the limit allows."""
    for _ in range(looks):
        in_flight = len(engine.samples) + len(engine.queue)
        engine.give(max(0, limit.value - in_flight))
        before = engine.num_preempted
        engine.step(10)
        limit.update(
            seen(
                num_in_flight=len(engine.samples) + len(engine.queue),
                num_running=len(engine.samples),
                num_queued=len(engine.queue),
                kv_usage=engine.held / engine.capacity,
                num_preempted=engine.num_preempted - before,
            )
        )


class NoLimit:
    value = 256

    def update(self, look):
        return


# Where one sample may fill most of an engine (2,020 tokens here), no limit helps much.
@pytest.mark.parametrize(
    ("capacity", "seed"), [(6_000, 0), (12_000, 1), (20_000, 2), (30_000, 0), (60_000, 1)]
)
def test_limit_finds_the_capacity_with_little_recomputation(capacity, seed):
    engine, crowded = (Engine(capacity, random.Random(seed)) for _ in range(2))
    run(engine, AdaptiveLimit(256))
    run(crowded, NoLimit())
    assert engine.num_recomputed <= 0.75 * crowded.num_recomputed
    assert engine.num_ended >= 0.75 * crowded.num_ended  # whose second computing costs nothing here


# The breaker ------------------------------------------------------------------------------------


def test_breaker_counts_concurrent_failures_once_and_doubles_for_later_ones():
    breaker = Breaker()
    for _ in range(50):
        breaker.fail(begun=1.0, now=10.0)
    assert breaker.state is BreakerState.open and breaker.retry_at == 10.5
    delays, now = [], 10.5
    for _ in range(9):
        assert not breaker.admits(now - 0.01) and breaker.admits(now)
        assert breaker.begin() and not breaker.admits(now)  # one at a time
        breaker.fail(begun=now, now=now)
        delays.append(breaker.retry_at - now)
        now = breaker.retry_at
    assert delays == [1, 2, 4, 8, 16, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]
    breaker.begin()
    breaker.succeed(now)
    assert breaker.state is BreakerState.closed and breaker.admits(now)


def test_breaker_stays_closed_with_successes_between_failures():
    breaker = Breaker()
    for now in range(20):
        breaker.fail(begun=now, now=now)
        breaker.fail(begun=now, now=now)
        breaker.succeed(now)
    assert breaker.state is BreakerState.closed


def test_breaker_admits_another_trial_after_an_undecided_one():
    breaker = Breaker()
    for now in range(3):
        breaker.fail(begun=now, now=now)
    assert breaker.begin() and not breaker.admits(100.0)
    breaker.withdraw()
    assert breaker.admits(100.0)


def test_breaker_ignores_late_failures_of_old_requests():
    breaker = Breaker()
    for now in range(3):
        breaker.fail(begun=now, now=now)
    retry_at = breaker.retry_at
    breaker.begin()
    breaker.fail(begun=0.5, now=50.0)
    assert breaker.retry_at == retry_at and not breaker.admits(100.0)
