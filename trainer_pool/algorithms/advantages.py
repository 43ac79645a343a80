"""Advantages of the episodes of a group relative to each other; pure.

Letters: G the episodes of one group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EPSILON = 1e-6


def grpo_advantages(
    rewards_G: NDArray[np.float64], *, should_normalize_std: bool
) -> NDArray[np.float32]:
    """[G] rewards minus the group's mean, optionally divided by its standard deviation.

    Outcome supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), the deviation with
    G - 1 degrees of freedom. Without the division: Dr. GRPO (arXiv 2503.20783), which does not
    favour prompts of low variance. If all rewards are equal, all advantages are exactly 0.
    """
    assert rewards_G.ndim == 1 and np.isfinite(rewards_G).all(), rewards_G
    if np.ptp(rewards_G) == 0:
        return np.zeros(len(rewards_G), np.float32)
    centered = rewards_G - rewards_G.mean()
    if should_normalize_std:
        centered = centered / (rewards_G.std(ddof=1) + _EPSILON)
    return np.asarray(centered, np.float32)
