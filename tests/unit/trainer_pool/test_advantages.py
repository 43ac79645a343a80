"""GRPO advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_pool.algorithms.advantages import grpo_advantages


def test_advantage_is_distance_from_mean_over_sample_deviation() -> None:
    # Mean 0.25; squared distances 3 * 0.0625 + 0.5625 = 0.75; deviation sqrt(0.75 / 3) = 0.5.
    advantages = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]), should_normalize_std=True)
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    assert advantages.dtype == np.float32


def test_without_normalization_advantage_is_distance_from_mean() -> None:
    advantages = grpo_advantages(np.array([3.0, 1.0, 2.0]), should_normalize_std=False)
    np.testing.assert_array_equal(advantages, np.array([1, -1, 0], np.float32))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    # The mean of seven times 0.1 is not 0.1 in floating point: rounding must not become a signal.
    advantages = grpo_advantages(np.full(7, reward), should_normalize_std=True)
    np.testing.assert_array_equal(advantages, np.zeros(7, np.float32))


def test_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(AssertionError):
        grpo_advantages(np.array([1.0, np.nan]), should_normalize_std=True)
