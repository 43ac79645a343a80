"""What is asked of an inference engine and what comes back, whichever engine it is."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from buffer.types import VersionSpan

ROUNDING = 1e-3
"""A certain token's log-probability may come out this much above 0."""


class EngineError(RuntimeError):
    """An engine did not do what it was asked; the message names the engine."""


class BadLogprobs(ValueError):
    """A sample's log-probabilities are missing, not finite or above 0: it can't be trained on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy."""

    temperature: float
    max_new_tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class SampleRequest:
    """One continuation of one prompt. `request_id` is unique among all that an engine ever gets."""

    request_id: str
    tokens: Sequence[int]


@dataclass(kw_only=True, slots=True, frozen=True)
class FirstToken:
    """A sample has begun, with a token of `version` (around a commit perhaps of the one before).

    The spans of its Generation are exact.
    """

    index: int
    version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Generation:
    """One finished sample of n tokens.

    Example: 4 tokens of which the last two came after a commit have
    version_spans (7, 0, 2) (8, 2, 4).
    """

    index: int
    """Place of its request in the call."""
    output_ids: tuple[int, ...]
    """[n] with the end-of-sequence token if there was one."""
    logprobs: tuple[float, ...]
    """[n] natural log-probability of each token under the distribution that it was drawn from."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, n) without gaps; positions count from the first output token."""
    finish_reason: str
    """"stop" at an end-of-sequence token, "length" at the limit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Refused:
    """One sample is unusable, for `error`; the others of its call are not touched."""

    index: int
    error: BadLogprobs | EngineError


Event = FirstToken | Generation | Refused


class EngineClient(Protocol):
    """An inference engine as the rollout worker sees it."""

    @property
    def name(self) -> str: ...

    def note_version(self, version: int) -> None:
        """The engine serves `version` now."""
        ...

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling
    ) -> AsyncGenerator[Event]:
        """Events of all samples, each sample's last (Generation or Refused) as soon as it ends.

        Closing the iterator early gives the unfinished samples up. Raises EngineError if the call
        as a whole fails; samples that have ended before stay good.
        """
        ...


def check_logprobs(logprobs: Sequence[object], num_tokens: int) -> tuple[float, ...]:
    """The log-probabilities as floats. Raises BadLogprobs for any that none can be."""
    if len(logprobs) != num_tokens:
        raise BadLogprobs(f"{len(logprobs)} log-probabilities for {num_tokens} tokens")
    checked: list[float] = []
    for place, value in enumerate(logprobs):
        if not isinstance(value, float | int) or not math.isfinite(value) or value > ROUNDING:
            raise BadLogprobs(f"log-probability of token {place} is {value!r}")
        checked.append(float(value))
    return tuple(checked)


def merge_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of the same version become one."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            span = VersionSpan(version=span.version, start=merged.pop().start, end=span.end)
        merged.append(span)
    return tuple(merged)
