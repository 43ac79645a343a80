"""How one engine comes to serve a version that lies staged beside it.

    prepare ── pause ── load ── which version are you at? ── continue ──► CommitReport
                 └───────── pause_s: no token is decoded ────────┘

Requests in flight wait and then go on. If something fails before the load, the engine is whole and
goes on at its old version. From the load's first byte on it is torn, until it has said itself that
it serves the new one: SGLang's "rollback" of a failed load reads the same new files again. A torn
engine stays paused for good, so that no token is ever decoded with torn weights, and has to be
started again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.choices import PauseMode
from rollout_pool.engines.client import SGLangClient
from rollout_pool.sampling.engine_client import EngineError


class TornEngine(EngineError):
    """An engine with unknown weights or state: it must never decode again, only be restarted.

    The message names the engine and what failed.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class CommitReport:
    """One engine's switch to a version, as the engine's own process measured it."""

    engine: str
    version: int
    strategy: str
    pause_s: float
    """From the call that stops decoding until the one that lets it go on has returned."""
    load_s: float
    """The part of it that the load took."""
    paused_at: float
    """Unix time at which the pause began."""


class Strategy(Protocol):
    """One way in which an engine takes a staged version. Made anew for each start of a server."""

    @property
    def name(self) -> str:
        """Its value of weight_sync.commit."""
        ...

    async def check(self) -> None:
        """Raises ValueError, naming the setting and the fix, if it can't work with this server."""
        ...

    async def prepare(self, folder: Path) -> None:
        """Whatever can be done while the engine still decodes. Raises EngineError."""
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Load `folder`/model.safetensors into the paused engine. Raises anything if it fails."""
        ...

    async def close(self) -> None: ...


class Committer:
    """Takes one engine from version to version. One call at a time."""

    def __init__(self, client: SGLangClient, strategy: Strategy, pause_mode: PauseMode) -> None:
        self._client = client
        self._strategy = strategy
        self._pause_mode = pause_mode
        self._torn: str | None = None

    async def commit(self, version: int, folder: Path) -> CommitReport:
        """Make the engine serve what lies in `folder` as `version`.

        Raises EngineError if it could not begin (the engine goes on at its old version), and
        TornEngine for anything later, also for every call after that. Cancelled, it leaves the
        engine torn, unless it had not been paused yet.
        """
        self._check_whole()
        await self._strategy.prepare(folder)
        self._torn = f"the commit of version {version} was broken off"
        paused_at, pause_began = time.time(), time.perf_counter()
        await self._pause()
        try:
            load_at = time.perf_counter()
            await self._strategy.load(version, folder)
            load_s = time.perf_counter() - load_at
            served = await self._client.served_version()
            if served != version:
                raise EngineError(f"the engine says that it serves version {served}")
            await self._client.resume()
        except Exception as error:
            what = str(error) or type(error).__name__
            self._torn = f"the commit of version {version} failed: {what}"
            raise self._tear() from error
        pause_s = time.perf_counter() - pause_began
        self._torn = None
        return CommitReport(
            engine=self._client.name,
            version=version,
            strategy=self._strategy.name,
            pause_s=pause_s,
            load_s=load_s,
            paused_at=paused_at,
        )

    async def close(self) -> None:
        await self._strategy.close()

    async def _pause(self) -> None:
        """Stops decoding; a refused pause is taken back, whatever has become of it."""
        try:
            await self._client.pause(self._pause_mode)
        except EngineError as error:
            try:
                await self._client.resume()
            except EngineError:
                self._torn = f"it neither stops nor goes on: {error}"
                raise self._tear() from error
            self._torn = None
            raise

    def _check_whole(self) -> None:
        if self._torn is not None:
            raise self._tear()

    def _tear(self) -> TornEngine:
        return TornEngine(f"{self._client.name} must be started again: {self._torn}")
