"""Advantages against values worked out by hand, and against formulas over a table of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from configs.advantages import ADVANTAGES, AdvantageConfig, CriticConfig, Gae
from tests.support.trainer.made_up import trajectory
from tests.support.trainer.token_batch import algorithm
from trainer_pool.algorithms.advantages import (
    AdvantageInputs,
    TokenAdvantages,
    gae,
    overlong_penalty,
    returns,
)
from trainer_pool.critic import value_loss

Floats = NDArray[np.float64]
OF_EPISODES = sorted({*ADVANTAGES} - {"gae"})
"""They read no values, and give all tokens of an episode one advantage."""


def advantages(
    kind: str,
    rewards: list[float],
    *,
    groups: list[int] | None = None,
    lengths: list[int] | None = None,
    trained: list[int] | None = None,
    parts: dict[str, Floats] | None = None,
    **settings: object,
) -> Floats:
    """[E] the advantage of each episode, which all of its tokens have."""
    lengths = [3] * len(rewards) if lengths is None else lengths
    inputs = AdvantageInputs(
        rewards_E=np.array(rewards, np.float64),
        groups_E=np.array([0] * len(rewards) if groups is None else groups),
        num_tokens_E=np.array(lengths if trained is None else trained, np.float64),
        parts=parts or {},
        trajectories=[trajectory([0] * length) for length in lengths],
        episodes=range(len(rewards)),
    )
    config = ADVANTAGES[kind](kind=kind, **settings)  # type: ignore[arg-type]
    found: TokenAdvantages = algorithm(advantage=config).advantages(inputs)
    assert [len(values) for values in found] == lengths
    assert all(values.dtype == np.float32 and np.ptp(values) == 0 for values in found)
    return np.array([values[0] for values in found], np.float64)


def test_advantage_is_distance_from_mean_over_sample_deviation() -> None:
    # Mean 0.25; squared distances 3 * 0.0625 + 0.5625 = 0.75; deviation sqrt(0.75 / 3) = 0.5.
    np.testing.assert_allclose(advantages("grpo", [1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_without_normalization_advantage_is_distance_from_mean() -> None:
    np.testing.assert_array_equal(advantages("dr_grpo", [3, 1, 2]), [1, -1, 0])


@pytest.mark.parametrize("kind", ["batch_std", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize(
    ("rewards", "trained"),
    [
        ([1, 1], [3, 3]),
        ([1], [3]),
        ([1, 0], [0, 0]),  # all answers were truncated, and algorithm.advantage.mask_truncated
        ([1, 0], [1, 0]),
        ([0.1, 0.1, 0.7], [3, 4, 0]),
    ],
)
def test_batch_without_a_deviation_has_finite_advantages(
    kind: str, rewards: list[float], trained: list[int]
) -> None:
    found = advantages(kind, rewards, trained=trained, epsilon=0.0)
    if kind != "batch_std" or len(set(rewards)) == 1:
        assert not found.any()


def test_degrees_of_freedom_and_epsilon_are_settings() -> None:
    # With n degrees of freedom the deviation of 1, 0 is 0.5, with n - 1 it is sqrt(0.5).
    np.testing.assert_allclose(advantages("grpo", [1, 0], ddof=0, epsilon=0.0), [1, -1])
    np.testing.assert_allclose(
        advantages("grpo", [1, 0], ddof=1, epsilon=0.0), [0.5**0.5, -(0.5**0.5)], rtol=1e-6
    )
    np.testing.assert_allclose(advantages("grpo", [1, 0], ddof=0, epsilon=0.5), [0.5, -0.5])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(advantages("rloo", [4, 1, 1]), [3.0, -1.5, -1.5])
    np.testing.assert_array_equal(advantages("rloo", [4]), [0])


def test_each_group_is_compared_with_itself() -> None:
    found = advantages("dr_grpo", [1, 0, 7, 5], groups=[0, 0, 1, 1])
    np.testing.assert_array_equal(found, [0.5, -0.5, 1, -1])


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_normalization_over_the_batch_counts_every_token(kind: str, ddof: int) -> None:
    rewards, lengths = [1.0, 0.0, 0.25, 2.0], [2, 7, 3, 5]
    values = np.array(rewards)
    if kind == "reinforce_pp_baseline":
        values -= np.repeat([np.mean(values[:2]), np.mean(values[2:])], 2)
    table = np.repeat(values, lengths)
    expected = (values - table.mean()) / (table.std(ddof=ddof) + 1e-6)
    found = advantages(kind, rewards, groups=[0, 0, 1, 1], lengths=lengths, ddof=ddof)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_deviation_of_the_batch_divides_all_groups_alike() -> None:
    rewards = [1.0, 0.0, 10.0, 6.0]
    expected = np.array([0.5, -0.5, 2, -2]) / (np.std(rewards, ddof=1) + 1e-6)
    found = advantages("batch_std", rewards, groups=[0, 0, 1, 1])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_maxrl_divides_by_the_mean_so_that_rare_success_counts_most() -> None:
    found = advantages("max_rl", [1, 0, 0, 0, 1, 1, 1, 0, 0, 0], groups=[0] * 4 + [1] * 4 + [2] * 2)
    np.testing.assert_allclose(found, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0], rtol=1e-6)


def test_maxrl_refuses_a_reward_below_zero() -> None:
    with pytest.raises(ValueError, match=r"kind='max_rl': an episode has the reward -0\.5"):
        advantages("max_rl", [1, -0.5])


def test_parts_are_normalized_one_by_one_before_they_are_added() -> None:
    parts = {"right": np.array([1.0, 0, 0, 1]), "short": np.array([10.0, 30, 20, 0])}
    normal = [
        (p - np.repeat([p[:2].mean(), p[2:].mean()], 2))
        / (np.repeat([p[:2].std(ddof=1), p[2:].std(ddof=1)], 2) + 1e-6)
        for p in parts.values()
    ]
    total = 2 * normal[0] + 0.5 * normal[1]
    lengths = [1, 4, 2, 2]
    table = np.repeat(total, lengths)
    expected = (total - table.mean()) / (table.std(ddof=1) + 1e-6)
    found = advantages(
        "gdpo",
        [0, 0, 0, 0],
        groups=[0, 0, 1, 1],
        lengths=lengths,
        parts=parts,
        part_weights={"right": 2.0, "short": 0.5},
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_parts_with_the_same_sum_are_told_apart() -> None:
    parts = {"right": np.array([1.0, 0, 0]), "short": np.array([0.0, 1, 0.5])}
    weights = {"right": 1.0, "short": 1.0}
    found = advantages("gdpo", [1, 1, 0.5], parts=parts, part_weights=weights)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_only_the_best_of_a_group_is_pushed_by_its_lead() -> None:
    deviation = np.std([0.2, 1.0, 0.7], ddof=1) + 1e-6
    found = advantages("pass_at_k", [0.2, 1.0, 0.7])
    np.testing.assert_allclose(found, [0, 0.3 / deviation, 0], rtol=1e-5)
    np.testing.assert_array_equal(advantages("pass_at_k", [1, 1, 0]), [0, 0, 0])


@pytest.mark.parametrize("kind", OF_EPISODES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_exactly_zero(kind: str, reward: float) -> None:
    # The mean of seven times 0.1 is not 0.1 in floating point: rounding must not become a signal.
    settings = {"part_weights": {"right": 1.0}} if kind == "gdpo" else {}
    found = advantages(kind, [reward] * 7, parts={"right": np.full(7, reward)}, **settings)
    np.testing.assert_array_equal(found, np.zeros(7))


@pytest.mark.parametrize("kind", sorted({*OF_EPISODES} - {"max_rl"}))
def test_advantages_do_not_depend_on_a_constant_added_to_all_rewards(kind: str) -> None:
    rewards, groups = [0.0, 1.0, 0.5, 2.0, 3.0, 3.5], [0, 0, 0, 1, 1, 1]
    settings = {"part_weights": {"right": 1.0}} if kind == "gdpo" else {}
    found = [
        advantages(
            kind,
            [reward + shift for reward in rewards],
            groups=groups,
            parts={"right": np.array(rewards) + shift},
            **settings,
        )
        for shift in (0.0, 5.0)
    ]
    assert np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(AssertionError):
        advantages("grpo", [1.0, np.nan])


def test_penalty_for_length_rises_linearly_between_its_bounds() -> None:
    config = AdvantageConfig(
        kind="rloo", overlong_start=100, overlong_end=120, overlong_penalty=2.0
    )
    lengths = (0, 100, 105, 120, 500)
    assert [overlong_penalty(n, config) for n in lengths] == [0, 0, 0.5, 2, 2]
    assert overlong_penalty(500, AdvantageConfig(kind="rloo")) == 0


def with_values(
    rewards: list[float], masks: list[list[int]], values: list[list[float]], episodes: list[int]
) -> AdvantageInputs:
    """A trajectory for each mask; `values` of all its tokens."""
    return AdvantageInputs(
        rewards_E=np.array(rewards),
        groups_E=np.zeros(len(rewards), np.int64),
        num_tokens_E=np.zeros(len(rewards)),  # is not looked at
        trajectories=[trajectory(mask) for mask in masks],
        episodes=episodes,
        masks=[np.array(mask, np.uint8) for mask in masks],
        values=[np.array(of, np.float32) for of in values],
    )


def estimated(inputs: AdvantageInputs, **settings: object) -> list[list[float]]:
    config = Gae(kind="gae", **settings)  # type: ignore[arg-type]
    chosen = algorithm(advantage=config, critic=CriticConfig())
    return [values.tolist() for values in chosen.advantages(inputs)]


def test_gae_of_three_tokens_is_that_by_hand() -> None:
    """With gamma = lambda = 1/2, reward 1 on the last token, values 0.5, 0.25, 1:

    d_3 = 1 - 1 = 0                      A_3 = 0
    d_2 = 1/2 * 1 - 0.25 = 0.25          A_2 = 0.25 + 1/4 * 0 = 0.25
    d_1 = 1/2 * 0.25 - 0.5 = -0.375      A_1 = -0.375 + 1/4 * 0.25 = -0.3125
    """
    inputs = with_values([1.0], [[0, 1, 1, 1]], [[9, 0.5, 0.25, 1]], [0])
    half = {"gamma": 0.5, "gae_lambda": 0.5}
    assert estimated(inputs, **half, whiten=False) == [[0, -0.3125, 0.25, 0]]
    found = returns(inputs, Gae(kind="gae", gamma=0.5, gae_lambda=0.5))
    assert [values.tolist() for values in found] == [[0, 0.1875, 0.5, 1]]
    # The mean is -1/48, the squares 25/256 and 1/16.
    mean, deviation = -0.0625 / 3, np.sqrt((0.3125**2 + 0.25**2) / 3 - (0.0625 / 3) ** 2)
    whole = [(a - mean) / deviation for a in (-0.3125, 0.25, 0)]
    np.testing.assert_allclose(estimated(inputs, **half)[0], [0, *whole], rtol=1e-5)


def test_gae_at_the_ends_of_lambda() -> None:
    """1: the reward less the value; 0: the next value less this one."""
    inputs = with_values([2.0], [[0, 1, 1]], [[0, 0.5, 1.5]], [0])
    assert estimated(inputs, gae_lambda=1.0, whiten=False) == [[0, 1.5, 0.5]]
    assert estimated(inputs, gae_lambda=0.0, whiten=False) == [[0, 1.0, 0.5]]


def test_gae_passes_over_tokens_of_tools_and_pays_the_last_trained_one_of_each_branch() -> None:
    """The values between are not looked at, and a branch without a trained token has none."""
    masks = [[0, 1, 0, 0, 1, 0], [0, 1, 1], [0, 0], [0, 1]]
    values = [[7, 0.5, 8, 8, 0.25, 8], [0, 0.25, 0.75], [3, 3], [0, 0.5]]
    inputs = with_values([1.0, -1.0], masks, values, [0, 0, 0, 1])
    found = estimated(inputs, gamma=0.5, gae_lambda=1.0, whiten=False)
    assert found == [[0, 0, 0, 0, 0.75, 0], [0, 0.25, 0.25], [0, 0], [0, -1.5]]


def test_whitened_gae_counts_each_episode_once_and_is_that_of_all_ranks() -> None:
    """Episode 0 has two equal branches, which weigh as one; the other rank has episode 1."""
    masks, values = [[0, 1, 1], [0, 1, 1], [0, 1]], [[0, 0.0, 0.0]] * 2 + [[0, 0.0]]
    alone = with_values([1.0, 4.0], masks, values, [0, 0, 1])
    # Tokens 1, 1 and 4: mean 2, deviation sqrt(2).
    expected = [[0, -(0.5**0.5), -(0.5**0.5)]] * 2 + [[0, 2**0.5]]
    for found, by_hand in zip(estimated(alone), expected, strict=True):
        np.testing.assert_allclose(found, by_hand, rtol=1e-6)
    sums = np.array([1.0, 4.0, 16.0])  # of the other rank
    part = replace(
        with_values([1.0, 4.0], masks[:2], values[:2], [0, 0]),
        sum_over_ranks=lambda own: own + sums,
    )
    assert estimated(part) == estimated(alone)[:2]


def test_gae_of_equal_advantages_and_of_no_token_is_zero() -> None:
    inputs = with_values([1.0, 1.0], [[0, 1], [0, 0]], [[0, 0.25], [0, 0]], [0, 1])
    assert estimated(inputs) == [[0, 0], [0, 0]]
    nothing = with_values([1.0], [[0, 0]], [[0, 0]], [0])
    assert estimated(nothing) == [[0, 0]]


@given(
    rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=4),
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=4, max_size=4),
    gamma=st.floats(0.1, 1),
    gae_lambda=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_gae_is_a_plain_loop_over_the_trained_tokens(
    rewards: list[float], masks: list[list[int]], gamma: float, gae_lambda: float, seed: int
) -> None:
    masks = [[0, *mask] for mask in masks[: len(rewards)]]
    dice = np.random.default_rng(seed)
    values = [dice.normal(size=len(mask)).astype(np.float32).tolist() for mask in masks]
    inputs = with_values(rewards, masks, values, [*range(len(rewards))])
    config = Gae(kind="gae", gamma=gamma, gae_lambda=gae_lambda, whiten=False)
    found, targets = gae(inputs, config), returns(inputs, config)
    for i, (reward, mask) in enumerate(zip(rewards, masks, strict=True)):
        places = [t for t, is_trained in enumerate(mask) if is_trained]
        deltas = []
        for n, t in enumerate(places):
            is_last = n == len(places) - 1
            following = reward if is_last else gamma * values[i][places[n + 1]]
            deltas.append(following - values[i][t])
        for n, t in enumerate(places):
            expected = sum((gamma * gae_lambda) ** k * d for k, d in enumerate(deltas[n:]))
            assert found[i][t] == pytest.approx(expected, abs=1e-4)
            assert targets[i][t] == pytest.approx(expected + values[i][t], abs=1e-4)
        assert not found[i][np.array(mask) == 0].any() and not targets[i][np.array(mask) == 0].any()


@pytest.mark.parametrize(
    ("value", "start", "target", "expected", "slope"),
    [
        (1.0, 0.9, 2.0, 0.5, -1.0),  # within the range: (1 - 2)^2 / 2
        (2.0, 0.5, 2.5, 1.125, 0.0),  # moved towards it further than 0.5: (1 - 2.5)^2 / 2
        (2.0, 0.5, 0.0, 2.0, 2.0),  # moved away from it: the value itself is the worse one
        (-1.0, 0.5, -2.0, 2.0, 0.0),
    ],
)
def test_value_loss_is_the_worse_of_a_value_and_of_the_clipped_one(
    value: float, start: float, target: float, expected: float, slope: float
) -> None:
    value_1 = torch.tensor([value], requires_grad=True)
    loss, is_clipped = value_loss(value_1, torch.tensor([start]), torch.tensor([target]), 0.5)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.item() == expected and value_1.grad is not None and value_1.grad.item() == slope
    assert bool(is_clipped) == (slope == 0)
    plain, is_clipped = value_loss(value_1, torch.tensor([start]), torch.tensor([target]), None)
    assert plain.item() == (value - target) ** 2 / 2 and not bool(is_clipped)
