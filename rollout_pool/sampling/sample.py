"""One completion of one prompt, as far as it is: what is sampled, interrupted and resumed.

    waiting ──► running at an engine ──► ended (finish_reason)
       ▲              │ interrupted, engine lost, refused
       └──────────────┘ its tokens are kept; the rest is sampled at whichever engine has a slot

A sample goes through as many engines as it takes. Each of its tokens keeps the log-probability and
the policy version of the moment in which it was drawn.
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

    Example: 4 tokens of which the last two came after a commit have
    version_spans [(7, 0, 2), (8, 2, 4)].
    """

    sample_id: str
    """Unique in the run; ids of requests are made from it."""
    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    """Limit of the whole completion, however many engines write it."""
    session: str = ""
    """Samples of one session go to the engine that holds their common prefix, unless it is
    overloaded."""
    priority: Priority = Priority.rollout
    order: int = 0
    """Among samples of the same priority the lowest is served first: groups count up, so the
    stalest is first."""
    min_version: int = 0
    """No token may be older."""
    engine: str | None = None
    """The only engine that may serve it (an evaluation at a held engine)."""
    on_tokens: Callable[[Sample], None] | None = None
    """Called after each arrival of tokens, and at the end."""
    on_wait: Callable[[bool], None] | None = None
    """Called with True when it begins to wait for a slot at an engine, with False when that wait
    is over, however it ended."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithms, of each output token under the distribution that it was drawn from."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Cover [0, len(output_ids)) without gaps; positions count from the first output token."""
    finish_reason: str | None = None
    """"stop" at an end-of-sequence token, "length" at the limit; None before the end."""
    num_attempts: int = 0
    """Requests made for it so far."""
    num_failures: int = 0
    """Requests that failed (an interruption is no failure)."""
    num_refused: int = 0
    """Answers refused for their log-probabilities."""
    num_wasted: int = 0
    """Tokens that an engine wrote and that cannot be used (lost with it, or refused)."""

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.version_spans), default=None)

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)


class SampleFailed(RuntimeError):
    """A sample got no further in the attempts that it had; what it has stays in it."""


class Interrupted(RuntimeError):
    """A sample was stopped by `Sampler.interrupt`; it can be completed later."""


class Completer(Protocol):
    """Completes samples."""

    async def complete(self, sample: Sample) -> None:
        """Goes on from where the sample stands until it has ended.

        Raises SampleFailed, Interrupted if `interrupt` was called meanwhile, and TimeoutError if no
        engine could be asked; what the sample has stays in it. When cancelled, it stops the
        engine's request.
        """
        ...

    def interrupt(self, sample: Sample) -> None:
        """Lets `complete` raise Interrupted soon, with all tokens so far and their versions in the
        sample; nothing happens if it is not under way, or ends by itself before."""
        ...


class Answer:
    """What one request adds to its sample: tokens as they come, their versions when they are known.

    While a request runs, its engine reports with each arrival only the version that it serves at
    that moment. Which token is of which version it reports at the end:

        arrivals   [ a | b c d | e f g ]  labels 7, 7, 8      until then   (7, a..g)
        settled                           7 up to e, then 8   at the end   (7, a..e) (8, f..g)

    The end of a request whose engine was killed never comes, so what is written down until then
    must hold by itself. `served_before`: a version not above the request's own.
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

        Versions only grow. So tokens with the label of the arrival before them are of that version;
        with another label they are of both, the border is unknown, and all are taken
        for the older: the staleness gate then errs on the safe side, and log-probabilities are
        those of the moment of drawing either way. The first token is sent by itself; if more come
        at once the server was slow to send, and the same holds.
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
        """The versions of all tokens of this request, counted from its own first token."""
        shifted = [
            VersionSpan(
                version=span.version, start=self._start + span.start, end=self._start + span.end
            )
            for span in spans
        ]
        self._sample.version_spans = merge_spans([*self._spans_before, *shifted])


def merge_spans(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of the same version become one."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            span = VersionSpan(version=span.version, start=merged.pop().start, end=span.end)
        merged.append(span)
    return merged
