"""Receivers that lack the published version: they get it from a peer, beside everything else."""

from __future__ import annotations

from collections.abc import Iterable

from weight_sync.coordinator.broadcast import Backoff
from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.coordinator.versions import Start
from weight_sync.receiver.client import ReceiverClient
from weight_sync.timeouts import Limits
from weight_sync.types import VersionBoard, WeightSyncError

_RETRY_S = (5.0, 20.0)
"""Before a receiver that failed to catch up is asked again: at first, and at most."""


class Joiners:
    """Used in one event loop."""

    def __init__(self, limits: Limits, fleet: Fleet, board: VersionBoard, start: Start) -> None:
        self._limits = limits
        self._fleet = fleet
        self._board = board
        self._start = start
        self._holders: set[ReceiverClient] = set()
        """Who has the published version, as far as is known."""
        self._catching_up: set[ReceiverClient] = set()
        self._rest: Backoff[ReceiverClient] = Backoff(*_RETRY_S)

    def is_busy(self, client: ReceiverClient) -> bool:
        """It is catching up, and can take part in nothing else."""
        return client in self._catching_up

    def has_changed(self) -> None:
        """Another version is the published one: nobody is known to have it."""
        self._holders.clear()

    async def offer(self, client: ReceiverClient, version: int) -> None:
        """Make a whole and published version visible to this receiver's engines."""
        try:
            request = client.release(version, timeout_s=self._limits.order_s)
            await self._fleet.call(client, request)
        except WeightSyncError as error:  # the next look tries it again
            await self._fleet.trouble(client, "unreleased", str(error))
        else:
            self._holders.add(client)
            self._rest.worked(client)
            self._fleet.is_well(client)

    async def tend(self, version: int, clients: Iterable[ReceiverClient]) -> list[ReceiverClient]:
        """See to it that all of them get the published version.

        Returns those that lack it though no peer has it either.
        """
        registered = set(clients)
        self._holders &= registered
        behind = registered - self._holders - self._catching_up
        lacking = []
        for member in await self._fleet.members(sorted(behind, key=lambda client: client.name)):
            if member.has_released(version):
                self._holders.add(member.client)
            elif version in member.status.complete:
                await self._board.record_staged(member.name, version)
                await self.offer(member.client, version)
            elif not self._rest.is_resting(member.client):
                lacking.append(member.client)
        if not lacking:
            return []
        holders = await self._fleet.members(self._holders)
        return self.begin(version, lacking, holders)

    def begin(
        self, version: int, lacking: Iterable[ReceiverClient], peers: Iterable[Member]
    ) -> list[ReceiverClient]:
        """Start to catch up with the published version. Returns who cannot, for want of a peer."""
        urls = [peer.client.url for peer in peers if version in peer.status.complete]
        clients = [c for c in lacking if not (self.is_busy(c) or self._rest.is_resting(c))]
        if not urls:
            return clients
        for client in clients:
            self._catching_up.add(client)
            self._start(self._catch_up(client, version, urls))
        return []

    async def _catch_up(self, client: ReceiverClient, version: int, peers: list[str]) -> None:
        """From a peer's staged copy: neither training nor the other receivers take part."""
        request = client.catch_up(
            version, peers, self._limits.layout, timeout_s=self._limits.prepare_s
        )
        try:
            report = await self._fleet.call(client, request)
        except WeightSyncError as error:
            await self.failed(client, str(error))
        else:
            source = "its own folder" if report.peer is None else report.peer
            detail = f"version {version} from {source} in {report.seconds:.2f} s"
            self._rest.worked(client)
            self._fleet.is_well(client)
            await self._board.record_staged(client.name, version)
            await self._fleet.tell("catch_up", client.name, detail)
        finally:
            # The next look finds it among those that have the version, or tries again.
            self._catching_up.discard(client)

    async def failed(self, client: ReceiverClient, detail: str) -> None:
        """It could not catch up, and is left alone for a moment."""
        self._rest.failed(client)
        await self._fleet.trouble(client, "catch_up_failed", detail)
