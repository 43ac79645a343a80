"""Compares the lengths that a run trained with those that were sampled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from configs.choices import TailPolicy
from controller.metrics.history import Record
from controller.watch.length_bias import measure_lengths
from tests.soak.lengths.clients import Checkpoint, Trained
from tests.soak.lengths.scene import Scene, read_draws

NUM_TERMS = 100
SAID_WITHIN = 0.15
LONG = 0.95
"""Samples above this quantile are long."""


def kolmogorov_smirnov(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """The two-sample statistic, and the probability of one as large by chance (asymptotic).

    With ties, as whole numbers have, and with samples of which most are the same draws, the true
    probability is smaller.
    """
    sizes = len(one), len(other)
    points = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (one, other)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    root = np.sqrt(sizes[0] * sizes[1] / sum(sizes))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:  # the series does not converge; it is 1 to 12 digits
        return distance, 1.0
    k = np.arange(1, NUM_TERMS)
    p = 2 * np.sum((-1.0) ** (k - 1) * np.exp(-2 * (k * scaled) ** 2))
    return distance, float(np.clip(p, 0, 1))


@dataclass(kw_only=True)
class Comparison:
    """Compares the first prompts of a run, each of which is trained or lost."""

    scene: Scene
    checkpoint: Checkpoint
    counters: Mapping[str, float]
    """Counts of the worker."""
    num_resumes: int = 0

    @cached_property
    def rows(self) -> list[Trained]:
        first = range(self.scene.num_prompts)
        return [row for row in self.checkpoint.trained if row.index in first]

    @cached_property
    def sampled(self) -> list[int]:
        """First draws."""
        return [n for i in range(self.scene.num_prompts) for n in self._first_lengths(i)]

    def _first_lengths(self, index: int) -> tuple[int, ...]:
        places = range(self.scene.group_size)
        return tuple(self.scene.length(index, place, 0) for place in places)

    @cached_property
    def trained(self) -> list[int]:
        """Lengths without masked tokens."""
        return [length for row in self.rows for length in row.trainable]

    @property
    def num_lost(self) -> int:
        return self.scene.num_prompts - len(self.rows)

    @property
    def num_changed(self) -> int:
        """Prompts whose trained samples are not all as they were drawn first."""
        return sum(row.trainable != self._first_lengths(row.index) for row in self.rows)

    @cached_property
    def test(self) -> tuple[float, float]:
        return kolmogorov_smirnov(self.sampled, self.trained)

    @property
    def p(self) -> float:
        return self.test[1]

    @property
    def mean_ratio(self) -> float:
        return float(np.mean(self.trained) / np.mean(self.sampled))

    @property
    def said_ratio(self) -> float:
        """The mean ratio as a running job measures it, without the lengths of what is given up."""
        values = {"response_length_mean": float(np.mean(self.trained)), "num_groups": 1.0}
        step = Record(t=0.0, kind="step", values=values)
        lengths = measure_lengths(self.counters, [step], self.scene.longest)
        return math.nan if lengths is None else lengths.ratio

    @property
    def long_ratio(self) -> float:
        """Share of long samples among the trained, over that among the sampled."""
        border = np.quantile(self.sampled, LONG)
        shares = [np.mean(np.asarray(x) > border) for x in (self.trained, self.sampled)]
        return float(shares[0] / shares[1])

    def faults(self) -> list[str]:
        """Lists violations of rules that hold for every policy."""
        found = []
        times = Counter(row.index for row in self.rows)
        found += [f"prompt {index} was trained {n} times" for index, n in times.items() if n > 1]
        drawn = {(d.group_id, d.place): d.length for d in read_draws(self.scene)}
        for row in self.rows:
            # One that had the greatest length when it was kept had ended: it is not drawn again.
            last = tuple(
                drawn.get((row.group_id, place), self.scene.longest)
                for place in range(self.scene.group_size)
            )
            if row.lengths != last:
                found.append(f"group {row.group_id} has {row.lengths} tokens, not {last}")
        policy = self.scene.policy
        draws_once = policy.tail is TailPolicy.continue_across_versions and not self.num_resumes
        if draws_once and not abs(self.said_ratio - self.mean_ratio) < SAID_WITHIN:
            found.append(f"it says {self.said_ratio:.2f} of a mean ratio of {self.mean_ratio:.2f}")
        if policy.is_unbiased:
            if self.num_lost:
                found.append(f"{self.num_lost} prompts were lost")
            if self.num_changed and not self.num_resumes:
                found.append(f"{self.num_changed} groups are not those that were sampled first")
            if self.p <= 0.01:
                found.append(f"trained lengths are others than the sampled ones: p={self.p:.2g}")
        return found

    HEADER = (
        "| max_staleness | on_stale | tail | others | resumes | trained | lost | KS | p | mean "
        "| said | long | versions |"
        "\n|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )

    def __str__(self) -> str:
        distance, p = self.test
        cells = [
            *self.scene.policy.words,
            str(self.num_resumes),
            f"{len(self.rows)}",
            str(self.num_lost),
            f"{distance:.3f}",
            "1" if p > 0.995 else f"{p:.2f}" if p > 0.01 else f"{p:.0e}",
            f"{self.mean_ratio:.2f}",
            f"{self.said_ratio:.2f}",
            f"{self.long_ratio:.2f}",
            str(max(row.num_versions for row in self.rows)),
        ]
        return f"| {' | '.join(cells)} |"
