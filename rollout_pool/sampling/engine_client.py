"""The interface of an inference engine: requests, answers and load, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout_pool.sampling.sample import Sample


class EngineError(RuntimeError):
    """An engine did not do what it was asked; the message names the engine."""


class SampleRefused(EngineError):
    """One sample was turned down or written unusably, by an engine that is well otherwise."""


class BadLogprobs(ValueError):
    """A sample's log-probabilities are missing, not finite or above 0: it can't be trained on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineLoad:
    """An engine's own report, over the requests of all its clients."""

    num_running: int
    num_queued: int
    num_tokens: int
    """Held in the KV cache, and queued to be computed into it."""
    capacity: int
    """Tokens that the KV cache can hold."""
    kv_usage: float
    """Share of the KV cache that running requests hold, in [0, 1]."""


class EngineClient(Protocol):
    """An inference engine as the rollout worker sees it."""

    @property
    def name(self) -> str: ...

    def note_version(self, version: int) -> None:
        """The engine serves `version` now."""
        ...

    async def generate(
        self, sample: Sample, request_id: str, on_arrival: Callable[[], None] | None = None
    ) -> None:
        """Adds what the engine writes to `sample`, from where it stands, until it has ended.

        Tokens are added as they arrive, with their log-probabilities and versions; `on_arrival` is
        called after each time. `request_id` must be unique among all that the engine ever gets, and
        none may begin with another. Returns without a finish_reason only after `stop`. Raises
        EngineError or BadLogprobs; what has arrived before stays in the sample and is good. When
        cancelled, the engine is asked to stop.
        """
        ...

    def stop(self, request_id: str) -> None:
        """Let `generate` return soon, with all that the engine has written and exact versions."""
        ...


class LoadSource(Protocol):
    """An engine that can be asked how busy it is."""

    @property
    def name(self) -> str: ...

    @property
    def num_preemptions(self) -> int:
        """How often requests of this client lost their KV cache for lack of memory, so far."""
        ...

    async def load(self) -> EngineLoad | None:
        """None if it lives but cannot report it. Raises EngineError if it does not answer."""
        ...
