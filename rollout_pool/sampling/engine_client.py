"""The interface of an inference engine: requests, answers and load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout_pool.sampling.sample import Sample


class EngineError(RuntimeError):
    """An engine's call failed; the message names the engine."""


class SampleRefused(EngineError):
    """A healthy engine refused one sample or returned unusable tokens for it."""


class BadLogprobs(ValueError):
    """A sample's log-probabilities are missing, not finite or above 0: it can't be trained on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineLoad:
    """An engine's load report, over the requests of all its clients."""

    num_running: int
    num_queued: int
    num_tokens: int
    """Tokens in the KV cache and tokens queued for it."""
    capacity: int
    """Tokens that the KV cache can hold."""
    kv_usage: float
    """Share of the KV cache that running requests hold, in [0, 1]."""


class EngineClient(Protocol):
    """An inference engine as the rollout worker sees it."""

    @property
    def name(self) -> str: ...

    def note_version(self, version: int) -> None:
        """Call when the engine serves `version`."""
        ...

    async def generate(
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
        """Lets `generate` return soon, with all tokens so far and exact versions."""
        ...


class LoadSource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_preemptions(self) -> int:
        """How often requests of this client have lost their KV cache for lack of memory."""
        ...

    async def load(self) -> EngineLoad | None:
        """None if the engine cannot report its load. Raises EngineError if it does not answer."""
        ...
