"""Keeps one engine at the version that somebody wants it to stay at."""

from __future__ import annotations

import asyncio
from asyncio import Future


class VersionPin:
    """An agreement between who wants an engine held and the one that commits to it.

        free ──► wanted ── the engine serves it ──► pinned ── release ──► free
                    └── it went past it, it was lost, given up ─────────────▲

    Everything here happens at once, in one event loop; so between `take` and `note_served` nobody
    can be promised the version that is about to be replaced.
    """

    def __init__(self) -> None:
        self._served = -1
        self._taken = -1
        """The version that is being committed, else the one served."""
        self._wanted: int | None = None
        self._outcome: Future[bool] | None = None
        self._is_pinned, self._is_free = asyncio.Event(), asyncio.Event()
        self._is_free.set()
        self.is_away = False
        """It has been pinned since the engine's side last made this False."""

    @property
    def is_pinned(self) -> bool:
        return self._is_pinned.is_set()

    # Who wants it ---------------------------------------------------------------------------------

    async def want(self, version: int, timeout_s: float) -> bool:
        """Whether the engine now serves exactly this version, and stays there until `release`.

        Waits for it; False at once if it is too late, or if somebody else wants one.
        """
        if self._wanted is not None or self._taken > version:
            return False
        self._wanted = version
        self._outcome = outcome = asyncio.get_running_loop().create_future()
        self._look()
        try:
            async with asyncio.timeout(timeout_s):
                return bool(await outcome)
        except TimeoutError:
            self.release()
            return False
        except asyncio.CancelledError:
            self.release()
            raise

    def release(self) -> None:
        """Let the engine go on; nothing if it is free."""
        self._wanted = None
        self._is_pinned.clear()
        self._is_free.set()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(False)

    # The engine's side ----------------------------------------------------------------------------

    def take(self, version: int) -> bool:
        """Whether this version may be committed now; if so, follow with `note_served`."""
        if self.is_pinned:
            return False
        if self._wanted is not None and version > self._wanted:
            self.release()  # it can't be had any more
        self._taken = version
        return True

    def note_served(self, version: int) -> None:
        """The engine serves `version`: the one that it took, or still the one before."""
        self._served = self._taken = version
        self._look()

    def note_lost(self) -> None:
        """The engine serves nothing any more."""
        self._served = self._taken = -1
        self.is_away = False
        self.release()

    async def wait_pinned(self) -> None:
        await self._is_pinned.wait()

    async def wait_free(self) -> None:
        await self._is_free.wait()

    def _look(self) -> None:
        if self._wanted is None or not self._served == self._taken == self._wanted:
            return
        self.is_away = True
        self._is_pinned.set()
        self._is_free.clear()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(True)
