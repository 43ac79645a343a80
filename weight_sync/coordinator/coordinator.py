"""Rank 0's part of every publish after the copy: an event loop that delivers versions to the fleet.

    pending snapshot ─► encode ─► deliver ─► staged: verified, invisible ─► published ─► released
          ▲                          │ no receiver got it                     (the board, once)
          └──────────────────────────┘

Meanwhile receivers that lack the published version get it from a peer, or from here if no peer
holds it. A version becomes visible only after the board records it as published; if the trainer
dies before that, the version never existed. A receiver's failure affects that receiver only. The
loss of a rank or of the board ends the coordinator, and the trainer gets the error.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from torch._C._distributed_c10d import TCPStore

from weight_sync.coordinator.broadcast import Broadcaster, EncodedVersion
from weight_sync.coordinator.catch_up import CatchUp
from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.coordinator.versions import Fields, Published, publish_record, skipped_record
from weight_sync.layout import Transfer
from weight_sync.receiver.client import ReceiverClient
from weight_sync.sender.commands import Message, RankError, Ranks
from weight_sync.sender.snapshot_buffers import Captured, SnapshotBuffers
from weight_sync.timeouts import Timeouts
from weight_sync.types import GroupSpec, VersionBoard

TICK_S = 1.0
"""Interval of the checks for new receivers and of the keep-alives to idle ranks."""
_MAX_RETRY_S = 5.0
"""Longest pause between tries of a version that no receiver could take; the first is one tick."""
_CLOSE_S = 5.0
_MAX_RESENDS = 2
"""Times that a version is sent again, in full, to a receiver where its checksums did not match."""


class Coordinator:
    """Runs in the event loop that it was created in, until `run` is cancelled."""

    def __init__(
        self,
        timeouts: Timeouts,
        *,
        buffers: SnapshotBuffers,
        ranks: Ranks,
        board: VersionBoard,
        group: GroupSpec,
        store: TCPStore,
        key: str,
    ) -> None:
        """`group`, `store`: see Broadcaster. `key` is that of the receivers."""
        self._layout = timeouts.layout
        self._config = timeouts.config
        self._buffers = buffers
        self._timeouts = timeouts
        self._ranks = ranks
        self._board = board
        self._tasks = asyncio.TaskGroup()
        self._wake = asyncio.Event()
        self._fleet = Fleet(board, timeouts, key)
        self._broadcaster = Broadcaster(self._fleet, ranks, timeouts, group, store)
        self.published = Published(board, timeouts.config.commit_timeout_s, self._tasks)
        self._catch_up = CatchUp(timeouts, self._fleet, board, self._tasks)
        self._num_deltas = 0
        """Deltas since the last version that was sent in full."""
        self._num_failures = 0
        """Attempts in a row that delivered the pending version to no receiver."""
        self._encoded: tuple[int, int | None, EncodedVersion] | None = None
        """The ranks' last encoding: its version, the requested base, and the result."""

    def wake(self) -> None:
        """Call when a version is pending."""
        self._wake.set()

    async def run(self) -> None:
        """Ends only with an error: the loss of a rank or of the board."""
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._work())
                tasks.create_task(self._ranks.keep_alive(TICK_S))
                tasks.create_task(self._fleet.watch_silent(TICK_S))
        finally:
            await self._ranks.close(_CLOSE_S)
            await self._fleet.close()
            await self._board.close()

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            for skipped in self._buffers.drain_skipped():
                await self._board.append_metrics(skipped_record(skipped), "publish")
            captured = self._buffers.begin()
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
        """Whether at least one receiver has it now; otherwise it is pending again."""
        members, base_version = await self._members()
        if members:
            try:
                encoded = await self._encode(captured, base_version)
                await self._broadcast(captured, encoded, members)
            except RankError as error:
                # Such as out of memory; the loss of a rank is a ControlError.
                self.published.obstacle = str(error)
                await self._fleet.report("unsent", "trainer", str(error))
        if self.published.has(captured.version):
            self._num_failures = 0
            self._buffers.keep(captured)
            return True
        self._num_failures = min(self._num_failures + 1, 10) if members else 0
        self._buffers.give_back(captured)
        return False

    async def _members(self) -> tuple[list[Member], int | None]:
        """The receivers of the next version, and its base; None to send it in full.

        While a receiver holds the published version, a publish does not wait for receivers that are
        not ready: without room for the model yet, or without the base of a delta. They get the
        published version from a peer and take part from then on.
        """
        clients = await self._fleet.registered()
        free = [client for client in clients if not self._catch_up.is_busy(client)]
        there = await self._fleet.members(free)
        if not there:
            names = ", ".join(client.name for client in clients)
            self.published.obstacle = (
                f"no receiver responds: {names}" if names else "no receiver is registered"
            )
        able = [m for m in there if not self._broadcaster.is_backed_off(m.client)] or there
        version = self.published.newest
        if version is None:
            return able, None
        members = known = [m for m in able if m.status.layout_digest == self._layout.digest]
        current = [m for m in known if version in m.status.complete]
        is_delta_due = self._num_deltas + 1 < self._config.full_every
        if is_delta_due:
            members = current
        if self._num_failures or not current:
            members = able  # there is no other receiver that they could delay
        outside = [m.client for m in there if m not in members and version not in m.status.complete]
        self._catch_up.begin(version, outside, there)
        return members, version if is_delta_due and members == current else None

    async def _encode(self, captured: Captured, base_version: int | None) -> EncodedVersion:
        """The encoded version; a retry reuses the last encoding."""
        if self._encoded is None or self._encoded[:2] != (captured.version, base_version):
            encoded = await self._encode_on_ranks(captured, base_version)
            self._encoded = captured.version, base_version, encoded
        return self._encoded[2]

    async def _encode_on_ranks(
        self, captured: Captured, base_version: int | None
    ) -> EncodedVersion:
        """Encode on all ranks at once; as a delta only if every rank finds few enough changes."""
        encode_at = time.time()
        with self._buffers.reading(base_version) as base:
            command: Message = {
                "do": "encode",
                "version": captured.version,
                "buffer": captured.buffer,
                "base_version": None if base is None else base.version,
                "base_buffer": None if base is None else base.buffer,
                "max_density": self._config.max_delta_density,
            }
            results = await self._ranks.command(command, self._timeouts.encode_s)
        full = Transfer.full(captured.version, self._layout, self._config.bucket_bytes)
        encoded = EncodedVersion(
            transfer=full,
            buffer=captured.buffer,
            encode_at=encode_at,
            encode_s=max(result["encode_s"] for result in results),
            copy_s=max(result["copy_s"] for result in results),
        )
        # A rank that found too many changes has no delta.
        sizes = tuple(size for result in results if (size := result["num_bytes"]) is not None)
        if base is None or len(sizes) < len(results) or sum(sizes) >= full.num_wire_bytes:
            return encoded
        num_changed = sum(result["num_changed"] for result in results)
        num_elements = sum(tensor.num_elements for tensor in self._layout.tensors)
        return replace(
            encoded,
            transfer=replace(full, base_version=base.version, wire_bytes=sizes),
            density=num_changed / num_elements,
        )

    async def _broadcast(
        self, captured: Captured, encoded: EncodedVersion, members: list[Member]
    ) -> None:
        """Each receiver offers the version once it has it; the first one publishes it."""
        version, sent = encoded.version, encoded
        record: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()

        async def offer(client: ReceiverClient) -> None:
            await self._board.record_staged(client.name, version)
            if not self.published.has(version):
                self._catch_up.clear_holders()
                await self.published.add(version, record)
            await self._catch_up.offer(client, version)

        for _ in range(1 + _MAX_RESENDS):
            delivery = await self._broadcaster.deliver(sent, members, offer)
            if delivery.arrived and not record.done():
                self._num_deltas = 0 if sent.transfer.is_full else self._num_deltas + 1
                record.set_result(
                    publish_record(
                        captured,
                        sent,
                        delivery,
                        num_bytes=self._layout.num_bytes,
                        epoch=self._broadcaster.epoch,
                        released_at=self.published.at,
                    )
                )
            if not delivery.torn:
                break
            # The receivers that have the version do not wait for this.
            sent, members = encoded.in_full(self._layout), await self._fleet.members(delivery.torn)
        if not record.done():
            self.published.obstacle = f"version {version} reached no receiver: see weights_event"

    # The published version -----------------------------------------------------------------------

    async def _tend(self) -> None:
        """Serve receivers that lack the published version, while no new version is pending."""
        version = self.published.newest
        clients = await self._fleet.registered()
        if version is not None and (lacking := await self._catch_up.tend(version, clients)):
            await self._send_again(version, lacking)

    async def _send_again(self, version: int, clients: list[ReceiverClient]) -> None:
        """Send from this trainer's snapshot, because no receiver holds the version any more."""

        async def offer(client: ReceiverClient) -> None:
            await self._board.record_staged(client.name, version)
            await self._catch_up.offer(client, version)
            await self._fleet.report("catch_up", client.name, f"version {version} from the trainer")

        with self._buffers.reading(version) as kept:
            if kept is None:
                return  # a newer version is pending; they get that one with the others
            encoded = await self._encode(kept, None)
            members = await self._fleet.members(clients)
            delivery = await self._broadcaster.deliver(encoded, members, offer)
        for client in clients:
            if client not in delivery.arrived:
                await self._catch_up.failed(
                    client, "no peer had it, and the trainer could not send it"
                )
