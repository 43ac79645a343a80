"""The work of the rollout benchmark: prompts whose answers have lengths with a heavy tail.

The model has no end-of-sequence token, so an answer is exactly as long as it is asked to be, and
every way of scheduling writes the same number of tokens of use.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from benchmarks.rollouts.task import Pauses, text_of
from buffer.types import SamplingParams
from rollout_pool.sampling.sample import Clock, Completer, Sample
from trainer_pool.model.scratch import byte_tokenizer

P99 = 2.326
"""Standard deviations of a normal distribution above its median."""


NO_PAUSES = Pauses()


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkSize:
    num_groups: int = 384
    group_size: int = 4
    batch_groups: int = 16
    """Groups that a step of the trainer takes."""
    max_running: int = 64
    """Requests that the engine decodes at once: a whole synchronous batch."""
    max_staleness: int = 16
    """As many versions as the longest answer takes at a full engine, about."""
    short_leash: int = 4
    median_tokens: int = 24
    p99_over_p50: float = 21.0
    longest: int = 1600
    pauses: Pauses = NO_PAUSES
    oversampling: float = 1.0
    """Groups that run at once in batches of those that end first, over those that fill the engine.
    """
    hidden: int = 128
    layers: int = 2
    rounds: int = 1
    """How often every strategy runs; the medians count."""
    pairs: int = 6
    """How often the pool and bare load take turns."""
    stub_latency_s: float = 2.0
    stub_in_flight: int = 2400
    cost_groups: int = 400
    fleets: tuple[int, ...] = (8, 64, 256)
    """Numbers of engines."""
    fleet_groups: int = 400
    fleet_rounds: int = 3
    fleet_idle_s: float = 5.0
    reward_s: float = 1.0
    """As long as generation takes, too."""
    reward_processes: int = 16
    reward_rounds: int = 20
    gpu_groups: int = 192
    gpu_tails: tuple[float, ...] = (5.0, 20.0, 50.0)
    """Weights of the tail: 99th percentile of the lengths over their median."""
    gpu_median_tokens: int = 64
    gpu_longest: int = 2048
    gpu_train_s: tuple[float, ...] = (1.5, 3.0, 6.0)
    """Emulated seconds of a training step: about half, once and twice those of its generation."""
    gpu_rounds: int = 3
    gpu_speed: float = 6.0
    """Seconds of the emulated GPU per second."""
    scale_engines: int = 16
    scale_speed: float = 6.0
    scale_groups: int = 21
    """A step takes so many groups of 16 requests, each of which stands for 4."""
    scale_places: int = 32
    """Requests that an engine runs at once; 128 of the GPU."""
    scale_steps: int = 14
    scale_staleness: int = 8
    works_speed: float = 50.0
    works_engines: int = 6
    works_places: int = 16
    works_groups: int = 16
    """A step's, of 4 requests each."""
    works_steps: int = 12
    rules_steps: int = 120
    """Under a virtual clock."""
    rules_seeds: tuple[int, ...] = (0, 1)
    prefix_tokens: int = 2000
    prefix_turns: int = 8
    prefix_hidden: int = 256
    """Width of a model large enough that a prompt costs more than the overhead of a request."""


SHORT = WorkSize(
    num_groups=12, group_size=2, batch_groups=4, max_running=8, median_tokens=4, longest=40,
    pairs=1, stub_latency_s=0.2, stub_in_flight=40, reward_s=0.1, reward_processes=2,
    reward_rounds=5, gpu_groups=12, gpu_tails=(5.0,), gpu_median_tokens=8, gpu_longest=64,
    gpu_train_s=(0.5,), gpu_rounds=1, cost_groups=20, fleets=(2, 4), fleet_groups=20,
    fleet_rounds=1, fleet_idle_s=0.5, scale_engines=2, scale_speed=2000.0, scale_groups=2,
    scale_steps=4, scale_staleness=2, works_speed=2000.0, works_engines=3, works_places=4,
    works_groups=2, works_steps=4, rules_steps=16, rules_seeds=(0,),
    prefix_tokens=200, prefix_turns=2, prefix_hidden=128,
)  # fmt: skip


class Job:
    """One group: a prompt and how long each of its answers is."""

    def __init__(self, index: int, lengths: tuple[int, ...], pauses: Pauses = NO_PAUSES) -> None:
        self.index, self.lengths, self.pauses = index, lengths, pauses
        self.prompt = list(_tokenizer().encode(text_of(index)))
        """One token a byte."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


_tokenizer = cache(byte_tokenizer)


def equal_jobs(num_groups: int, group_size: int, length: int) -> list[Job]:
    return [Job(index, (length,) * group_size) for index in range(num_groups)]


def draw_jobs(size: WorkSize, seed: int) -> list[Job]:
    """Lengths are lognormal: one in a hundred is `p99_over_p50` times the median or longer."""
    numbers = np.random.default_rng(seed)
    sigma = np.log(size.p99_over_p50) / P99
    drawn = size.median_tokens * np.exp(
        sigma * numbers.standard_normal((size.num_groups, size.group_size))
    )
    lengths = np.clip(drawn.round(), size.pauses.turns, size.longest).astype(int)
    return [Job(index, tuple(map(int, row)), size.pauses) for index, row in enumerate(lengths)]


class Lengths:
    """Gives each answer to a prompt its length, by the order in which they are asked for, and each
    turn its part of it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = {tuple(job.prompt): job for job in jobs}
        self._num_prompt = len(jobs[0].prompt)
        self._numbers: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._turns: dict[str, list[int]] = {}
        """Lengths of the turns that a session has before it."""

    def of(self, sample: Sample) -> int:
        turns = self._turns.pop(sample.session, None)
        if not turns:
            job = self._jobs[tuple(sample.prompt[: self._num_prompt])]
            whole = job.lengths[next(self._numbers[job.index]) % len(job.lengths)]
            turns = [b - a for a, b in itertools.pairwise([0, *job.pauses.ends(whole)])]
        if turns[1:]:
            self._turns[sample.session] = turns[1:]
        return turns[0]


class LimitedCompleter:
    """Completes samples to the lengths that the work gives them."""

    def __init__(self, completer: Completer, lengths: Lengths) -> None:
        self._completer = completer
        self._lengths = lengths

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        if not sample.num_attempts:
            sample.max_new_tokens = self._lengths.of(sample)
        await self._completer.complete(sample, clock)

    def interrupt(self, sample: Sample) -> None:
        self._completer.interrupt(sample)


def now() -> float:
    """The clock of the loop, which may be a virtual one."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Tally:
    """Counts of one strategy's work."""

    started: float
    ends: list[float] = field(default_factory=list)
    """When each group was delivered."""
    num_steps: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each group, in the order of their delivery."""
    ages: list[int] = field(default_factory=list)
    """Steps since the weights of each group's oldest token."""
    used_tokens: int = 0
    wasted_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of groups and samples that were given up before the end; for ours alone."""

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.started

    @property
    def groups_per_s(self) -> float:
        return len(self.ends) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.used_tokens / self.seconds

    @property
    def wasted(self) -> float:
        return self.wasted_tokens / max(1, self.used_tokens + self.wasted_tokens)

    @property
    def early_length(self) -> float:
        """Mean length of the groups that the first half of the steps trained, over that of all."""
        half = self.lengths[: max(1, len(self.lengths) // 2)]
        return (sum(half) / len(half)) / (sum(self.lengths) / len(self.lengths))

    def deliver(self, num_tokens: Sequence[int], ages: Sequence[int] = ()) -> None:
        """A step took groups of so many tokens each."""
        self.ages += ages
        self.used_tokens += sum(num_tokens)
        self.lengths += num_tokens
        self.ends += [now()] * len(num_tokens)
        self.num_steps += 1

    def done_after(self, share: float) -> float:
        """Seconds until this share of the groups was there."""
        return self.ends[max(0, round(share * len(self.ends)) - 1)] - self.started


def new_sample(job: Job, member: int, attempt: int) -> Sample:
    return Sample(
        sample_id=f"job-{job.index}.{attempt}.{member}",
        prompt=job.prompt,
        sampling=SamplingParams(),
        max_new_tokens=job.lengths[member],
        order=job.index,
    )
