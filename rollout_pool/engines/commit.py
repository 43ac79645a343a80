"""Switches one engine to a version that is staged on its node.

    prepare ── pause ── load ── which version are you at? ── continue ──► CommitReport
                 └─ pause_s: only last tokens are decoded ───────┘

An engine that serves versions of an adapter beside each other takes one without a pause; if the
load fails, but for a time-out, it serves on as before.

With weight_sync.pause_mode=drain the engine's requests end before all that. With resubmit those in
flight end with their tokens so far and are sent again; with retract and in_place they pause and
then continue. If a step before the load fails, the engine continues at its old
version. From the load's first byte the engine counts as torn until it reports the new version:
SGLang's "rollback" of a failed load reads the same new files again. A torn engine stays paused, so
that no token is ever decoded with torn weights, and must be restarted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from configs.choices import PauseMode
from rollout_pool.engines.engine import EngineControl, Strategy, TornEngine
from rollout_pool.sampling.engine_client import EngineError


@dataclass(kw_only=True, slots=True, frozen=True)
class CommitReport:
    """One engine's switch to a version, as measured in its actor."""

    engine: str
    version: int
    strategy: str
    pause_s: float = 0.0
    """From the call that ends decoding to the return of the one that resumes; 0 without a pause."""
    stop_s: float = 0.0
    """Part of `pause_s`: until the running requests have paused, or ended with a last token."""
    load_s: float
    """Part of `pause_s`, if there was one."""
    paused_at: float
    """Unix time; of the load, if there was no pause."""


class Committer:
    """Switches one engine from version to version. One call at a time.

    committer = Committer(engine.client, engine.strategy(config), PauseMode.resubmit)
    report = await committer.commit(7, Path("/dev/shm/leash-run/receiver-0/1"))
    report.pause_s          the engine decoded nothing for so long
    """

    def __init__(self, client: EngineControl, strategy: Strategy, pause_mode: PauseMode) -> None:
        self.client = client
        self._strategy = strategy
        self._pause_mode = pause_mode
        self._torn: str | None = None
        self._is_drained = False

    async def drain(self, limit_s: float) -> None:
        """Let all requests of an engine that gets no new ones end, for at most `limit_s`.

        Without any left it stays paused. Call `commit` or `undo_drain` then, also after an error.
        Raises EngineError.
        """
        self._is_drained = True  # an error may leave it paused
        self._is_drained = await self.client.drain(limit_s)

    async def undo_drain(self) -> None:
        """Serve on at the old version; does nothing after a commit. Raises TornEngine."""
        if not self._is_drained:
            return
        self._is_drained = False
        try:
            await self.client.resume()
        except EngineError as error:
            raise self._tear(f"it does not resume after it has drained: {error}") from error

    async def commit(self, version: int, folder: Path) -> CommitReport:
        """Make the engine serve the weights in `folder` as `version`.

        Raises EngineError if it could not begin (the engine continues at its old version), and
        TornEngine for anything later and for every call after that. Cancelling it after the pause
        leaves the engine torn.
        """
        if self._torn is not None:
            raise self._tear(self._torn)
        await self._strategy.prepare(folder)
        if not self._strategy.pauses:
            return await self._load_beside(version, folder)
        self._torn = f"the commit of version {version} was cancelled"
        paused_at, pause_began = time.time(), time.perf_counter()
        if not self._is_drained:
            await self._pause()
        self._is_drained = False
        try:
            load_at = time.perf_counter()
            await self._strategy.load(version, folder)
            load_s = time.perf_counter() - load_at
            served = await self.client.served_version()
            if served != version:
                raise EngineError(f"the engine reports version {served}")
            await self.client.resume()
        except Exception as error:
            what = str(error) or type(error).__name__
            raise self._tear(f"the commit of version {version} failed: {what}") from error
        pause_s = time.perf_counter() - pause_began
        self._torn = None
        return CommitReport(
            engine=self.client.name,
            version=version,
            strategy=self._strategy.name,
            pause_s=pause_s,
            stop_s=load_at - pause_began,
            load_s=load_s,
            paused_at=paused_at,
        )

    async def _load_beside(self, version: int, folder: Path) -> CommitReport:
        """Loads the version for new requests; those that run keep theirs."""
        began_at, load_at = time.time(), time.perf_counter()
        await self._strategy.load(version, folder)
        load_s = time.perf_counter() - load_at
        return CommitReport(
            engine=self.client.name,
            version=version,
            strategy=self._strategy.name,
            load_s=load_s,
            paused_at=began_at,
        )

    async def _pause(self) -> None:
        """Stops decoding; a pause that fails is undone, since it may have taken effect."""
        try:
            await self.client.pause(self._pause_mode)
        except EngineError as error:
            try:
                await self.client.resume()
            except EngineError:
                raise self._tear(f"it neither pauses nor resumes: {error}") from error
            self._torn = None
            raise

    def _tear(self, why: str) -> TornEngine:
        self._torn = why
        return TornEngine(f"{self.client.name} must be restarted: {why}")
