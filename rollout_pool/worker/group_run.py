"""One group of a worker, from its credit to its end.

    generating ──► whole ──► pushed            `GroupRun.work`: may be cancelled at any moment
        │            └─────► filtered: its rewards are all equal
        ├─► failed, too old, stopped           `GroupFinisher.finish`: always follows

While it runs, its samples show their age, length and cost here. `Counters` sends the sums over all
ended groups to the run every second.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from buffer.results import PushResult
from buffer.types import PromptRef, TrajectoryGroup
from rollout_pool.episodes.request import Activity, go_on
from rollout_pool.sampling.sample import Sample
from rollout_pool.tasks.source import EpisodeSource, GroupEnd
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.keep import GroupTokens

SEND_EVERY_S = 1.0
LENGTHS = ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16384, "<=16k"), (65536, "<=64k"))
"""From 1k on the same buckets as for groups that the buffer drops."""
LONGER = ">64k"


class Verdict(Enum):
    """The decision of the variance filter."""

    keep = "keep"
    leave_out = "leave_out"
    keep_all_equal = "keep_all_equal"
    """The rewards are all equal, but the budget is used up."""


@dataclass(kw_only=True, slots=True)
class Spent:
    """Sums over samples."""

    num_tokens: int = 0
    longest: int = 0
    oldest_version: int | None = None
    """The oldest version that sampled one of the tokens; None before the first token."""
    num_failures: int = 0
    num_refused: int = 0
    """Answers refused because of their log-probabilities."""
    num_wasted: int = 0
    """Tokens that were sampled and then lost."""

    def add(self, sample: Sample) -> None:
        self.num_tokens += len(sample.output_ids)
        self.longest = max(self.longest, len(sample.output_ids))
        self.num_failures += sample.num_failures
        self.num_refused += sample.num_refused
        self.num_wasted += sample.num_wasted
        versions = (self.oldest_version, sample.oldest_version)
        self.oldest_version = min((v for v in versions if v is not None), default=None)


@dataclass(kw_only=True, slots=True, eq=False)
class GroupRun:
    """A group in flight and its progress."""

    group_id: str
    ref: PromptRef
    prompt: Prompt
    source: EpisodeSource
    order: int = 0
    """Position among the groups: the lowest is served first."""
    tokens: GroupTokens | None = None
    """What is kept of its tokens; None if nothing is."""
    may_go_on: Callable[[Sample], Awaitable[None]] = go_on
    """Awaited before an interrupted sample is completed. It may change: see `wait_to_go_on`."""
    started: float = field(default_factory=time.monotonic)
    work: asyncio.Task[None] | None = None
    """Generates and pushes the group; may be cancelled."""
    samples: set[Sample] = field(default_factory=set)
    """Samples in progress. Of an ended one only the sums are kept, because prompts are long."""
    group: TrajectoryGroup | None = None
    verdict: Verdict = Verdict.keep
    pushed: PushResult | None = None
    """The buffer's reply to its push."""
    stopped_for: GroupEnd | None = None
    """Why it was cancelled although the run goes on: too_old or idle."""
    activity: Activity = field(default_factory=Activity)
    """Of the programs that run its episodes, if any do."""
    num_unscored: int = 0
    """Number of episodes with an unscored reward part."""
    num_left_open: int = 0
    """Number of episodes that are left out because a part of their reward did not judge them."""
    num_turns: int = 0
    """Of its ended episodes, as `num_branches`."""
    num_branches: int = 0
    _ended: Spent = field(default_factory=Spent, init=False)
    given_up_because: str | None = field(default=None, init=False)
    """The first reason."""

    async def wait_to_go_on(self, sample: Sample) -> None:
        await self.may_go_on(sample)

    def note_sample(self, sample: Sample) -> None:
        """One of its samples is about to be requested."""
        sample.order = self.order  # may have changed since the episode began
        self.samples.add(sample)
        if self.tokens is not None:
            self.tokens.begin(sample)

    def note_end(self, sample: Sample) -> None:
        """One of its samples has ended and will not change any more."""
        if sample in self.samples:
            self.samples.remove(sample)
            self._ended.add(sample)
            if self.tokens is not None:
                self.tokens.end(sample)

    def give_up(self, why: str) -> None:
        """The group will not be finished; its source gets the first reason."""
        if self.given_up_because is None:
            self.given_up_because = why
            self.source.give_up(why)

    def how_ended(self, *, is_done: bool) -> tuple[GroupEnd, str | None]:
        """Once it is settled: how it ended, and the reason if it is not in the buffer."""
        assert self.work is not None
        if not is_done:
            was_stopped = GroupEnd.stopped if self.work.cancelled() else GroupEnd.given_up
            return self.stopped_for or was_stopped, self.given_up_because
        if self.verdict is Verdict.leave_out:
            return GroupEnd.filtered, "its rewards are all equal (rollout.filter_zero_variance)"
        if self.pushed is PushResult.stale:
            return GroupEnd.dropped, "its oldest token was too old for every later step"
        if self.pushed is PushResult.abandoned_lineage:
            return GroupEnd.dropped, "a rollback discarded the weights that sampled it"
        return GroupEnd.pushed, None

    @property
    def num_restored(self) -> int:
        """Tokens that a worker before this one sampled."""
        return 0 if self.tokens is None else self.tokens.num_restored

    @property
    def spent(self) -> Spent:
        spent = replace(self._ended)
        for sample in self.samples:
            spent.add(sample)
        return spent

    @property
    def running(self) -> list[Sample]:
        """Samples that have not ended, including interrupted ones."""
        return [sample for sample in self.samples if sample.finish_reason is None]


class ExternalGroups(Protocol):
    """Groups that external programs have requested."""

    def take(self) -> EpisodeSource | None:
        """The longest-waiting one that is still wanted; None if there is none."""
        ...

    def close(self) -> None:
        """Refuses the waiting requests and all later ones."""
        ...


def length_bucket(num_tokens: int) -> str:
    return next((name for most, name in LENGTHS if num_tokens <= most), LONGER)


class CounterStore(Protocol):
    """The part of RunState used here."""

    async def count(self, name: str, amount: float = 1) -> None: ...


class Counters:
    """Counts that have not been sent yet. Used in one event loop."""

    def __init__(self, store: CounterStore) -> None:
        self._store = store
        self._unsent: Counter[str] = Counter()
        self._sending: asyncio.Task[None] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self._unsent[name] += amount  # type: ignore[assignment]  # seconds are floats

    # Sending --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends every second. Never returns."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends all counts so far. Counts that could not be sent stay for the next flush."""
        # When a flush is cancelled its sending still completes, so that nothing is sent twice; the
        # next flush waits for it.
        if self._sending is not None:
            await asyncio.wait([self._sending])
        self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        sent, self._unsent = self._unsent, Counter()
        results = await asyncio.gather(
            *(self._store.count(name, amount) for name, amount in sent.items()),
            return_exceptions=True,
        )
        errors = []
        for name, result in zip(sent, results, strict=True):
            if isinstance(result, BaseException):
                self.add(name, sent[name])
                errors.append(result)
        if errors:
            raise errors[0]
