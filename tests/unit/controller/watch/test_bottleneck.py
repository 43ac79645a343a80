"""Waits as fractions of the time, and the sentence made of them."""

from __future__ import annotations

import pytest

from controller.metrics.weights import WeightsPace
from controller.watch.bottleneck import Sizes, WaitFractions, Window, bottleneck, wait_fractions


def waited(
    rollout: float = 0.0, weights: float = 0.0, trainer: float = 0.0, rewards: float = 0.0
) -> WaitFractions:
    return WaitFractions(
        trainer_for_rollout=rollout,
        trainer_for_weights=weights,
        rollout_for_trainer=trainer,
        rollout_for_rewards=rewards,
    )


@pytest.mark.parametrize(
    ("waits", "begins"),
    [
        (waited(rollout=0.61), "Rollouts are the bottleneck: the trainer waited 61% so far"),
        (waited(trainer=0.7), "The trainer is the bottleneck: rollouts waited 70% so far"),
        (waited(rollout=0.4, trainer=0.3), "Rollouts are the bottleneck"),
        (waited(rollout=0.3, trainer=0.4), "The trainer is the bottleneck"),
        (waited(weights=0.5, rollout=0.3), "The trainer spent 50% so far on handing over weights"),
        (waited(rollout=0.1, trainer=0.05), "Well balanced: the trainer waited 10% so far"),
    ],
)
def test_largest_wait_is_named(waits: WaitFractions, begins: str) -> None:
    assert bottleneck(waits, max_staleness=2).sentence.startswith(begins)


def test_engine_that_is_late_explains_why_rollouts_wait() -> None:
    late = WeightsPace(convergence_s=4.1, seconds_per_publish=2.0, behind={"engine-1": 3})
    sentence = bottleneck(waited(trainer=0.4), 2, weights=late).sentence
    assert sentence.startswith("Weights are the bottleneck: rollouts waited 40% so far for room.")
    assert "engine-1 is 3 versions behind" in sentence
    assert (
        "weights travel slower than they are made (convergence 4.1 s, a publish every 2.0 s)"
        in sentence
    )
    # It explains nothing where it is the trainer that waits.
    assert bottleneck(waited(rollout=0.6), 2, weights=late).sentence.startswith("Rollouts are")


def test_weights_slower_than_steps_are_named_to_the_side_that_waits() -> None:
    slow = WeightsPace(convergence_s=4.1, seconds_per_publish=2.0)
    assert bottleneck(waited(trainer=0.4), 2, weights=slow).sentence.startswith("Weights are")
    sentence = bottleneck(waited(weights=0.4), 2, weights=slow).sentence
    assert "handing over weights; weights travel slower than they are made" in sentence
    quick = WeightsPace(convergence_s=1.0, seconds_per_publish=2.0)
    assert bottleneck(waited(trainer=0.4), 2, weights=quick).sentence.startswith("The trainer is")


def test_reward_pool_that_is_too_small_is_named() -> None:
    sentence = bottleneck(waited(rollout=0.6, rewards=0.4), 2).sentence
    assert sentence == (
        "The reward pool is too small: episodes waited 40% so far for a scoring process. "
        "Raise rollout.reward_processes."
    )
    synchronous = bottleneck(waited(rollout=0.5, trainer=0.4, rewards=0.3), 0).sentence
    assert synchronous.startswith("The reward pool is too small")
    assert bottleneck(waited(rewards=0.3), 2).sentence.startswith("The reward pool")


def test_rewards_are_no_bottleneck_while_rollouts_wait_for_the_trainer() -> None:
    assert bottleneck(waited(trainer=0.7, rewards=0.9), 2).sentence.startswith("The trainer is")
    assert bottleneck(waited(rollout=0.6, rewards=0.2), 2).sentence.startswith("Rollouts are")


def test_synchronous_run_is_reported_as_taking_turns() -> None:
    sentence = bottleneck(waited(rollout=0.5, trainer=0.6), max_staleness=0).sentence
    assert "take turns, as max_staleness=0 requires" in sentence


@pytest.mark.parametrize(
    ("waits", "leash", "command"),
    [
        (waited(rollout=0.6), 2, "make scale ROLLOUT=6"),
        (waited(rollout=0.3), 2, "make scale ROLLOUT=5"),
        (waited(rollout=0.4, trainer=0.3), 0, "make tune MAX_STALENESS=1"),
        (waited(trainer=0.3), 2, 'make stop && make resume ARGS="trainer.num_ranks=3"'),
        (waited(rewards=0.8), 2, 'make stop && make resume ARGS="rollout.reward_processes=8"'),
        (waited(rollout=0.1), 2, ""),
    ],
)
def test_command_adds_as_much_as_the_wait_asks_for_and_at_most_doubles(
    waits: WaitFractions, leash: int, command: str
) -> None:
    sizes = Sizes(engines=3, ranks=2, reward_processes=4)
    assert bottleneck(waits, leash, sizes=sizes).command() == command


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (Sizes(), ()),
        (Sizes(ranks=4, rank_step=2), ("trainer.num_ranks=8",)),
        (Sizes(ranks=4, rank_step=4), ("trainer.num_ranks=8",)),
        (Sizes(ranks=4, rank_step=2, most_ranks=6), ("trainer.num_ranks=6",)),
        (Sizes(ranks=4, rank_step=2, most_ranks=4), ()),
    ],
)
def test_ranks_that_a_resume_would_refuse_are_not_advised(
    sizes: Sizes, changes: tuple[str, ...]
) -> None:
    assert bottleneck(waited(trainer=0.5), 2, sizes=sizes).changes == changes


def test_fractions_are_parts_of_the_time_of_one_process() -> None:
    waits = {("trainer", "rollout"): 5.0, ("rollout", "trainer"): 16.0, ("rollout", "rewards"): 8.0}
    result = wait_fractions(waits, elapsed_s=20.0, num_workers=4)
    assert result == waited(rollout=0.25, trainer=0.2, rewards=0.1)
    assert wait_fractions(waits, elapsed_s=0.0) == waited()


def test_window_begins_again_where_totals_fall() -> None:
    window = Window[str](horizon_s=30.0)
    for t, total in ((0.0, 500.0), (10.0, 900.0), (20.0, 40.0), (30.0, 90.0)):
        window.add(t, {"tokens": total})
    assert window.growth() == {"tokens": 50.0} and window.elapsed_s == 10.0


def test_window_forgets_what_is_older_than_its_horizon() -> None:
    window: Window[str] = Window(horizon_s=10.0)
    assert (window.elapsed_s, window.growth()) == (0.0, {})
    waited = 0.0
    for t in range(101):
        window.add(float(t), {"trainer": waited})
        waited += 0.9 if t < 50 else 0.3
    assert window.elapsed_s == 10.0
    assert window.growth() == {"trainer": pytest.approx(3.0)}
