"""Rank 0's side of every publish after the copy: an event loop that owes each version to the fleet.

    pending snapshot ─► encode ─► deliver ─► staged: verified, invisible ─► published ─► released
          ▲                          │ nobody got it                           (the board, once)
          └──────────────────────────┘
    whoever lacks the published version gets it from a peer meanwhile; if none has it, from here

A version becomes visible only after the board says that it is published: if the trainer dies
before, it never was. A receiver's failures cost that receiver alone; what ends the coordinator, and
reaches the trainer, is the loss of a rank or of the board.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from weight_sync.coordinator.broadcast import Courier, Shipment
from weight_sync.coordinator.catch_up import Joiners
from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.coordinator.versions import Fields, Published, publish_record, skipped_record
from weight_sync.layout import Transfer
from weight_sync.receiver.client import ReceiverClient
from weight_sync.sender.commands import Message, RankError, Ranks
from weight_sync.sender.snapshot_buffers import Captured, Slots
from weight_sync.timeouts import Limits
from weight_sync.types import VersionBoard

TICK_S = 1.0
"""Between two looks at who has joined, and between two signs of life to idle ranks."""
_MAX_RETRY_S = 5.0
"""Between two tries to deliver a version that nobody could take; at first it is one tick."""
_MAX_RESENDS = 2
"""Of a version, in full, to a receiver at which its bytes did not agree with the manifest."""


class Coordinator:
    """Runs in the event loop that it is made in, until `run` is cancelled."""

    def __init__(
        self,
        limits: Limits,
        *,
        slots: Slots,
        ranks: Ranks,
        fleet: Fleet,
        courier: Courier,
        board: VersionBoard,
    ) -> None:
        self._layout = limits.layout
        self._config = limits.config
        self._slots = slots
        self._limits = limits
        self._ranks = ranks
        self._fleet = fleet
        self._courier = courier
        self._board = board
        self._wake = asyncio.Event()
        self.published = Published(board, limits.config.commit_timeout_s, self._start)
        self._joiners = Joiners(limits, fleet, board, self._start)
        self._num_deltas = 0
        """Since the last version that was sent in full."""
        self._num_failures = 0
        """Tries in a row that brought the pending version to nobody."""
        self._encoded: tuple[int, int | None, Shipment] | None = None
        """What the ranks hold ready: the version, the base that was asked for, what came of it."""

    def wake(self) -> None:
        """A version is pending."""
        self._wake.set()

    async def run(self) -> None:
        """Returns only by an error: the loss of a rank or of the board."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._work())
            group.create_task(self._ranks.keep_alive(TICK_S))
            group.create_task(self._fleet.watch_silent(TICK_S))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._group.create_task(work)

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            for skipped in self._slots.drain_skipped():
                await self._board.append_metrics(skipped_record(skipped), "publish")
            captured = self._slots.begin()
            if captured is None:
                await self._tend()
                await self._next(TICK_S)
            elif not await self._publish(captured):
                await self._next(min(TICK_S * 2**self._num_failures, _MAX_RETRY_S))

    async def _next(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    # One version ---------------------------------------------------------------------------------

    async def _publish(self, captured: Captured) -> bool:
        """Whether at least one receiver has it now; else it is pending again."""
        members, base_version = await self._members()
        if members:
            try:
                shipment = await self._encode(captured, base_version)
                await self._ship(captured, shipment, [member.client for member in members])
            except RankError as error:  # out of memory, say; a rank that is lost is a ControlError
                self.published.obstacle = str(error)
                await self._fleet.tell("unsent", "trainer", str(error))
        if self.published.has(captured.version):
            self._num_failures = 0
            self._slots.keep(captured)
            return True
        self._num_failures = min(self._num_failures + 1, 10) if members else 0
        self._slots.give_back(captured)
        return False

    async def _members(self) -> tuple[list[Member], int | None]:
        """Who takes part in the next version, and its base; None to send all of it.

        While someone has the published version, nobody waits for who is not ready for the next: a
        receiver without room for it yet, or without the base of a delta. It gets the published one
        from a peer, and takes part from then on.
        """
        clients = await self._fleet.registered()
        free = [client for client in clients if not self._joiners.is_busy(client)]
        there = await self._fleet.members(free)
        if not there:
            names = ", ".join(client.name for client in clients)
            self.published.obstacle = (
                f"no receiver answers: {names}" if names else "no receiver is registered"
            )
        able = [m for m in there if not self._courier.is_aside(m.client)] or there
        version = self.published.newest
        if version is None:
            return able, None
        members = known = [m for m in able if m.status.layout_digest == self._layout.digest]
        current = [m for m in known if version in m.status.complete]
        is_delta_due = self._num_deltas + 1 < self._config.full_every
        if is_delta_due:
            members = current
        if self._num_failures or not current:
            members = able  # there is nobody whom they could hold up
        outside = [m.client for m in there if m not in members and version not in m.status.complete]
        self._joiners.begin(version, outside, there)
        return members, version if is_delta_due and members == current else None

    async def _encode(self, captured: Captured, base_version: int | None) -> Shipment:
        """What the ranks hold ready; a version that is tried again is not encoded again."""
        if self._encoded is None or self._encoded[:2] != (captured.version, base_version):
            shipment = await self._encode_anew(captured, base_version)
            self._encoded = captured.version, base_version, shipment
        return self._encoded[2]

    async def _encode_anew(self, captured: Captured, base_version: int | None) -> Shipment:
        """All ranks at once. A delta only if every rank finds few enough changes."""
        encode_at = time.time()
        with self._slots.reading(base_version) as base:
            command: Message = {
                "do": "encode",
                "version": captured.version,
                "slot": captured.slot,
                "base_version": None if base is None else base.version,
                "base_slot": None if base is None else base.slot,
                "max_density": self._config.max_delta_density,
            }
            results = await self._ranks.command(command, self._limits.encode_s)
        layout = self._layout
        full = Shipment(
            transfer=Transfer(
                version=captured.version,
                base_version=None,
                layout_digest=layout.digest,
                wire_bytes=tuple(layout.stream_bytes(rank) for rank in range(layout.num_ranks)),
                bucket_bytes=self._config.bucket_bytes,
            ),
            layout=layout,
            slot=captured.slot,
            encode_at=encode_at,
            encode_s=max(result["encode_s"] for result in results),
            copy_s=max(result["copy_s"] for result in results),
        )
        if base is None:
            return full
        return full.as_delta(
            base.version,
            [result["num_bytes"] for result in results],
            sum(result["num_changed"] for result in results),
        )

    async def _ship(
        self, captured: Captured, shipment: Shipment, clients: list[ReceiverClient]
    ) -> None:
        """Each receiver offers it as soon as it has it; the first one's makes it published."""
        version, sent = shipment.version, shipment
        record: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()

        async def offer(client: ReceiverClient) -> None:
            await self._board.record_staged(client.name, version)
            if not self.published.has(version):
                self._joiners.has_changed()
                await self.published.add(version, record)
            await self._joiners.offer(client, version)

        for _ in range(1 + _MAX_RESENDS):
            delivery = await self._courier.deliver(sent, clients, offer)
            if delivery.arrived and not record.done():
                self._num_deltas = 0 if sent.is_full else self._num_deltas + 1
                epoch, released_at = self._courier.epoch, self.published.at
                record.set_result(
                    publish_record(captured, sent, delivery, epoch=epoch, released_at=released_at)
                )
            if not delivery.torn:
                break
            # The good ones do not wait for this.
            sent, clients = shipment.in_full(), delivery.torn
        if not record.done():
            self.published.obstacle = f"version {version} reached no receiver: see weights_event"

    # The published one ---------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Receivers that lack the published version, while no other one is on its way."""
        version = self.published.newest
        clients = await self._fleet.registered()
        if version is not None and (lacking := await self._joiners.tend(version, clients)):
            await self._send_again(version, lacking)

    async def _send_again(self, version: int, clients: list[ReceiverClient]) -> None:
        """From this process's snapshot, since no receiver has the version any more."""

        async def offer(client: ReceiverClient) -> None:
            await self._board.record_staged(client.name, version)
            await self._joiners.offer(client, version)
            await self._fleet.tell("catch_up", client.name, f"version {version} from the trainer")

        with self._slots.reading(version) as kept:
            if kept is None:
                return  # a newer version is on its way, which they get with the others
            shipment = await self._encode(kept, None)
            delivery = await self._courier.deliver(shipment, clients, offer)
        for client in clients:
            if client not in delivery.arrived:
                await self._joiners.failed(client, "no peer had it, and the trainer's did not come")
