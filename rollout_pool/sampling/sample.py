"""One completion of one prompt, which may be interrupted and resumed.

    waiting ──► running at an engine ──► ended (finish_reason)
       ▲              │ interrupted, engine lost, refused
       └──────────────┘ its tokens are kept; the rest is sampled at any engine with a slot

A sample may pass through several engines. Each token keeps the log-probability and the policy
version with which it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from buffer.types import SamplingParams, VersionSpan


class Priority(IntEnum):
    """Which samples get a slot at an engine first."""

    rollout = 0
    evaluation = 1


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One completion. Its owner requests it; the sampler appends what arrives.

    Example: 4 tokens, the last two sampled after a commit, have
    version_spans [(7, 0, 2), (8, 2, 4)].
    """

    sample_id: str
    """Unique in the run; request ids begin with it."""
    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    """Limit of the whole completion, over all engines."""
    session: str = ""
    """Samples of one session go to the engine with their common prefix, unless it is overloaded."""
    priority: Priority = Priority.rollout
    order: int = 0
    """Within a priority the lowest is served first: groups count up, so the stalest is first."""
    min_version: int = 0
    """Oldest policy version that may sample a token."""
    engine: str | None = None
    """The only engine that may serve it (an evaluation at a held engine)."""
    on_tokens: Callable[[Sample], None] | None = None
    """Called when tokens have arrived, and at the end."""
    on_wait: Callable[[bool], None] | None = None
    """Called with True when a wait for a slot at an engine begins, with False when it is over."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log of each output token's probability under the distribution it was sampled from."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Cover [0, len(output_ids)) without gaps, counted from the first output token."""
    finish_reason: str | None = None
    """"stop" at an end-of-sequence token, "length" at the limit; None before the end."""
    num_attempts: int = 0
    num_failures: int = 0
    """Failed requests; interruptions do not count."""
    num_refused: int = 0
    """Answers refused for their log-probabilities."""
    num_wasted: int = 0
    """Sampled tokens that are lost or refused."""

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.version_spans), default=None)

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)


class SampleFailed(RuntimeError):
    """A sample failed in all its attempts; it keeps its tokens."""


class Interrupted(RuntimeError):
    """A sample was stopped by `Sampler.interrupt`; it can be completed later."""


class Completer(Protocol):
    async def complete(self, sample: Sample) -> None:
        """Continues the sample until it has ended.

        Raises SampleFailed, Interrupted if `interrupt` was called meanwhile, and TimeoutError if no
        engine was available; the sample keeps its tokens. When cancelled, it stops the engine's
        request.
        """
        ...

    def interrupt(self, sample: Sample) -> None:
        """Makes `complete` raise Interrupted soon, when the sample has all tokens so far with their
        versions. Does nothing if it is not in progress or ends before."""
        ...


class Answer:
    """What one request adds to its sample: tokens as they arrive, exact versions at the end.

    While a request runs, its engine reports with each arrival only the version served at that
    moment. Only at the end does it report the version of each token:

        arrivals   [ a | b c d | e f g ]  labels 7, 7, 8      until then   (7, a..g)
        settled                           7 up to e, then 8   at the end   (7, a..e) (8, f..g)

    A request whose engine was killed has no such report, so the versions recorded until then must
    be safe. `served_before`: a lower bound of the request's versions.
    """

    def __init__(self, sample: Sample, served_before: int) -> None:
        self._sample = sample
        self._start = len(sample.output_ids)
        self._spans_before = list(sample.version_spans)
        self._served_before = served_before
        self._label: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._sample.output_ids) - self._start

    def add(self, output_ids: Sequence[int], logprobs: Sequence[float], label: int) -> None:
        """Tokens, and the version that was served when they arrived.

        Versions only grow. So tokens with the same label as the arrival before are of that version.
        With another label they may be of both, and all count as the older one: staleness is then
        overestimated, which is safe, and log-probabilities are exact either way. The first token is
        sent by itself; if more come at once the server was slow to send, and the same holds.
        """
        sample = self._sample
        if self._label is None:
            version = label if len(output_ids) == 1 else min(label, self._served_before)
        else:
            version = min(label, self._label)
        self._label = label
        start = len(sample.output_ids)
        sample.output_ids.extend(output_ids)
        sample.logprobs.extend(logprobs)
        span = VersionSpan(version=version, start=start, end=len(sample.output_ids))
        sample.version_spans = merge_spans([*sample.version_spans, span])

    def settle(self, spans: Sequence[VersionSpan]) -> None:
        """Sets the exact versions of all tokens, counted from the request's first token."""
        shifted = [
            VersionSpan(
                version=span.version, start=self._start + span.start, end=self._start + span.end
            )
            for span in spans
        ]
        self._sample.version_spans = merge_spans([*self._spans_before, *shifted])


def merge_spans(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Joins neighbouring spans of the same version."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            span = VersionSpan(version=span.version, start=merged.pop().start, end=span.end)
        merged.append(span)
    return merged
