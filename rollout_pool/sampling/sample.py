"""One completion of one prompt, which may be interrupted and resumed.

    waiting ──► running at an engine ──► ended (finish_reason)
       ▲              │ interrupted, engine lost, refused
       └──────────────┘ its tokens are kept; the rest is sampled at any engine with a slot

A sample may pass through several engines. Each token keeps the log-probability and the policy
version with which it was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from opentelemetry.context import Context

from buffer.types import SamplingParams, VersionSpan

ALTERNATIVES = 64
"""Where the sampling has no top_k, as in an evaluation."""
PROBED = 4096


class Priority(IntEnum):
    """Which samples get a slot at an engine first."""

    rollout = 0
    evaluation = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class Constraint:
    """What an answer may consist of; see constraint.py."""

    grammar: str = ""
    """Of the whole answer, in llguidance's form of Lark; "": any text."""
    min_tokens: int = 0
    """The model's end comes after so many tokens."""
    banned: tuple[int, ...] = ()
    """Tokens that never occur."""


class Alternatives(NamedTuple):
    """The tokens among which one was drawn, [K] each."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    """Natural logs, in the same order, up to a constant."""


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
    stop: tuple[str, ...] = ()
    """Texts that end it, the model's own end aside; see stop.py."""
    constraint: Constraint | None = None
    session: str = ""
    """Samples of one session go to the engine with their common prefix, unless it is overloaded."""
    group: str = ""
    """Samples of one group have the same prompt: a session's first sample goes where they are."""
    priority: Priority = Priority.rollout
    order: int = 0
    """Within a priority the lowest is served first: groups count up, so the stalest is first."""
    min_version: int = 0
    """Oldest policy version that may sample a token."""
    engine: str | None = None
    """The only engine that may serve it (an evaluation at a held engine)."""
    span_context: Context | None = None
    """The context of its spans; None is the current one."""
    on_tokens: Callable[[Sample], None] | None = None
    """Called when tokens have arrived, and at the end."""
    on_wait: Callable[[bool], None] | None = None
    """Called with True when a wait for a slot at an engine begins, with False when it is over."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log of each output token's probability under the distribution it was sampled from."""
    candidates: list[array[int]] = field(default_factory=list)
    """The ids among which each output token was drawn; empty unless `has_candidates`."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Cover [0, len(output_ids)) without gaps, counted from the first output token."""
    finish_reason: str | None = None
    """"stop" at an end-of-sequence token or a text of `stop`, "length" at the limit; else None."""
    ends_at: int | None = None
    """Number of tokens that stay: up to the end of a text of `stop`, or before a token that
    `constraint` does not allow. Until the engine has ended the request there may be more."""
    alternatives: list[Alternatives] = field(default_factory=list)
    """Of the last tokens, to which the constraint was not applied so far; they may not stay."""
    max_asked: int | None = None
    """A limit of the next request's tokens."""
    is_probe: bool = False
    """The next request is for as many alternatives of the next token as PROBED."""
    num_attempts: int = 0
    num_failures: int = 0
    """Failed requests; interruptions do not count."""
    num_refused: int = 0
    """Answers refused for their log-probabilities."""
    num_restarts: int = 0
    """How often it lost all its tokens."""
    num_wasted: int = 0
    """Sampled tokens that are lost or refused."""

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.version_spans), default=None)

    @property
    def has_candidates(self) -> bool:
        """Whether the trainer needs the candidates of its tokens."""
        return self.sampling.is_truncated and self.priority is Priority.rollout

    @property
    def num_alternatives(self) -> int:
        """How many the constraint needs of each token."""
        if self.constraint is None:
            return 0
        if self.is_probe:
            return PROBED
        return self.sampling.top_k if self.sampling.top_k > 0 else ALTERNATIVES

    @property
    def num_ready(self) -> int:
        """Tokens so far that are part of the completion."""
        if self.ends_at is not None:
            return self.ends_at
        return len(self.output_ids) - len(self.alternatives)

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def num_asked(self) -> int:
        """Tokens that the next request may bring."""
        return self.num_left if self.max_asked is None else min(self.num_left, self.max_asked)

    def drop_tokens(self) -> None:
        """Loses its tokens, which count as wasted; the next request begins at its prompt."""
        self.cut(0)
        self.num_restarts += 1
        self.ends_at = None
        self.alternatives.clear()

    def drop_unfollowed(self) -> None:
        """Loses the tokens to which the constraint was not applied, which count as wasted."""
        self.cut(len(self.output_ids) - len(self.alternatives))
        self.alternatives.clear()

    def end_at_stop(self) -> None:
        """Ends it at `ends_at`; the tokens behind count as wasted."""
        assert self.ends_at is not None
        self.cut(self.ends_at)
        self.finish_reason = "stop"

    def cut(self, length: int) -> None:
        """Loses the tokens from `length` on, which count as wasted."""
        self.num_wasted += len(self.output_ids) - length
        for column in (self.output_ids, self.logprobs, self.candidates):
            del column[length:]
        self.version_spans[:] = [
            VersionSpan(version=span.version, start=span.start, end=min(span.end, length))
            for span in self.version_spans
            if span.start < length
        ]

    def put_last(self, token: int, logprob: float, candidates: Sequence[int]) -> None:
        """Puts another token in the place of the last, drawn from the same weights."""
        self.output_ids[-1], self.logprobs[-1] = token, logprob
        if self.has_candidates:
            self.candidates[-1] = array("i", candidates)

    def extend_last(self, tokens: Sequence[int]) -> None:
        """Adds tokens of which each was the only one that could follow; they count as drawn from
        the last one's weights."""
        self.output_ids.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        if self.has_candidates:
            # One array a token, not a place: the garbage collector goes through each, in the loop.
            alone = {token: array("i", [token]) for token in tokens}
            self.candidates.extend(alone[token] for token in tokens)
        last = self.version_spans[-1]
        self.version_spans[-1] = VersionSpan(
            version=last.version, start=last.start, end=last.end + len(tokens)
        )


def merge_spans(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Joins neighbouring spans of the same version."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            span = VersionSpan(version=span.version, start=merged.pop().start, end=span.end)
        merged.append(span)
    return merged


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
