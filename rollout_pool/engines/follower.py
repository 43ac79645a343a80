"""Keeps one engine at the newest version that the receiver beside it offers.

    a newer version is offered ── gate of the fleet ── the NEWEST one now ── commit ── report
              ▲                   max_concurrent_commits     held staged                 │
              └──────────────────────────────────────────────────────────────────────────┘

A slow engine skips versions; a pinned one keeps its version until it is released. An engine waits
for the trainer or another engine only at the gate, where each place expires.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from buffer.run_state import RunState
from configs.choices import PauseMode
from configs.run_files import Scalar
from configs.schema import WeightSyncConfig
from processes.silence import Probe
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.commit import CommitReport, Committer
from rollout_pool.engines.engine import TornEngine
from rollout_pool.engines.read_back import ReadBack
from rollout_pool.sampling.engine_client import EngineError
from weight_sync.receiver.client import ReceiverClient, StagedVersion
from weight_sync.types import Manifest, WeightSyncError

log = logging.getLogger(__name__)

LONG_POLL_S = 30.0
CALL_TIMEOUT_S = 10.0
"""For calls that a healthy receiver replies to at once."""
LOOK_AGAIN_S = 0.5
"""Time before the next try: a receiver that restarts at another address is not announced."""
RESPONSE_TIMEOUT_S = 5.0
"""For an engine that is about to commit; a slower one is tried again later."""
SLACK_S = 30.0
"""By how much the gate and the hold outlast a commit."""
COMPARE_S = 30.0
"""For a comparison with the trainer, which may queue behind other requests."""
MAX_FAILURES = 3
"""The engine is restarted after so many commits in a row that could not begin."""


@dataclass(kw_only=True, eq=False)
class WeightFollower:
    """Follows the receiver for one start of an engine's server. `run` is called once."""

    engine: str
    host: str
    """Where the engine listens: it follows the receiver at the same address."""
    key: str
    """API key of the receiver."""
    config: WeightSyncConfig
    state: RunState
    committer: Committer
    responds: Probe
    """Returns whether the engine's server responds within a time."""
    pin: VersionPin
    read_back: ReadBack | None
    """None: the engine holds its weights in another dtype."""
    _client: ReceiverClient | None = field(default=None, init=False)
    _served: int = field(default=-1, init=False)
    _num_failures: int = field(default=0, init=False)

    async def run(self) -> NoReturn:
        """Raises TornEngine when the engine must be restarted."""
        while True:
            # An evaluation may have had it while its last commit was being recorded.
            offered = None if self.pin.is_away else await self._newest_unless_pinned()
            if self.pin.is_away:
                await self.pin.free.wait()
                await self._rejoin()
            elif offered is not None and not await self._try(offered):
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _rejoin(self) -> None:
        """Registers as a serving engine, if possible with the newest version."""
        self.pin.is_away = False
        newest = await self._newest(timeout_s=0)
        has_committed = newest is not None and await self._try(newest)
        if not has_committed and not self.pin.is_away:
            await self.state.record_commits({self.engine: self._served})

    async def _try(self, offered: StagedVersion) -> bool:
        """Returns whether a version was committed. Raises TornEngine."""
        try:
            return await self._take(offered)
        except TornEngine:
            raise
        except EngineError as error:
            self._note_failure(error)
            return False

    async def _newest_unless_pinned(self) -> StagedVersion | None:
        """The next version; None after a timeout, or at once when the engine is pinned."""
        polling = asyncio.create_task(self._newest(LONG_POLL_S))
        pinning = asyncio.create_task(self.pin.pinned.wait())
        try:
            await asyncio.wait({polling, pinning}, return_when=asyncio.FIRST_COMPLETED)
            return polling.result() if polling.done() else None
        finally:
            await end_tasks({polling, pinning})

    async def _newest(self, timeout_s: float) -> StagedVersion | None:
        """The newest version above the served one; None if there is none or no receiver yet."""
        try:
            if self._client is None:
                found = receiver_at(self.host, await self.state.receivers())
                if found is None:
                    await asyncio.sleep(LOOK_AGAIN_S)
                    return None
                self._client = ReceiverClient(*found, self.key)
            return await self._client.newest(self._served, timeout_s=timeout_s)
        except WeightSyncError as error:
            log.warning("%s: %s", self.engine, error)
            await self.forget_receiver()
            await asyncio.sleep(LOOK_AGAIN_S)
            return None

    async def _take(self, offered: StagedVersion) -> bool:
        """Returns whether a version was committed; if not, the engine serves the one before."""
        seen_at, offered_at, before = time.time(), time.monotonic(), self._served
        if not await self._is_alive():
            return False
        limit_s = self.config.commit_timeout_s
        inside_s = limit_s + SLACK_S + (self.config.drain_timeout_s if self._drains else 0.0)
        is_inside = await self.state.enter_commit(
            self.engine, self.config.max_concurrent_commits, inside_s, limit_s
        )
        if not is_inside:
            return False  # the gate took too long; a newer version may be offered by now
        gate_wait_s = time.monotonic() - offered_at
        try:
            # The wait at the gate may have been long.
            if not await self._is_alive() or not self.pin.take(offered.version):
                return False
            try:
                async with self._drained() as drain_s:
                    staged = await self._newest(timeout_s=0)
                    if staged is None:
                        return False
                    try:
                        if not await self._hold(staged):
                            return False
                        if staged.version != offered.version:  # a newer one arrived meanwhile
                            seen_at, offered_at = time.time(), time.monotonic()
                            self.pin.take(staged.version)
                        manifest = await self._manifest_to_read_back(staged)
                        report = await self._commit(staged)
                    finally:  # also if it was cancelled as it got the hold
                        await self._let_go(staged)
                    self._served, self._num_failures = staged.version, 0
                    await self.state.record_commits({self.engine: report.version})
            finally:
                self.pin.note_served(self._served)  # for a torn one EngineLife calls note_lost
        finally:
            await self.state.leave_commit(self.engine)
        record: dict[str, Scalar] = {
            **asdict(report),
            "from_version": before,
            "seen_at": seen_at,
            "merge_s": staged.merge_s,
            "gate_wait_s": gate_wait_s,
            "drain_s": drain_s,
            "staged_to_commit_s": time.monotonic() - offered_at,
            "resumed_at": report.paused_at + (report.pause_s or report.load_s),
        }
        await self.state.append_metrics(record, "commit")
        if manifest is not None:
            await self._read_back(manifest)
        await self._compare()
        return True

    async def _manifest_to_read_back(self, staged: StagedVersion) -> Manifest | None:
        """Read while the version is held; None if the engine is not to be read back."""
        if self.read_back is None or not self.read_back.is_due(staged.version):
            return None
        try:
            return await asyncio.to_thread(Manifest.read, Path(staged.path))
        except (OSError, ValueError) as error:
            log.warning("%s is not read back: no manifest of its version: %s", self.engine, error)
            return None

    async def _read_back(self, manifest: Manifest) -> None:
        """The engine serves the version and decodes. Raises TornEngine if it did not take it."""
        assert self.read_back is not None
        try:
            digest = (await self.read_back.read(manifest)).digest
        except TornEngine:
            raise
        except EngineError as error:
            log.warning("%s is not read back: %s", self.engine, error)
            return
        version = manifest.version
        if other := await self.state.other_weights(version, self.engine, digest):
            what = f"holds other weights than {other} at version {version}"
            log.warning("%s %s", self.engine, what)
            await self.state.append_event("engines_differ", self.engine, what)

    async def _compare(self) -> None:
        """Compare with the trainer, if it has left probes of this version: now, since no other can
        answer before the next commit. A failure costs the comparison alone."""
        if (probes := await self.state.probes(self._served)) is None:
            return
        try:
            async with asyncio.timeout(COMPARE_S):
                found = await self.committer.client.compare(probes)
        except (EngineError, TimeoutError) as error:
            log.warning("%s was not compared with the trainer: %r", self.engine, error)
        else:
            await self.state.append_metrics(found.record(), "agreement")

    @property
    def _drains(self) -> bool:
        return self.config.pause_mode is PauseMode.drain and self._served >= 0

    @asynccontextmanager
    async def _drained(self) -> AsyncGenerator[float]:
        """With pause_mode=drain the engine's requests end before it continues, at most for
        `drain_timeout_s`, and new ones wait or go elsewhere. Yields the seconds that this took.

        Before the staged copy is held: the receiver needs its memory for the next versions.
        """
        if not self._drains:
            yield 0.0
            return
        before, began = self._served, time.monotonic()
        await self.state.drain_engine(self.engine)
        try:
            await self.committer.drain(self.config.drain_timeout_s)
            yield time.monotonic() - began
        except TornEngine:
            raise  # it stays without requests until it is forgotten
        except EngineError:
            await self._undo_drain()
            raise
        if self._served == before:
            await self._undo_drain()

    async def _undo_drain(self) -> None:
        await self.committer.undo_drain()
        await self.state.record_commits({self.engine: self._served})

    async def _is_alive(self) -> bool:
        """A stalled engine must not block the gate."""
        if await self.responds(RESPONSE_TIMEOUT_S):
            return True
        log.warning("%s does not answer and leaves the gate", self.engine)
        return False

    async def _commit(self, staged: StagedVersion) -> CommitReport:
        limit_s = self.config.commit_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self.committer.commit(staged.version, Path(staged.path))
        except TimeoutError as error:
            raise TornEngine(
                f"{self.engine} did not commit version {staged.version} within "
                f"weight_sync.commit_timeout_s={limit_s:g}"
            ) from error

    def _note_failure(self, error: EngineError) -> None:
        """A commit could not begin: the engine continues and tries again."""
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise TornEngine(f"{self._num_failures} commits in a row failed: {error}") from error
        log.warning("%s stays at version %d: %s", self.engine, self._served, error)

    # The staged copy is held while the engine reads it -----------------------------------------

    async def _hold(self, staged: StagedVersion) -> bool:
        """Returns whether the version is still staged: else there is a newer one or no receiver."""
        assert self._client is not None
        ttl_s = self.config.commit_timeout_s + SLACK_S
        return await self._ask(
            self._client.hold(staged.version, self.engine, ttl_s, timeout_s=CALL_TIMEOUT_S)
        )

    async def _let_go(self, staged: StagedVersion) -> None:
        """Best effort: a hold expires by itself."""
        if self._client is not None:
            asking = self._client.let_go(staged.version, self.engine, timeout_s=CALL_TIMEOUT_S)
            await self._ask(asking)

    async def _ask(self, asking: Awaitable[None]) -> bool:
        """Returns whether the receiver did as it was asked."""
        try:
            await asking
        except WeightSyncError as error:
            log.warning("%s: %s", self.engine, error)
            await self.forget_receiver()
            return False
        return True

    async def forget_receiver(self) -> None:
        """Closes the connection; the receiver is looked up again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def receiver_at(host: str, receivers: Mapping[str, str]) -> tuple[str, str] | None:
    """Name and URL of the receiver that listens at `host`; `receivers`: URLs by name."""
    at_host = (found for found in sorted(receivers.items()) if urlsplit(found[1]).hostname == host)
    return next(at_host, None)


class VersionPin:
    """Coordinates an evaluation, which pins an engine to a version, with the engine's follower.

        free ──► wanted ── the engine serves it or a later one ──► pinned ── release ──► free
                    └── it was lost, given up ─────────────────────────────────────────────▲

    State changes are atomic, in one event loop: between `take` and `note_served` no evaluation is
    promised the version that is about to be replaced.
    """

    def __init__(self) -> None:
        self._served = -1
        self._taken = -1
        """The version that the engine is committing; between commits, the one that it serves."""
        self._wanted: int | None = None
        self._outcome: Future[bool] | None = None
        self.pinned, self.free = asyncio.Event(), asyncio.Event()
        self.free.set()
        self.is_away = False
        """An evaluation has pinned the engine since the follower last set this to False."""

    # The evaluation's side ------------------------------------------------------------------------

    async def want(self, version: int, timeout_s: float) -> bool:
        """Waits until the engine serves this version or a later one, and pins it there until
        `release`. Returns False at once if another evaluation wants it."""
        if self._wanted is not None:
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
        """Let the engine continue; does nothing if it is free."""
        self._wanted = None
        self.pinned.clear()
        self.free.set()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(False)

    # The engine's side ----------------------------------------------------------------------------

    def take(self, version: int) -> bool:
        """Returns whether this version may be committed now; if so, `note_served` must follow."""
        if self.pinned.is_set():
            return False
        self._taken = version
        return True

    def note_served(self, version: int) -> None:
        """The engine serves `version`: the one taken, or still the one before."""
        self._served = self._taken = version
        self._look()

    def note_lost(self) -> None:
        self._served = self._taken = -1
        self.is_away = False
        self.release()

    def _look(self) -> None:
        if self._wanted is None or not self._served == self._taken >= self._wanted:
            return
        self.is_away = True
        self.pinned.set()
        self.free.clear()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(True)
