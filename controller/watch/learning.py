"""Detects from step records that a run no longer learns (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from configs.run_files import parse_json
from controller.metrics.history import Record, series
from controller.units import format_number_of
from controller.watch.finding import Finding, alarm

WINDOW = 10
"""Steps over which reward and length are averaged."""
MIN_STEPS_WITHOUT_VARIANCE = 3
COLLAPSED = 0.25
"""Remaining share of the best reward, measured from the lowest one (0 if none is negative)."""
MUCH_LONGER = 2.0
MANY_TRUNCATED = 0.5
LARGE_LOGPROB_DIFF = 0.25
"""Nats, on average: importance ratios are then wrong by a quarter. At half of the run's own bound,
which ends it, if that is less."""


def learning_alarms(steps: Sequence[Record]) -> list[Finding]:
    """The alarms after the last of `steps`."""
    found = (_gradient(steps), _variance(steps), _reward(steps), _length(steps), _engines(steps))
    return [one for one in found if one is not None]


_SKIPPED = {
    "num_spikes": (
        "gradient norm far above the usual",
        "trainer.max_grad_spike says how far; lower trainer.learning_rate if it goes on",
    ),
    "num_low_ess": (
        "few tokens carry them",
        "the effective sample size is below trainer.min_ess; lower buffer.max_staleness, or see "
        "ess/staleness_* in metrics.jsonl for the tokens at fault",
    ),
}
"""By the metric that counts skipped updates: why, and what to do."""


def has_no_gradient(step: Record) -> bool:
    """Returns whether every update of the step was skipped because its gradient was zero."""
    num_updates = step.number("num_updates")
    if num_updates == 0 and step.number("num_tokens") > 0:  # a later step makes the update
        return False
    return step.number("num_empty_updates") == num_updates


def _gradient(steps: Sequence[Record]) -> Finding | None:
    if number := _num_trailing(steps, "num_skipped_updates"):
        found = str(steps[-1].values.get("not_finite_groups", "[]"))
        groups = parse_json(found, list[str], "not_finite_groups of a record of kind 'step'")
        source = f", last of {', '.join(groups[:3])}" if groups else ""
        return alarm(
            part="trainer",
            words=f"a gradient was not finite ({format_number_of(number, 'step')}{source})",
            advice="such updates are skipped; lower trainer.learning_rate or "
            "trainer.max_grad_norm, and check num_bounded_tokens",
        )
    for name, (why, advice) in _SKIPPED.items():
        if number := _num_trailing(steps, name):
            words = f"updates skipped: {why} ({format_number_of(number, 'step')})"
            return alarm("trainer", words, advice)
    number = _trailing(steps, has_no_gradient)
    if not number:
        return None
    part = "trainer"
    advice = "every token was clipped or rejected, or every group's rewards are equal"
    if (cut := steps[-1].number("truncated_fraction")) >= MANY_TRUNCATED:
        advice = (
            f"{cut:.0%} of the answers are cut off at the limit, of which "
            "algorithm.advantage.mask_truncated=true trains none; raise "
            "rollout.max_response_tokens, or train them with mask_truncated=false"
        )
    elif steps[-1].number("zero_variance_fraction") >= 1:
        part, advice = "rewards", _equal_rewards(steps[-1])
    return alarm(
        part=part,
        words=f"no gradient, weights unchanged ({format_number_of(number, 'step')})",
        advice=advice,
    )


def _variance(steps: Sequence[Record]) -> Finding | None:
    number = _trailing(steps, lambda step: step.number("zero_variance_fraction") >= 1)
    if number < MIN_STEPS_WITHOUT_VARIANCE:
        return None
    words = f"all groups lack variance ({format_number_of(number, 'step')})"
    return alarm("rewards", words, _equal_rewards(steps[-1]))


def _equal_rewards(step: Record) -> str:
    return (
        "groups with equal rewards teach nothing; the mean reward "
        f"is {step.number('reward_mean'):.2f}: the prompts are too hard, too easy, or scored "
        "wrongly (`make show` shows answers with their rewards)"
    )


def _reward(steps: Sequence[Record]) -> Finding | None:
    rewards = series(steps, "reward_mean")
    means = _running_means(rewards)
    if len(rewards) < 2 * WINDOW:
        return None
    best, recent, floor = max(means[:-WINDOW]), means[-1], min(0.0, *rewards)
    if recent - floor >= COLLAPSED * (best - floor):
        return None
    return alarm(
        part="trainer",
        words=f"reward collapsed from {best:.2f} to {recent:.2f}",
        advice="go back to an earlier checkpoint with a lower trainer.learning_rate or a smaller "
        "buffer.max_staleness, and check entropy, ratios and lengths before the collapse",
    )


def _length(steps: Sequence[Record]) -> Finding | None:
    cut = _ends(steps, "truncated_fraction")
    if cut[1] >= MANY_TRUNCATED:
        return alarm(
            part="rollout",
            words=f"{cut[1]:.0%} of the answers are cut off at the limit ({cut[0]:.0%} at first)",
            advice="raise rollout.max_response_tokens, or reward short answers; "
            "algorithm.advantage.mask_truncated=true trains none of those that are cut off",
        )
    if len(steps) < 2 * WINDOW:
        return None
    lengths, rewards = _ends(steps, "response_length_mean"), _ends(steps, "reward_mean")
    if lengths[1] > MUCH_LONGER * lengths[0] and rewards[1] <= rewards[0]:
        return alarm(
            part="rollout",
            words=f"answers grew from {lengths[0]:.0f} to {lengths[1]:.0f} tokens without reward",
            advice="reward short answers, or lower rollout.max_response_tokens",
        )
    return None


def _engines(steps: Sequence[Record]) -> Finding | None:
    recent = series(steps[-WINDOW:], "logprob_diff_mean")
    bounds = series(steps[-1:], "logprob_diff_bound")
    most = min([LARGE_LOGPROB_DIFF, *(bound / 2 for bound in bounds)])
    if not recent or (mean := sum(recent) / len(recent)) <= most:
        return None
    return alarm(
        part="engines",
        words=f"engines and trainer disagree by {mean:.2f} nats per token",
        advice="the engines serve other weights, or compute them differently; compare model, "
        "dtype and chat template of both",
    )


def _num_trailing(steps: Sequence[Record], name: str) -> int:
    return _trailing(steps, lambda step: step.number(name) > 0)


def _trailing(steps: Sequence[Record], holds: Callable[[Record], bool]) -> int:
    """Number of consecutive steps, up to the last one, for which it holds."""
    return sum(1 for _ in takewhile(holds, reversed(steps)))


def _ends(steps: Sequence[Record], name: str) -> tuple[float, float]:
    """Means of the first and of the last steps; NaN if not measured."""
    means = _running_means(series(steps, name))
    return (means[0], means[-1]) if means else (math.nan, math.nan)


def _running_means(values: Sequence[float]) -> list[float]:
    """Over each `WINDOW` neighbours; empty if there are fewer."""
    totals = [0.0]
    for value in values:
        totals.append(totals[-1] + value)
    return [(b - a) / WINDOW for a, b in zip(totals, totals[WINDOW:], strict=False)]
