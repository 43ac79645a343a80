"""One completion of one prompt, as far as it is: what is sampled, interrupted and resumed.

    waiting ──► running at an engine ──► ended (finish_reason)
       ▲              │ interrupted, engine lost, refused
       └──────────────┘ its tokens are kept; the rest is sampled at whichever engine has a slot

A sample goes through as many engines as it takes. Each of its tokens keeps the log-probability and
the policy version of the moment in which it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

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
