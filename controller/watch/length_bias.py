"""Whether a run trains answers as long as it samples them, measured while it runs (pure).

Groups that grow too old are given up, and they are those with the longest answers. The length that
such an answer would have had is unknown: it is at least what there was. So the mean sampled is not
that of the answers that ended. It is estimated in two parts:

    up to the longest that ended     a life table (Kaplan-Meier): of the answers that reached this
                                     length, which fraction ended there?
    beyond, where none ends          the lengths go on as lognormal: through the median and the
                                     fraction that got so far, up to rollout.max_response_tokens

Only first draws count: a prompt that runs again does so because its answers were long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, isfinite, log
from operator import itemgetter
from statistics import NormalDist
from typing import NamedTuple

from configs.choices import OnStale
from configs.run_files import Scalar
from controller.metrics.history import Record, below
from controller.watch.finding import Finding, alarm

BIASED = 0.95
"""A mean trained below this fraction of the mean sampled is a bias."""
SUFFICIENT = 0.99
"""The fraction to aim at with single answers: a group is given up for its longest one."""
FEWEST = 200
"""Answers from which a ratio is more than chance."""
LARGEST_STALENESS = 64
"""A larger one is not advised."""
MIDDLE = 2**0.25
"""The middle of a class of lengths, as a multiple of its least."""
NUM_BEYOND = 50
"""Parts into which the answers are divided that are longer than any that ended."""
CUT, ENDED, TOKENS, VERSIONS = "answers_cut:", "answers_ended:", "answer_tokens:", "answer_versions"


@dataclass(kw_only=True, slots=True, frozen=True)
class Lengths:
    """Tokens of the answers of a window."""

    trained_mean: float
    ended_mean: float
    """The mean of the answers that were not given up."""
    sampled: Sequence[tuple[float, float]]
    """Length and fraction of the answers, in ascending order; the fractions add up to 1."""
    given_up: Mapping[int, float]
    """By length: the fraction of the answers that reached it and were given up, if any."""
    tokens_per_version: float
    """Tokens of an answer from one version of its engine to the next; inf if none met two."""

    @property
    def sampled_mean(self) -> float:
        return _mean(self.sampled)

    @property
    def ratio(self) -> float:
        return self.trained_mean / self.sampled_mean

    @property
    def sufficient_staleness(self) -> int | None:
        """The smallest max_staleness under which the answers that are not given up are as long as
        those that are sampled, nearly; None if that would be too large."""
        for staleness in range(1, LARGEST_STALENESS + 1):
            # The trainer is a version ahead of the engines.
            most = self.tokens_per_version * (staleness - 1)
            kept = [part for part in self.sampled if part[0] <= most]
            if kept and most < inf and _mean(kept) >= SUFFICIENT * self.sampled_mean:
                return staleness
        return None

    def values(self) -> dict[str, Scalar]:
        """The values of a `lengths` record."""
        return {
            "trained_mean": self.trained_mean,
            "sampled_mean": self.sampled_mean,
            "ratio": self.ratio,
            **{f"given_up/{length}": share for length, share in self.given_up.items()},
        }


class _Class(NamedTuple):
    """Answers of about the same length."""

    least: int
    ended: float
    cut: float
    tokens: float
    """All tokens of those that ended."""


def measure_lengths(
    grown: Mapping[str, float], steps: Sequence[Record], most_tokens: int
) -> Lengths | None:
    """From what the workers counted in a window and the steps in it; None for too few answers."""
    names = {
        name for prefix in (ENDED, CUT) for _, name in below(grown, prefix) if name.isdecimal()
    }
    classes = [
        _Class(int(name), *(grown.get(prefix + name, 0.0) for prefix in (ENDED, CUT, TOKENS)))
        for name in sorted(names, key=int)
    ]
    trained = [(step.number("response_length_mean"), step.count("num_groups")) for step in steps]
    num_ended = sum(one.ended for one in classes)
    if (
        not any(number for _, number in trained)
        or not num_ended
        or num_ended + sum(one.cut for one in classes) < FEWEST
    ):
        return None
    num_cut = num_all = 0.0
    given_up = {}
    for one in reversed(classes):
        num_cut, num_all = num_cut + one.cut, num_all + one.cut + one.ended
        if num_cut:
            given_up[one.least] = num_cut / num_all
    # Trained lengths are those of branches, of which an episode may have several.
    num_episodes = sum(grown[name] for name, _ in below(grown, "episodes_ended:"))
    branches = grown.get("branches", 0.0) / num_episodes if num_episodes else 1.0
    versions = grown.get(VERSIONS, 0.0)
    sampled = sum(one.tokens + MIDDLE * one.least * one.cut for one in classes)
    found = Lengths(
        trained_mean=_mean(trained) * branches,
        ended_mean=sum(one.tokens for one in classes) / num_ended,
        sampled=_life_table(classes, most_tokens),
        given_up=given_up,
        tokens_per_version=sampled / versions if versions else inf,
    )
    return found if found.sampled_mean > 0 and isfinite(found.trained_mean) else None


def length_bias(lengths: Lengths, max_staleness: int, on_stale: OnStale) -> Finding | None:
    """A bias by the age of answers; other causes, as a filter, are no part of it."""
    if on_stale not in (OnStale.requeue, OnStale.drop) or not lengths.given_up:
        return None
    if not max(lengths.trained_mean, lengths.ended_mean) < BIASED * lengths.sampled_mean:
        return None
    length, share = max(lengths.given_up.items(), key=itemgetter(1))
    words = (
        f"long answers are trained too rarely: the mean trained, {lengths.trained_mean:.0f} tokens,"
        f" is {lengths.ratio:.2f} of the mean sampled, {lengths.sampled_mean:.0f}, as {share:.0%} "
        f"of those from {length} tokens on are given up"
    )
    enough, wait = lengths.sufficient_staleness, "buffer.on_stale=wait trains all"
    if enough is None or enough <= max_staleness:
        return alarm("length bias", words, wait)
    per_version = f"an answer meets a version every {lengths.tokens_per_version:.0f} tokens"
    advice = f"{per_version}: buffer.max_staleness={enough} would do; {wait}"
    return alarm("length bias", words, advice, f"buffer.max_staleness={enough}")


def _life_table(classes: Sequence[_Class], most_tokens: int) -> list[tuple[float, float]]:
    parts, left = list[tuple[float, float]](), 1.0
    at_risk = sum(one.ended + one.cut for one in classes)
    beyond: list[tuple[float, float]] = []
    """Lengths and numbers of the answers that were cut off where none ends any more."""
    for one in classes:
        if one.ended:
            # Those that were cut off somewhere in this class count half.
            fraction = left * one.ended / (at_risk - one.cut / 2)
            parts.append((one.tokens / one.ended, fraction))
            left -= fraction
            beyond.clear()
        if one.cut:
            beyond.append((MIDDLE * one.least, one.cut))
        at_risk -= one.ended + one.cut
    if beyond:
        parts += _lognormal(parts, max(parts[-1][0], _mean(beyond)), left, most_tokens)
    total = sum(fraction for _, fraction in parts)
    return [(length, fraction / total) for length, fraction in parts]


def _lognormal(
    parts: Sequence[tuple[float, float]], start: float, left: float, most_tokens: int
) -> list[tuple[float, float]]:
    """The fraction `left` of the answers, which are longer than `start`."""
    shape = 0.0  # if more than half are longer, the median is unknown: as short as they can be
    if left < 0.5:
        so_far = accumulate(fraction for _, fraction in parts)
        reached = (part[0] for part, up_to in zip(parts, so_far, strict=True) if up_to >= 0.5)
        median = next(reached, start)
        shape = log(max(start / max(median, 1.0), 1.0)) / -_NORMAL.inv_cdf(left)
    # Just below one half the shape says nothing, and is huge.
    most = log(max(start, most_tokens) / start)
    found = []
    for number in range(NUM_BEYOND):
        longer = left * (1 - (number + 0.5) / NUM_BEYOND)
        growth = min(most, shape * (_NORMAL.inv_cdf(left) - _NORMAL.inv_cdf(longer)))
        found.append((start * exp(growth), left / NUM_BEYOND))
    return found


_NORMAL = NormalDist()


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    """The mean of numbers with their weights."""
    return sum(number * weight for number, weight in parts) / sum(weight for _, weight in parts)
