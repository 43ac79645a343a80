"""The protocol of an inference engine as its clients see it: samples, errors, load, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollout_pool.sampling.sample import Sample

ROUNDING = 1e-3
"""Log-probabilities may exceed 0 by this much through rounding."""


class EngineError(RuntimeError):
    """An engine's call failed; the message names the engine."""


class SampleRefused(EngineError):
    """A healthy engine refused one sample or returned unusable tokens for it."""


class BadLogprobs(ValueError):
    """A sample's log-probabilities are missing, not finite or above 0: it can't be trained on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineLoad:
    """An engine's load, over the requests of all its clients."""

    num_running: int
    num_queued: int
    num_tokens: int
    """Tokens in the KV cache and tokens queued for it."""
    capacity: int
    """Tokens that the KV cache can hold."""
    kv_usage: float
    """Fraction of the KV cache that running requests hold, in [0, 1]."""


@dataclass(kw_only=True, slots=True)
class EngineCounters:
    """Totals of one client's requests to its engine."""

    num_preemptions: int = 0
    """How often requests have lost their KV cache for lack of memory."""
    num_prompt_tokens: int = 0
    """Prompt tokens of ended requests, including output of earlier requests of the same sample."""
    num_prefilled: int = 0
    """Prompt tokens for which the engine had no KV cache."""
    queue_s: float = 0.0
    """Time of ended requests in the engine's queue; 0 if the engine does not report it."""
    num_logprobs: Counter[int] = field(default_factory=Counter)
    """Log-probabilities since the reader last reset it, by the version served meanwhile."""
    num_not_finite: Counter[int] = field(default_factory=Counter)
    """Log-probabilities that were missing, NaN or infinite: they were refused."""


class EngineClient(Protocol):
    """A connection to one engine, at one URL.

    Implementation: SGLangClient (engines/sglang/client.py). `generate_tokens` and `stop` are in its
    base class, BatchingClient (engines/sglang/batching.py). `make_client` (engines/kinds.py)
    chooses the class.

    client.note_version(7)                           the engine serves version 7
    await client.generate_tokens(sample, "g.0.1!")   sample.output_ids, .logprobs, .version_spans
    (await client.load()).num_queued                 requests of all clients that wait
    client.counters.num_prefilled                    prompt tokens that this client's requests cost
    """

    @property
    def name(self) -> str: ...

    @property
    def counters(self) -> EngineCounters: ...

    def note_version(self, version: int) -> None:
        """Call when the engine serves `version`."""
        ...

    async def generate_tokens(
        self, sample: Sample, request_id: str, on_arrival: Callable[[], None] | None = None
    ) -> None:
        """Continues `sample` until it has ended.

        Appends tokens as they arrive, with log-probabilities and versions, and then calls
        `on_arrival`. `request_id` must be unique for the engine, and none may be a prefix of
        another. Returns without a finish_reason only after `stop`, or with all that was asked for
        (`Sample.num_asked`). Raises EngineError or BadLogprobs; tokens that arrived before stay in
        the sample and are valid. Cancelling it stops the engine's request.
        """
        ...

    def stop(self, request_id: str) -> None:
        """Lets `generate_tokens` return soon, with all tokens so far and exact versions."""
        ...

    async def load(self) -> EngineLoad | None:
        """None if the engine cannot report its load. Raises EngineError if it does not respond."""
        ...

    async def close(self) -> None: ...
