"""One group of a worker, from its credit to its end.

    generating ──► whole ──► pushed            `GroupRun.work`: may be cancelled at any moment
        │            └─────► filtered: its rewards are all equal
        ├─► failed, too old, stopped           `GroupFinisher.finish`: always follows

While it runs, its samples are visible here: how old and how long they are, and what they cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from buffer.types import PromptRef, TrajectoryGroup
from rollout_pool.episodes.runner import go_on
from rollout_pool.sampling.sample import Sample
from rollout_pool.tasks.environments import EpisodeSource
from rollout_pool.tasks.task import Prompt


class Verdict(Enum):
    """What the filter of groups without variance decided."""

    keep = "keep"
    leave_out = "leave_out"
    keep_all_equal = "keep_all_equal"
    """Its rewards are all equal, but the budget is used up."""


@dataclass(kw_only=True, slots=True)
class _Ended:
    """Sums over the samples that have ended."""

    num_tokens: int = 0
    longest: int = 0
    oldest_version: int | None = None
    num_failures: int = 0
    num_refused: int = 0
    num_wasted: int = 0

    def add(self, sample: Sample) -> None:
        self.num_tokens += len(sample.output_ids)
        self.longest = max(self.longest, len(sample.output_ids))
        self.num_failures += sample.num_failures
        self.num_refused += sample.num_refused
        self.num_wasted += sample.num_wasted
        if (version := sample.oldest_version) is not None:
            known = self.oldest_version
            self.oldest_version = version if known is None else min(known, version)


@dataclass(kw_only=True, slots=True, eq=False)
class GroupRun:
    """A group in flight, and how far it has come."""

    group_id: str
    ref: PromptRef
    prompt: Prompt
    source: EpisodeSource
    """Plays its episodes."""
    order: int = 0
    """Its position among the groups: the lowest is served first."""
    may_go_on: Callable[[Sample], Awaitable[None]] = go_on
    """Awaited before an interrupted sample is completed."""
    started: float = field(default_factory=time.monotonic)
    work: asyncio.Task[None] | None = None
    """Generates and pushes the group; may be cancelled."""
    samples: set[Sample] = field(default_factory=set)
    """Those under way. Of an ended sample only its numbers are kept, because prompts are long."""
    group: TrajectoryGroup | None = None
    """Set once it is whole."""
    verdict: Verdict = Verdict.keep
    is_too_old: bool = False
    """No later step could train its oldest token."""
    num_unscored: int = 0
    """Number of episodes with an unscored reward part."""
    _ended: _Ended = field(default_factory=_Ended, init=False)
    _is_given_up: bool = field(default=False, init=False)

    def note_sample(self, sample: Sample) -> None:
        """One of its samples is about to be requested."""
        sample.order = self.order  # may have changed since its episode began
        self.samples.add(sample)

    def note_end(self, sample: Sample) -> None:
        """One of its samples has ended; nothing in it changes any more."""
        if sample in self.samples:
            self.samples.remove(sample)
            self._ended.add(sample)

    def give_up(self, why: str) -> None:
        """The group will not be finished; its source learns the first reason."""
        if not self._is_given_up:
            self._is_given_up = True
            self.source.give_up(why)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled one of its tokens; None before the first token."""
        versions = [self._ended.oldest_version, *(one.oldest_version for one in self.samples)]
        return min((version for version in versions if version is not None), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._ended.num_tokens + sum(len(one.output_ids) for one in self.samples)

    @property
    def longest(self) -> int:
        """Number of tokens of its longest sample so far."""
        return max([self._ended.longest, *(len(one.output_ids) for one in self.samples)])

    @property
    def num_failures(self) -> int:
        """Requests that failed."""
        return self._ended.num_failures + sum(one.num_failures for one in self.samples)

    @property
    def num_running(self) -> int:
        """Samples that have not ended, including interrupted ones."""
        return sum(sample.finish_reason is None for sample in self.samples)

    @property
    def num_refused(self) -> int:
        """Answers refused because of their log-probabilities."""
        return self._ended.num_refused + sum(one.num_refused for one in self.samples)

    @property
    def num_wasted(self) -> int:
        """Tokens that were sampled and then lost."""
        return self._ended.num_wasted + sum(one.num_wasted for one in self.samples)


class ExternalGroups(Protocol):
    """Groups that programs elsewhere have asked for."""

    def take(self) -> EpisodeSource | None:
        """The one that has waited longest and is still wanted; None if there is none."""
        ...

    def close(self) -> None:
        """Refuses those that wait, and all that come later."""
        ...


class EpisodeSources:
    """Chooses who plays the next group: a program elsewhere that waits for one, else `own`."""

    def __init__(self, own: EpisodeSource, external: ExternalGroups | None = None) -> None:
        self._own = own
        self._external = external

    def take(self) -> EpisodeSource:
        external = None if self._external is None else self._external.take()
        return external or self._own

    def close(self) -> None:
        """No further group starts; those that programs elsewhere wait for are refused."""
        if self._external is not None:
            self._external.close()
