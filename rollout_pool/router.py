"""Chooses the engine for a call: the least loaded of those that may have it.

An engine may have requests while it serves a version whose tokens can still be trained. One that is
starting, lost or too far behind has none: its calls wait for it or go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from buffer.staleness import is_fresh
from rollout_pool.generation import EngineClient


class Router:
    """Knows the load that this process has put on each engine, and which of them may have more."""

    def __init__(self, engines: Sequence[EngineClient], wait_timeout_s: float) -> None:
        """`wait_timeout_s`: longest that a call waits for an engine (buffer.wait_timeout_s)."""
        assert engines
        self._engines = tuple(engines)
        self._wait_timeout_s = wait_timeout_s
        self._tokens = {engine.name: 0 for engine in engines}
        self._allowed: dict[EngineClient, int] = {}
        """With the version that each serves."""
        self._has_changed = asyncio.Event()
        self._situation = "nothing is known of them yet"

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        """By engine."""
        return dict(self._tokens)

    def follow(self, versions: Mapping[str, int], trainer: int, max_staleness: int) -> None:
        """What each engine serves now (those that serve nothing are missing), and the trainer's."""
        allowed = {}
        for engine in self._engines:
            version = versions.get(engine.name)
            if version is not None and is_fresh(trainer, version, max_staleness):
                engine.note_version(version)
                allowed[engine] = version
        self._allowed = allowed
        self._situation = (
            f"they serve {dict(versions) or 'nothing'}, the trainer is at version {trainer} "
            f"and max_staleness is {max_staleness}"
        )
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def has_other(self, avoid: Collection[str]) -> bool:
        """Whether an engine that is not named in `avoid` may have requests now."""
        return any(engine.name not in avoid for engine in self._allowed)

    @asynccontextmanager
    async def assign(
        self, num_tokens: int, avoid: Collection[str] = (), min_version: int = 0
    ) -> AsyncIterator[EngineClient]:
        """The least loaded engine, which bears `num_tokens` more until the block ends.

        Waits while no engine may have requests, or none serves `min_version` yet. Engines named in
        `avoid` are taken only if there is no other. Raises TimeoutError naming the engines.
        """
        allowed = await self._wait_allowed(min_version)
        wanted = [engine for engine in allowed if engine.name not in avoid]
        engine = min(wanted or allowed, key=lambda engine: self._tokens[engine.name])
        self._tokens[engine.name] += num_tokens
        try:
            yield engine
        finally:
            self._tokens[engine.name] -= num_tokens

    async def _wait_allowed(self, min_version: int) -> list[EngineClient]:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                while not (
                    allowed := [e for e, serves in self._allowed.items() if serves >= min_version]
                ):
                    await self._has_changed.wait()
                return allowed
        except TimeoutError:
            names = ", ".join(self._tokens)
            what = f" for version {min_version} or later" if min_version else ""
            raise TimeoutError(
                f"none of {names} could be given a request{what} for "
                f"buffer.wait_timeout_s={self._wait_timeout_s:g}: {self._situation}"
            ) from None
