"""Chooses the engine for a call: the one with the fewest tokens in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rollout_pool.generation import EngineClient


class Router:
    """Knows the load that this process has put on each engine."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        assert engines
        self._engines = tuple(engines)
        self._tokens = {engine.name: 0 for engine in engines}

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        """By engine."""
        return dict(self._tokens)

    @contextmanager
    def assign(self, num_tokens: int, avoid: Collection[str] = ()) -> Iterator[EngineClient]:
        """The least loaded engine, which bears `num_tokens` more until the block ends.

        Engines named in `avoid` are taken only if there is no other.
        """
        wanted = [engine for engine in self._engines if engine.name not in avoid]
        engine = min(wanted or self._engines, key=lambda engine: self._tokens[engine.name])
        self._tokens[engine.name] += num_tokens
        try:
            yield engine
        finally:
            self._tokens[engine.name] -= num_tokens
