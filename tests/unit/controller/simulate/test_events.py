"""Engines and runs under the virtual clock, against what can be worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.choices import OnStale
from controller.simulate.events import UNSENT, Engine, Group, Outcome, Setting, simulate
from controller.simulate.machine import Machine

TOKEN_S = 0.01


class Steady(Machine):
    """A token takes as long in any batch; a prompt, a load and a version on the wire take none."""

    def token_s(self, num_running: float, num_tokens: float) -> float:
        return TOKEN_S

    def prefill_s(self, num_tokens: float) -> float:
        return 0.0

    @property
    def load_s(self) -> float:
        return 0.0


class Loading(Steady):
    @property
    def load_s(self) -> float:
        return 3.0


def machine(kind: type[Machine] = Steady, *, max_running: int = 4, wire_s: float = 0.0) -> Machine:
    return kind(
        gpu="H100",
        num_params=1e9,
        active_params=1e9,
        kv_elements=1e4,
        tp_size=1,
        max_running=max_running,
        utilisation=math.inf,
        wire_bytes_per_s=2e9 / wire_s if wire_s else float("inf"),
    )


def setting(**changes: object) -> Setting:
    """Two engines, steps of two groups of two answers; training takes no time."""
    usual = Setting(
        machine=machine(),
        num_engines=2,
        num_trainer_gpus=1,
        num_steps=6,
        groups_per_step=2,
        prompt_tokens=0,
        max_staleness=2,
        on_stale=OnStale.requeue,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def drawing(groups: Iterable[tuple[int, ...]]) -> Callable[[], tuple[int, ...]]:
    left = iter(groups)
    return lambda: next(left, ())


def answers_of(group: Group) -> list[tuple[float, float, Group]]:
    return [(length, 0.0, group) for length in group.lengths]


def test_answers_end_after_their_length_and_those_without_a_place_wait() -> None:
    engine, first, second = Engine(machine(), 0), Group((100, 200)), Group((50, 60, 70))
    engine.add(0.0, answers_of(first))
    assert engine.next_end == pytest.approx(1.0)
    engine.add(0.5, answers_of(second))  # two of its three have a place
    assert engine.load == 5
    assert engine.next_end == pytest.approx(1.0)
    assert engine.pop_ended(1.0) == [first, second]  # of 100, of 50; the last one begins
    assert engine.next_end == pytest.approx(1.1)
    assert engine.pop_ended(1.1) == [second]
    assert engine.next_end == pytest.approx(1.7)
    assert engine.pop_ended(1.7) == [second]
    assert engine.pop_ended(2.0) == [first]
    assert engine.load == 0 and engine.next_end == float("inf")
    # 2 answers for 0.5 s, 4 for 0.5 s, 3 for 0.1 s, 2 for 0.6 s, 1 for 0.3 s
    assert engine.place_s == pytest.approx(1.0 + 2.0 + 0.3 + 1.2 + 0.3)


def test_version_stops_all_answers_for_its_load() -> None:
    engine = Engine(machine(Loading), 0)
    engine.add(0.0, answers_of(Group((100,))))
    engine.take_version(0.5, 7)
    assert engine.version == 7 and engine.next_end == pytest.approx(4.0)
    assert engine.pop_ended(3.9) == []
    assert len(engine.pop_ended(4.0)) == 1


def test_stopped_answers_leave_their_tokens_and_their_places() -> None:
    engine, old, young = Engine(machine(max_running=2), 0), Group((100, 100)), Group((10,))
    engine.add(0.0, answers_of(old))
    engine.add(0.2, answers_of(young))
    assert engine.stop(0.4, {old}) == pytest.approx(2 * 40)
    assert engine.next_end == pytest.approx(0.5)
    assert engine.pop_ended(0.5) == [young]


def test_larger_batch_and_longer_answers_decode_slower() -> None:
    real = machine(Machine)
    assert real.token_s(1, 100) < real.token_s(1000, 100) < real.token_s(1000, 100_000)
    mixture = replace(real, num_params=1e10)
    assert mixture.token_s(1, 100) == pytest.approx(real.token_s(1, 100))
    assert mixture.token_s(64, 100) > 2 * real.token_s(64, 100)


def test_synchronous_run_takes_the_longest_answer_the_training_and_the_commit() -> None:
    one = replace(machine(Loading, wire_s=2.0), utilisation=1e-4)
    trained = setting(machine=one, max_staleness=0, max_commits=2)
    train_s = one.train_s(2 * (10 + 100))
    found = simulate(trained, drawing(itertools.repeat((10, 100))))
    steps = [b - a for a, b in itertools.pairwise([0.0, *found.ends])]
    # An engine that is ready before the other begins: both are loaded at once here.
    assert steps[0] == pytest.approx(1.0 + train_s)
    assert steps[1:] == pytest.approx([2.0 + 3.0 + 1.0 + train_s] * 5)
    assert set(found.staleness) == {0} and found.wasted == 0 and found.length_bias == 1


@pytest.mark.parametrize(("has_pools", "most"), [(True, 200), (False, 120)])
def test_step_waits_for_the_rank_with_the_most_tokens(has_pools: bool, most: int) -> None:
    """Ranks get whole groups; those of a colocated loop, which is not ours, single answers."""
    one = replace(machine(), utilisation=1e-4)
    shared = setting(
        machine=one, num_trainer_gpus=2, groups_per_step=3, num_steps=1, has_pools=has_pools
    )
    found = simulate(shared, drawing([(100, 100), (10, 10), (10, 10)]))
    assert found.train_s == [pytest.approx(one.train_s(most))]


def test_trainer_is_never_idle_where_it_is_the_slower_side() -> None:
    slow = setting(machine=replace(machine(), utilisation=1e-6), num_steps=20)
    found = simulate(slow, drawing(itertools.repeat((10, 10))))
    assert found.trainer_busy > 0.98
    assert max(found.staleness) <= 2


def test_rewards_delay_the_groups() -> None:
    found = simulate(
        setting(max_staleness=0, reward_s=5.0, num_steps=1), drawing(itertools.repeat((10, 10)))
    )
    assert found.ends == [pytest.approx(5.1)]


def test_long_answers_are_lost_at_a_short_leash_and_trained_where_the_trainer_waits() -> None:
    groups = [(10, 10)] * 5 + [(1000, 10)]

    def run(on_stale: OnStale, max_staleness: int) -> Outcome:
        one = setting(on_stale=on_stale, max_staleness=max_staleness, num_steps=30)
        return simulate(one, drawing(itertools.cycle(groups)))

    dropped, waited = run(OnStale.drop, 1), run(OnStale.wait, 1)
    assert dropped.num_lost > 0 and dropped.wasted > 0.1 and dropped.length_bias < 0.5
    assert waited.num_lost == 0 and waited.wasted == 0 and waited.length_bias > 0.9
    assert waited.ends[-1] > dropped.ends[-1]


def test_group_is_admitted_when_there_is_a_place_and_does_not_age_before() -> None:
    found = simulate(
        setting(max_staleness=9, num_engines=1, num_steps=20), drawing(itertools.repeat((10, 10)))
    )
    assert max(found.staleness) <= 1


def test_answers_of_a_group_take_places_at_several_engines() -> None:
    one = setting(machine=machine(max_running=1), groups_per_step=1, max_staleness=0, num_steps=1)
    assert simulate(one, drawing([(10, 10)])).ends == [pytest.approx(0.1)]


def test_run_in_which_no_step_can_come_says_so() -> None:
    for mtbf_s in (math.inf, 1e6):
        with pytest.raises(ValueError, match=r"after 2 steps nothing runs and nothing is ready"):
            simulate(setting(mtbf_s=mtbf_s), drawing([(10, 10)] * 5))


def test_answers_of_a_failed_engine_go_on_with_what_was_sent_of_them() -> None:
    failed, other, group = Engine(machine(), 0), Engine(machine(), 0), Group((100, 10, 200))
    failed.add(0.0, answers_of(group))
    assert failed.pop_ended(0.1) == [group]
    left, lost = failed.fail(0.5)
    assert lost == pytest.approx(2 * UNSENT)
    assert [(round(tokens), round(had)) for tokens, had, _ in left[group]] == [
        (50 + UNSENT, 50 - UNSENT),
        (150 + UNSENT, 50 - UNSENT),
    ]
    assert failed.load == 0 and failed.num_tokens == 0 and failed.next_end == math.inf
    other.add(0.5, left[group])
    assert other.num_tokens == pytest.approx(2 * (50 - UNSENT))
    assert other.next_end == pytest.approx(0.5 + (50 + UNSENT) * TOKEN_S)
    failed.restart(3.0, 7)
    failed.add(3.0, answers_of(Group((10,))))
    assert (failed.version, failed.next_end) == (7, pytest.approx(3.1))


@pytest.mark.parametrize(
    ("checkpoint_every", "fails", "has_pools", "ends"),
    [
        # A step is 1 s of answers and 4 of training; ranks are back after 3.
        (1, 7.0, True, [5.0, 7.0 + 3.0 + 4.0]),  # in step 2, which is made again
        (2, 7.0, True, [5.0, 7.0 + 3.0 + 4.0 + 4.0]),  # and so is step 1
        (2, 7.0, False, [5.0, 7.0 + 3.0 + 7.0 + 4.0]),  # with all that was sampled
        (1, 5.5, True, [5.0, 5.5 + 3.0 + 4.0]),  # while it waits for answers
        (1, 99.0, True, [5.0, 10.0]),
    ],
)
def test_failed_rank_brings_all_back_to_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint_every: int,
    fails: float,
    has_pools: bool,
    ends: list[float],
) -> None:
    class Dice:
        def __init__(self, seed: int) -> None:
            never = [math.inf] * 3
            self._times = iter([*([math.inf] if has_pools else []), fails, *never])

        def expovariate(self, rate: float) -> float:
            return next(self._times)

    class Training(Steady):
        def train_s(self, num_tokens: float) -> float:
            return 4.0

    monkeypatch.setattr("controller.simulate.events.random.Random", Dice)
    one = setting(
        machine=machine(Training),
        max_staleness=0,
        num_steps=2,
        mtbf_s=1.0,
        restart_s=3.0,
        checkpoint_every=checkpoint_every,
        has_pools=has_pools,
    )
    found = simulate(one, drawing(itertools.repeat((10, 100))))
    assert found.ends == pytest.approx(ends)
    assert found.num_failures == (fails < 99)


def test_failing_engines_and_ranks_slow_a_run_by_their_share_of_time() -> None:
    def run(mtbf_s: float) -> Outcome:
        one = setting(num_engines=10, num_steps=400, groups_per_step=20, mtbf_s=mtbf_s)
        one = replace(one, machine=machine(max_running=2), restart_s=20.0)
        return simulate(one, drawing(itertools.cycle([(900, 1000), (1000, 1100)])))

    whole, failing = run(math.inf), run(80.0)
    assert whole.num_failures == 0 < 100 < failing.num_failures
    assert 0 <= whole.wasted < failing.wasted < 0.1
    # An engine works 80 of 100 s. So do the ranks, meanwhile.
    assert 1.25 < failing.step_s / whole.step_s < 1.6


@given(
    st.integers(0, 4),
    st.sampled_from([OnStale.requeue, OnStale.drop, OnStale.wait]),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([1.0, 1.5]),
    st.sampled_from([math.inf, 4.0]),
    st.sampled_from([0.0, 1.0, 5.0]),
)
def test_no_group_is_trained_twice_or_too_old_and_none_vanishes(
    max_staleness: int,
    on_stale: OnStale,
    groups: list[tuple[int, int]],
    wire_s: float,
    oversampling: float,
    mtbf_s: float,
    restart_s: float,
) -> None:
    one = setting(
        machine=machine(Loading if wire_s else Steady, wire_s=wire_s),
        max_staleness=max_staleness,
        on_stale=on_stale,
        oversampling=oversampling,
        num_steps=12,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        checkpoint_every=5,
    )
    found = simulate(one, drawing(itertools.cycle(groups)))
    assert max(found.staleness) <= max_staleness
    assert len(found.trained) == 12 * one.groups_per_step
    left = len(found.drawn) - len(found.trained) - found.num_lost
    assert 0 <= left <= (max_staleness + 1) * one.groups_per_step * oversampling
