"""Receivers that lack the published version copy it from a peer, in parallel to all other work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from weight_sync.coordinator.broadcast import Backoff
from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.errors import ReceiverUnreachable
from weight_sync.receiver.client import ReceiverClient
from weight_sync.timeouts import Timeouts
from weight_sync.types import VersionBoard, WeightSyncError

_RETRY_S = (5.0, 20.0)
"""First and longest pause before a receiver that failed to catch up tries again."""
NO_ANSWER = "version {} is here, though the answer was lost"


class CatchUp:
    """Tracks which receivers hold the published version. Used in one event loop."""

    def __init__(
        self, timeouts: Timeouts, fleet: Fleet, board: VersionBoard, tasks: asyncio.TaskGroup
    ) -> None:
        self._timeouts = timeouts
        self._fleet = fleet
        self._board = board
        self._tasks = tasks
        self._holders: set[ReceiverClient] = set()
        """Receivers known to hold the published version."""
        self._catching_up: set[ReceiverClient] = set()
        self._unanswered: set[ReceiverClient] = set()
        """Did not respond while they caught up, but may hold the version."""
        self._rest: Backoff[ReceiverClient] = Backoff(*_RETRY_S)

    def is_busy(self, client: ReceiverClient) -> bool:
        """Whether it is catching up, and cannot take part in a broadcast."""
        return client in self._catching_up

    def clear_holders(self) -> None:
        """Call before another version is published: no receiver is known to hold it."""
        self._holders.clear()

    async def offer(self, client: ReceiverClient, version: int) -> None:
        """Make a published version, whole at this receiver, visible to its engines."""
        try:
            request = client.release(version, timeout_s=self._timeouts.order_s)
            await self._fleet.call(client, request)
        except WeightSyncError as error:  # the next `tend` tries again
            await self._fleet.report_failure(client, "unreleased", str(error))
        else:
            self._holders.add(client)
            self._unanswered.discard(client)
            self._rest.worked(client)
            self._fleet.mark_healthy(client)

    async def tend(self, version: int, clients: Iterable[ReceiverClient]) -> list[ReceiverClient]:
        """Bring the published version to all of them.

        Returns the receivers that lack it while no peer holds it either.
        """
        registered = set(clients)
        self._holders &= registered
        self._unanswered &= registered
        behind = registered - self._holders - self._catching_up
        lacking = []
        for member in await self._fleet.members(sorted(behind, key=lambda client: client.name)):
            if member.has_released(version):
                self._holders.add(member.client)
                if member.client in self._unanswered:
                    await self._caught_up(member.client, version, NO_ANSWER.format(version))
            elif version in member.status.complete:
                was_unanswered = member.client in self._unanswered
                await self._board.record_staged(member.name, version)
                await self.offer(member.client, version)
                if was_unanswered and member.client in self._holders:
                    await self._caught_up(member.client, version, NO_ANSWER.format(version))
            elif not self._rest.is_resting(member.client):
                lacking.append(member.client)
        if not lacking:
            return []
        holders = await self._fleet.members(self._holders)
        return self.begin(version, lacking, holders)

    def begin(
        self, version: int, lacking: Iterable[ReceiverClient], peers: Iterable[Member]
    ) -> list[ReceiverClient]:
        """Start catching up from `peers`. Returns the receivers that cannot, if no peer has it."""
        urls = [peer.client.url for peer in peers if version in peer.status.complete]
        clients = [c for c in lacking if not (self.is_busy(c) or self._rest.is_resting(c))]
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
        try:
            report = await self._fleet.call(client, request)
        except WeightSyncError as error:
            if isinstance(error, ReceiverUnreachable):
                self._unanswered.add(client)
            await self.failed(client, str(error))
        else:
            source = "its own folder" if report.peer is None else report.peer
            detail = f"version {version} from {source} in {report.seconds:.2f} s"
            await self._caught_up(client, version, detail)
        finally:
            # The next `tend` finds that it holds the version, or tries again.
            self._catching_up.discard(client)

    async def _caught_up(self, client: ReceiverClient, version: int, detail: str) -> None:
        self._unanswered.discard(client)
        self._rest.worked(client)
        self._fleet.mark_healthy(client)
        await self._board.record_staged(client.name, version)
        await self._fleet.report("catch_up", client.name, detail)

    async def failed(self, client: ReceiverClient, detail: str) -> None:
        """Report that it could not catch up, and pause before it tries again."""
        self._rest.failed(client)
        await self._fleet.report_failure(client, "catch_up_failed", detail)
