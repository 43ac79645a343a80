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
from contextlib import AbstractContextManager
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
    """Limits the tokens of a completion; see constraint.py."""

    grammar: str = ""
    """Grammar of the whole completion, in llguidance's form of Lark; "": any text."""
    min_tokens: int = 0
    """The model's end comes after so many tokens."""
    banned: tuple[int, ...] = ()
    """Tokens that never occur."""


class Routes(NamedTuple):
    """The experts that an engine has chosen for consecutive tokens."""

    start: int
    """The place of the first of them, counted from the prompt's first token."""
    experts: NDArray[np.uint8] | NDArray[np.uint16]
    """[tokens, layers * experts of a token]"""


class Alternatives(NamedTuple):
    """The tokens among which one was drawn, [K] each."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    """Natural logs, in the same order, up to a constant."""


@dataclass(kw_only=True, slots=True)
class Guidance:
    """How far a sample follows its constraint, and what its next request is for; see constraint.py.

    Example: a token was refused, and another drawn in its place. The next request may bring
    `max_asked` tokens; when they arrive, `alternatives` has an entry for each that was not judged.
    """

    alternatives: list[Alternatives] = field(default_factory=list)
    """An entry for each of the last tokens, to which the constraint was not applied so far; they
    may not stay."""
    max_asked: int | None = None
    """A limit of the next request's tokens."""
    is_probe: bool = False
    """The next request is for as many alternatives of the next token as PROBED."""

    def num_alternatives(self, top_k: int) -> int:
        """How many it needs of each token."""
        if self.is_probe:
            return PROBED
        return top_k if top_k > 0 else ALTERNATIVES


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
    pictures: tuple[bytes, ...] = ()
    """The files whose places are among its prompt, in order."""
    stop: tuple[str, ...] = ()
    """Texts that end it, the model's own end aside; see stop.py."""
    constraint: Constraint | None = None
    session: str = ""
    """Samples of one session go to the engine with their common prefix, unless it is overloaded."""
    role: str = ""
    """Which of its episode's roles it is of; see Observation.role."""
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

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log of each output token's probability under the distribution it was sampled from."""
    candidates: list[array[int]] = field(default_factory=list)
    """The ids among which each output token was drawn; empty unless `has_candidates`."""
    first_route: int = 0
    """The first token, counted from the prompt's first, whose experts it wants: those of the tokens
    before came with an earlier turn."""
    num_processed: int = 0
    """Tokens from there on that engines have processed, whether their experts came or not."""
    routes: list[Routes] = field(default_factory=list)
    """Ascending, with gaps where a request brought none; empty unless its engines return them."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Cover [0, len(output_ids)) without gaps, counted from the first output token."""
    finish_reason: str | None = None
    """"stop" at an end-of-sequence token or a text of `stop`, "length" at the limit; else None."""
    ends_at: int | None = None
    """Number of tokens that stay: up to the end of a text of `stop`, or before a token that
    `constraint` does not allow. Until the engine has ended the request there may be more."""
    guidance: Guidance = field(default_factory=Guidance)
    num_attempts: int = 0
    num_failures: int = 0
    """Failed requests; interruptions do not count."""
    num_refused: int = 0
    """Responses refused for their log-probabilities."""
    num_restarts: int = 0
    """How often it lost all its tokens."""
    num_wasted: int = 0
    """Sampled tokens that are lost or refused."""

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.version_spans), default=None)

    @property
    def has_candidates(self) -> bool:
        """The trainer needs the candidates of its tokens."""
        return self.sampling.is_truncated and self.priority is Priority.rollout

    @property
    def next_route(self) -> int:
        """The first token that the next request processes anew."""
        return self.first_route + self.num_processed

    @property
    def num_ready(self) -> int:
        """Tokens so far that are part of the completion."""
        if self.ends_at is not None:
            return self.ends_at
        return len(self.output_ids) - len(self.guidance.alternatives)

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def num_asked(self) -> int:
        """Tokens that the next request may bring."""
        most = self.guidance.max_asked
        return self.num_left if most is None else min(self.num_left, most)

    def note_processed(self) -> None:
        """An engine has processed all its tokens but the last one."""
        self.num_processed = len(self.prompt) + len(self.output_ids) - 1 - self.first_route

    def drop_tokens(self) -> None:
        """Loses its tokens, which count as wasted; the next request begins at its prompt."""
        self.cut(0)
        self.num_restarts += 1
        self.ends_at = None
        self.guidance.alternatives.clear()

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
        # Without a token left it begins again, with its prompt.
        processed = len(self.prompt) + length - 1 - self.first_route if length else 0
        self.num_processed = min(self.num_processed, processed)
        self.routes[:] = [
            Routes(routes.start, routes.experts[: self.next_route - routes.start])
            for routes in self.routes
            if routes.start < self.next_route
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


class Clock(Protocol):
    """A clock that does not run while a sample waits for a slot at an engine: EpisodeClock."""

    def paused(self) -> AbstractContextManager[None]: ...


class Completer(Protocol):
    """Implementation: Sampler (sampler.py)."""

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
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
