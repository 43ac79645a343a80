"""The samples of one group, from their beginning to their end, and what they have cost.

    begin ──► completed ─────────────► end
                │   ▲
    interrupted ▼   │ released, or waited for long enough
            wait_released

Only a tail policy (worker/stragglers.py) holds groups, and releases them again by order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from rollout_pool.sampling.sample import Sample


class Answer(NamedTuple):
    """How long a sample has become."""

    session: str
    num_tokens: int
    oldest: int
    newest: int
    """The versions of its first and its last token; 0 without any."""

    @classmethod
    def of(cls, sample: Sample) -> Answer:
        versions = [span.version for span in sample.version_spans] or [0]
        return cls(sample.session, len(sample.output_ids), versions[0], versions[-1])


@dataclass(kw_only=True, slots=True)
class Spent:
    """Sums over samples; see Sample for what they count."""

    num_tokens: int = 0
    longest: int = 0
    oldest_version: int | None = None
    """The oldest version that sampled one of the tokens; None before the first token."""
    num_failures: int = 0
    num_refused: int = 0
    num_wasted: int = 0
    answers: tuple[Answer, ...] = ()

    def add(self, sample: Sample) -> None:
        self.num_tokens += len(sample.output_ids)
        self.longest = max(self.longest, len(sample.output_ids))
        self.num_failures += sample.num_failures
        self.num_refused += sample.num_refused
        self.num_wasted += sample.num_wasted
        self.answers += (Answer.of(sample),)
        versions = (self.oldest_version, sample.oldest_version)
        self.oldest_version = min((v for v in versions if v is not None), default=None)


@dataclass(kw_only=True, slots=True, eq=False)
class Activity:
    """Counts the model calls of the programs that run a group's episodes."""

    _num_sessions: int = 0
    _num_requests: int = 0
    _since: float = field(default_factory=time.monotonic)
    """Time of the last change."""
    alone_s: float = 0.0
    """Seconds in which an open session had no request, summed over them."""

    def note(self, *, sessions: int = 0, requests: int = 0) -> None:
        """Adds to the numbers of open sessions and running requests; negative when some end."""
        now = time.monotonic()
        self.alone_s += (now - self._since) * max(0, self._num_sessions - self._num_requests)
        self._num_sessions += sessions
        self._num_requests += requests
        self._since = now

    @property
    def idle_s(self) -> float:
        """Time for which its open sessions have had no request; 0 if none is open."""
        if self._num_requests or not self._num_sessions:
            return 0.0
        return time.monotonic() - self._since


class Keeper(Protocol):
    """Keeps the tokens of samples while they grow; see kept_tokens.GroupTokens."""

    def begin(self, sample: Sample) -> None: ...
    def end(self, sample: Sample) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class GroupSamples:
    """A group's samples in progress, sums over all, and whether interrupted ones may go on.

    Example, where the policy stops the only sample of a group for a new version:

        samples = GroupSamples(group="0-7-ab12cd34", order=7)
        samples.begin(sample)                # samples.running == [sample]
        samples.hold(60.0)
        completer.interrupt(sample)
        await samples.wait_released(sample)  # in its task, until samples.release() or for 60 s
        samples.end(sample)                  # none is in_progress, samples.spent has its tokens
    """

    group: str = ""
    """See Sample.group."""
    order: int = 0
    """Place among the groups: the lowest is served first."""
    keeper: Keeper | None = None
    """Keeps the tokens of its samples."""
    is_external: bool = False
    """External programs run its episodes."""
    started: float = field(default_factory=time.monotonic)
    activity: Activity = field(default_factory=Activity)
    in_progress: set[Sample] = field(default_factory=set)
    """Samples in progress. Of an ended one only the sums are kept, because prompts are long."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of its episodes by what they did beside their requests."""
    have_begun: bool = False
    """At least one sample has been requested."""
    num_resumed: int = 0
    """Interrupted samples that went on."""
    _ended: Spent = field(default_factory=Spent)
    _waiting: dict[Sample, asyncio.Future[None]] = field(default_factory=dict)
    _longest_wait_s: float = 0.0
    """0 unless the group is held."""
    _keep_partial: bool = True

    def begin(self, sample: Sample) -> None:
        """Call before the sample is requested; may give it tokens of a worker before this one."""
        sample.order = self.order
        self.have_begun = True
        self.in_progress.add(sample)
        if self.keeper is not None:
            self.keeper.begin(sample)

    def end(self, sample: Sample) -> None:
        """The sample will not change any more. Does nothing for one that is not in progress."""
        if sample in self.in_progress:
            self.in_progress.remove(sample)
            self._ended.add(sample)
            if self.keeper is not None:
                self.keeper.end(sample)

    @contextlib.contextmanager
    def timing(self, what: str, num_episodes: int = 1) -> Iterator[None]:
        """Adds the seconds of a block for each of so many episodes that wait for it."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += num_episodes * (time.monotonic() - began)

    async def wait_released(self, sample: Sample) -> None:
        """Returns when an interrupted sample may go on."""
        # Dropped before the wait, so that its old tokens do not make the group too old meanwhile.
        # A client of the endpoint may have read its tokens (`on_tokens`): those stay.
        if not self._keep_partial and sample.on_tokens is None:
            sample.drop_tokens()
        if self.is_held:
            released = self._waiting[sample] = asyncio.get_running_loop().create_future()
            try:
                with self.timing("held"), contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._longest_wait_s):
                        await released
            finally:
                del self._waiting[sample]
        self.num_resumed += 1

    def hold(self, longest_wait_s: float, *, keep_partial: bool = True) -> None:
        """Interrupted samples wait from now on, each for at most this time, and keep their tokens
        or lose them."""
        self._longest_wait_s, self._keep_partial = longest_wait_s, keep_partial

    def release(self) -> None:
        """Lets interrupted samples go on."""
        self._longest_wait_s = 0.0
        # Those that wake first are requested first.
        for released in self._waiting.values():
            if not released.done():
                released.set_result(None)

    def move(self, order: int) -> None:
        """Puts its samples at another place in the line, from their next requests on."""
        self.order = order
        for sample in self.in_progress:
            sample.order = order

    @property
    def is_held(self) -> bool:
        return self._longest_wait_s > 0

    @property
    def running(self) -> list[Sample]:
        """Samples that have not ended, including interrupted ones."""
        return [sample for sample in self.in_progress if sample.finish_reason is None]

    @property
    def to_stop(self) -> set[Sample]:
        """Running samples that do not wait to be released."""
        return {*self.running} - self._waiting.keys()

    @property
    def spent(self) -> Spent:
        """Sums over all its samples so far."""
        spent = replace(self._ended)
        for sample in self.in_progress:
            spent.add(sample)
        return spent
