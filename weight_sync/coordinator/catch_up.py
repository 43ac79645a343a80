"""Receivers that lack the available version copy it from a peer, in parallel to all other work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from weight_sync.coordinator.fleet import Backoff, Fleet, Member
from weight_sync.receiver.client import ReceiverClient
from weight_sync.timeouts import Timeouts
from weight_sync.types import ReceiverUnreachable, VersionBoard, WeightSyncError

_RETRY_S = (5.0, 20.0)
"""First and longest pause before a receiver that failed to catch up tries again."""


class CatchUp:
    """Starts copies from peers and remembers how they ended. Used in one event loop."""

    def __init__(
        self, timeouts: Timeouts, fleet: Fleet, board: VersionBoard, tasks: asyncio.TaskGroup
    ) -> None:
        self._timeouts = timeouts
        self._fleet = fleet
        self._board = board
        self._tasks = tasks
        self._catching_up: set[ReceiverClient] = set()
        self._unanswered: set[ReceiverClient] = set()
        """Did not respond while they caught up, but may have the version."""
        self._backoff = Backoff(*_RETRY_S)

    def is_busy(self, client: ReceiverClient) -> bool:
        """Returns whether it is catching up, and so cannot take part in a broadcast."""
        return client in self._catching_up

    async def tend(self, version: int, clients: Iterable[ReceiverClient]) -> list[ReceiverClient]:
        """Bring the available version to all of them.

        Returns the receivers that lack it while no peer has it either.
        """
        registered = set(clients)
        self._unanswered &= registered
        done = {client for client in registered if self._fleet.has_released(client, version)}
        behind = registered - done - self._catching_up
        lacking = []
        for member in await self._fleet.members(sorted(behind, key=lambda client: client.name)):
            client = member.client
            if member.has_released(version):
                self._fleet.note_released(client, version)
            elif version not in member.status.complete:
                if not self._backoff.is_resting(client):
                    lacking.append(client)
                continue
            else:
                await self._board.record_staged(client.name, version)
                if not await self._fleet.release(client, version):
                    continue
            done.add(client)
            if client in self._unanswered:
                detail = f"version {version} is here, though the answer was lost"
                await self._caught_up(client, version, detail)
            self.forget_failures(client)
        if not lacking:
            return []
        return self.begin(version, lacking, await self._fleet.members(done))

    def begin(
        self, version: int, lacking: Iterable[ReceiverClient], peers: Iterable[Member]
    ) -> list[ReceiverClient]:
        """Start catching up from `peers`. Returns the receivers that cannot, if no peer has it."""
        urls = [peer.client.url for peer in peers if version in peer.status.complete]
        clients = [c for c in lacking if not (self.is_busy(c) or self._backoff.is_resting(c))]
        if not urls:
            return clients
        for client in clients:
            self._catching_up.add(client)
            self._tasks.create_task(self._catch_up(client, version, urls))
        return []

    async def _catch_up(self, client: ReceiverClient, version: int, peers: list[str]) -> None:
        """Copy from a peer: neither training nor the other receivers take part."""
        request = client.catch_up(
            version, peers, self._timeouts.layout, timeout_s=self._timeouts.prepare_s
        )
        start = time.monotonic()
        try:
            peer = await self._fleet.call(client, request)
        except WeightSyncError as error:
            if isinstance(error, ReceiverUnreachable):
                self._unanswered.add(client)
            await self.failed(client, str(error))
        else:
            source, seconds = peer or "its own folder", time.monotonic() - start
            detail = f"version {version} from {source} in {seconds:.2f} s"
            await self._caught_up(client, version, detail)
        finally:
            # The next `tend` finds that it has the version, or tries again.
            self._catching_up.discard(client)

    async def _caught_up(self, client: ReceiverClient, version: int, detail: str) -> None:
        self.forget_failures(client)
        self._fleet.mark_healthy(client)
        await self._board.record_staged(client.name, version)
        await self._fleet.report("catch_up", client.name, detail)

    async def failed(self, client: ReceiverClient, detail: str) -> None:
        """Report that it could not catch up, and pause before it tries again."""
        self._backoff.failed(client)
        await self._fleet.report_failure(client, "catch_up_failed", detail)

    def forget_failures(self, client: ReceiverClient) -> None:
        """Call when a receiver has the available version, from wherever."""
        self._unanswered.discard(client)
        self._backoff.worked(client)
