"""Advantages: by how much each token's episode was better than expected; pure.

Every rank has the rewards of the whole batch in the same order, so that statistics over the batch
are the same for any number of ranks. The result has a value for each token, so that a function can
credit each turn of an episode separately.

Letters: E episodes of the batch, G those of one group, T tokens of a trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from buffer.types import Trajectory
from configs.advantages import AdvantageConfig, Gae, Gdpo, Normalized

Values = NDArray[np.float64]
TokenAdvantages = list[NDArray[np.float32]]
"""[T] for each trajectory of this rank."""
_EPSILON = 1e-8
"""Added to the deviation by which `gae` is whitened, as in verl."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class AdvantageInputs:
    """All episodes of the batch, and this rank's trajectories."""

    rewards_E: Values
    """Less the penalties for length and for the distance from a reference, if they are set."""
    groups_E: NDArray[np.int64]
    """Each episode's group, from 0; the episodes of one group are adjacent. Where episodes have
    roles, each role of one is an episode here, and each role of a group is a group."""
    num_tokens_E: Values
    """Trained tokens of each episode: the mean over its trajectories."""
    parts: Mapping[str, Values] = field(default_factory=dict)
    """[E] the named parts of the reward; NaN for an episode without that part."""
    trajectories: Sequence[Trajectory] = ()
    """This rank's; with `columns`, `version_spans` and masks, to credit single tokens."""
    episodes: Sequence[int] = ()
    """The index, among the E, of each trajectory's episode."""
    masks: Sequence[NDArray[np.uint8]] = ()
    """[T] for each trajectory: 1 for a token that is trained."""
    values: TokenAdvantages = field(default_factory=list)
    """[T] for each trajectory: the critic's value of what came before each trained token, and 0 of
    the others; only with `algorithm.critic`."""
    sum_over_ranks: Callable[[Values], Values] = lambda sums: sums
    """Sums of an array over all ranks; collective."""

    def __post_init__(self) -> None:
        assert np.isfinite(self.rewards_E).all(), self.rewards_E

    def spread(self, values_E: Values) -> TokenAdvantages:
        """Gives each token the value of its episode."""
        return [
            np.full(trajectory.num_tokens, values_E[episode], np.float32)
            for trajectory, episode in zip(self.trajectories, self.episodes, strict=True)
        ]

    def by_group(self, values_E: Values, function: Callable[[Values], Values]) -> Values:
        """[E] `function` of the values [G] of each group; 0 for a group whose values are equal."""
        result_E = np.zeros(len(values_E))
        for group in np.unique(self.groups_E):
            places = self.groups_E == group
            values_G = values_E[places]
            if np.ptp(values_G) > 0:
                result_E[places] = function(values_G)
        return result_E


def grpo(inputs: AdvantageInputs, config: Normalized) -> TokenAdvantages:
    """(R - mean of the group) / (its standard deviation + epsilon).

    Outcome supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    """
    return inputs.spread(_normalized_by_group(inputs, inputs.rewards_E, config))


def _normalized_by_group(inputs: AdvantageInputs, values_E: Values, config: Normalized) -> Values:
    def normalized(values_G: Values) -> Values:
        deviation = float(values_G.std(ddof=config.ddof))
        return _centered(values_G) / (deviation + config.epsilon)

    return inputs.by_group(values_E, normalized)


def _centered(values_G: Values) -> Values:
    centered_G: Values = values_G - values_G.mean()
    return centered_G


def dr_grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """R - mean of the group: does not favour prompts of low variance.

    Dr. GRPO (arXiv 2503.20783).
    """
    return inputs.spread(inputs.by_group(inputs.rewards_E, _centered))


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """R - mean of the group's other episodes: leave one out (RLOO, arXiv 2402.14740)."""

    def leave_one_out(rewards_G: Values) -> Values:
        return _centered(rewards_G) * len(rewards_G) / (len(rewards_G) - 1)

    return inputs.spread(inputs.by_group(inputs.rewards_E, leave_one_out))


def reinforce_pp(inputs: AdvantageInputs, config: Normalized) -> TokenAdvantages:
    """R, normalized over all tokens of the batch (REINFORCE++, arXiv 2501.03262)."""
    return inputs.spread(_whitened(inputs, inputs.rewards_E, config))


def reinforce_pp_baseline(inputs: AdvantageInputs, config: Normalized) -> TokenAdvantages:
    """R - mean of the group, normalized over all tokens of the batch (arXiv 2501.03262)."""
    centered_E = inputs.by_group(inputs.rewards_E, _centered)
    return inputs.spread(_whitened(inputs, centered_E, config))


def _whitened(inputs: AdvantageInputs, values_E: Values, config: Normalized) -> Values:
    """[E] mean 0 and deviation 1 over the batch's tokens, each of which has its episode's value; 0
    if all trained tokens have the same, so that there is no deviation to divide by."""
    trained_E = values_E[inputs.num_tokens_E > 0]
    num_tokens = inputs.num_tokens_E.sum()
    if not len(trained_E) or np.ptp(trained_E) == 0:
        return np.zeros(len(values_E))
    centered_E = values_E - (inputs.num_tokens_E * values_E).sum() / num_tokens
    square = (inputs.num_tokens_E * centered_E**2).sum() / (num_tokens - config.ddof)
    return np.asarray(centered_E / (np.sqrt(square) + config.epsilon))


def batch_std(inputs: AdvantageInputs, config: Normalized) -> TokenAdvantages:
    """(R - mean of the group) / (standard deviation of all rewards of the batch + epsilon).

    Lite PPO (arXiv 2508.08221): a group whose rewards hardly differ is not blown up by its own.
    """
    if np.ptp(inputs.rewards_E) == 0:  # a deviation of 0, or of one episode none at all
        return inputs.spread(np.zeros(len(inputs.rewards_E)))
    deviation = inputs.rewards_E.std(ddof=config.ddof)
    centered_E = inputs.by_group(inputs.rewards_E, _centered)
    return inputs.spread(centered_E / (deviation + config.epsilon))


def max_rl(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    """(R - mean of the group) / mean, which favours hard prompts (MaxRL, arXiv 2602.02710).

    Raises ValueError for a reward below 0.
    """
    lowest = inputs.rewards_E.min(initial=0.0)
    if lowest < 0:
        raise ValueError(
            f"algorithm.advantage.kind='max_rl': an episode has the reward {lowest:g}, and only "
            "rewards of at least 0 can be divided by their mean; choose grpo, or rewards from 0 to "
            "1 without a penalty"
        )
    return inputs.spread(inputs.by_group(inputs.rewards_E, lambda r: _centered(r) / r.mean()))


def gdpo(inputs: AdvantageInputs, config: Gdpo) -> TokenAdvantages:
    """Each part of the reward normalized in its group; their weighted sum over the batch.

    GDPO (arXiv 2601.05242): mixtures of parts that only have the same sum are distinguished. Raises
    ValueError for an episode without one of the parts.
    """
    total_E = np.zeros(len(inputs.rewards_E))
    for name, weight in config.part_weights.items():
        values_E = inputs.parts.get(name)
        if values_E is None or np.isnan(values_E).any():
            raise ValueError(
                f"algorithm.advantage.part_weights={dict(config.part_weights)!r}: an "
                f"episode has no part {name!r}; name parts that every episode has"
            )
        total_E += weight * _normalized_by_group(inputs, values_E, config)
    return inputs.spread(_whitened(inputs, total_E, config))


def pass_at_k(inputs: AdvantageInputs, config: Normalized) -> TokenAdvantages:
    """The best of a group gets its lead over the second / (standard deviation + epsilon), and the
    others get 0 (arXiv 2503.19595, with k the size of the group)."""

    def lead_of_best(rewards_G: Values) -> Values:
        second, first = np.sort(rewards_G)[-2:]
        result_G = np.zeros(len(rewards_G))
        deviation = rewards_G.std(ddof=config.ddof)
        result_G[rewards_G.argmax()] = (first - second) / (deviation + config.epsilon)
        return result_G

    return inputs.spread(inputs.by_group(inputs.rewards_E, lead_of_best))


def gae(inputs: AdvantageInputs, config: Gae) -> TokenAdvantages:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) over the trained tokens, of which
    the last one of each trajectory gets the reward R of its episode:

        A_t = d_t + gamma lambda A_(t+1),    d_t = r_t + gamma V_(t+1) - V_t

    Tokens of environments and tools are passed over: the policy did not choose them. Whitened, each
    episode counts once, however many trajectories it has.
    """
    found = _estimates(inputs, config)
    if config.whiten:
        counts = Counter(e for e, own in zip(inputs.episodes, found, strict=True) if len(own))
        sums = np.zeros(3)
        for episode, own in zip(inputs.episodes, found, strict=True):
            sums += np.array([len(own), own.sum(), (own**2).sum()]) / max(counts[episode], 1)
        number, total, squares = inputs.sum_over_ranks(sums)
        mean = total / max(number, 1)
        deviation = np.sqrt(max(squares / max(number, 1) - mean**2, 0.0))
        found = [(own - mean) / (deviation + _EPSILON) for own in found]
    return _at_trained(found, inputs)


def returns(inputs: AdvantageInputs, config: Gae) -> TokenAdvantages:
    """The targets of the critic: the value of each trained token + its advantage before whitening;
    with lambda = 1 the discounted reward itself."""
    pairs = zip(_estimates(inputs, config), inputs.values, inputs.masks, strict=True)
    return _at_trained([own + values[mask != 0] for own, values, mask in pairs], inputs)


def _estimates(inputs: AdvantageInputs, config: Gae) -> list[Values]:
    """The advantage of each trained token of each trajectory."""
    values = [of[mask != 0] for of, mask in zip(inputs.values, inputs.masks, strict=True)]
    longest = max(map(len, values), default=0)
    # All trajectories at once, whose last tokens stand side by side.
    values_TR = np.zeros((longest + 1, len(values)))  # after the last token there is no value
    for place, own in enumerate(values):
        values_TR[longest - len(own) : longest, place] = own
    found_TR = np.zeros_like(values_TR)
    reward_R = inputs.rewards_E[list(inputs.episodes)]
    for t in reversed(range(longest)):
        delta_R = reward_R + config.gamma * values_TR[t + 1] - values_TR[t]
        found_TR[t] = delta_R + config.gamma * config.gae_lambda * found_TR[t + 1]
        reward_R = np.zeros(len(values))
    return [found_TR[longest - len(own) : longest, i] for i, own in enumerate(values)]


def _at_trained(found: Sequence[Values], inputs: AdvantageInputs) -> TokenAdvantages:
    """[T] of each trajectory: what its trained tokens have, and 0 for the others."""
    spread = [np.zeros(len(mask), np.float32) for mask in inputs.masks]
    for values, mask, own in zip(spread, inputs.masks, found, strict=True):
        values[mask != 0] = own
    return spread


def overlong_penalty(num_tokens: int, config: AdvantageConfig) -> float:
    """The reward that an answer of `num_tokens` generated tokens loses: it rises from 0 at
    `overlong_start` to `overlong_penalty` at `overlong_end` (DAPO, arXiv 2503.14476, eq. 13)."""
    if config.overlong_start is None:
        return 0.0
    assert config.overlong_end is not None
    excess = (num_tokens - config.overlong_start) / (config.overlong_end - config.overlong_start)
    return config.overlong_penalty * min(max(excess, 0.0), 1.0)
