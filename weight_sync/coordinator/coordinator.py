"""Rank 0's part of every publish after the copy: an event loop that delivers versions to the fleet.

    pending snapshot ─► encode ─► send ─► verify ─► mark available ─► release
          ▲                         │ no receiver   (on the board, once)
          └─────────────────────────┘ got it whole

Meanwhile receivers that lack the available version get it from a peer, or from here if no peer
has it. Engines see a version only after the board records it as available; if the trainer dies
before that, the version never existed. A receiver's failure affects that receiver only. The
loss of a rank or of the board ends the coordinator, and the trainer gets the error. In records
`*_at` is Unix time and `*_s` is seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from torch._C._distributed_c10d import TCPStore

from configs.run_files import Scalar
from weight_sync.coordinator.broadcast import Broadcaster, Delivery, EncodedVersion
from weight_sync.coordinator.catch_up import CatchUp
from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.receiver.client import ReceiverClient
from weight_sync.sender.control import Message, RankControl, RankError
from weight_sync.sender.snapshot_buffers import SnapshotBuffers
from weight_sync.timeouts import Timeouts
from weight_sync.types import Captured, GroupSpec, Transfer, VersionBoard, WeightSyncError

TICK_S = 1.0
"""Interval of the checks for new receivers and of the keep-alives to idle ranks."""
_MAX_RETRY_S = 5.0
"""Longest pause between tries of a version that no receiver has got; the first is one tick."""
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
        ranks: RankControl,
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
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._fleet = Fleet(board, timeouts, key)
        self._broadcaster = Broadcaster(self._fleet, ranks, timeouts, group, store)
        self.availability = Availability(board, timeouts.config.commit_timeout_s, self._tasks)
        self._catch_up = CatchUp(timeouts, self._fleet, board, self._tasks)
        self._num_deltas = 0
        """Deltas since the last version that was sent in full."""
        self._num_failures = 0
        """Attempts in a row that delivered the pending version to no receiver."""
        self._encoded: tuple[int, int | None, EncodedVersion] | None = None
        """The ranks' last encoding: its version, the requested base, and the result."""

    def wake(self) -> None:
        """Call when a version is pending, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Ends only with an error: the loss of a rank or of the board. `close` comes then."""
        async with self._tasks as tasks:
            tasks.create_task(self._work())
            tasks.create_task(self._ranks.keep_alive(TICK_S))
            tasks.create_task(self._fleet.watch_silent(TICK_S))

    async def close(self) -> None:
        """A trainer that closes the engine cuts this short, but nothing is left open."""
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._board.close)
            closing.push_async_callback(self._fleet.close)
            closing.push_async_callback(self._ranks.close, _CLOSE_S)

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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    # One version ---------------------------------------------------------------------------------

    async def _publish(self, captured: Captured) -> bool:
        """Encode, send, verify, mark available, release. Returns whether a receiver got it.

        If none did, the version is pending again.
        """
        members, base_version = await self._members()
        if members:
            try:
                encoded = await self._encode(captured, base_version)
                await self._deliver(encoded, members)
            except RankError as error:
                # Such as out of memory; the loss of a rank is a ControlError.
                self.availability.obstacle = str(error)
                await self._fleet.report("unsent", "trainer", str(error))
        if self.availability.has(captured.version):
            self._num_failures = 0
            self._buffers.delivered(captured)
            return True
        self._num_failures = min(self._num_failures + 1, 10) if members else 0
        self._buffers.give_back(captured)
        return False

    async def _members(self) -> tuple[list[Member], int | None]:
        """The receivers of the next version, and its base; None to send it in full.

        While a receiver has the available version, the next does not wait for receivers that are
        not ready: without room for the model yet, or without the base of a delta. They get the
        available version from a peer and take part from then on.
        """
        clients = await self._fleet.registered()
        free = [client for client in clients if not self._catch_up.is_busy(client)]
        there = await self._fleet.members(free)
        if not there:
            names = ", ".join(client.name for client in clients)
            self.availability.obstacle = (
                f"no receiver responds: {names}" if names else "no receiver is registered"
            )
        able = [m for m in there if not self._broadcaster.backoff.is_resting(m.client)] or there
        version = self.availability.newest
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
        """Encode on all ranks at once; as a delta only if every rank finds few enough changes.

        A retry reuses the last encoding.
        """
        if self._encoded is not None and self._encoded[:2] == (captured.version, base_version):
            return self._encoded[2]
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
            captured=captured,
            transfer=full,
            encode_at=encode_at,
            encode_s=max(result["encode_s"] for result in results),
            copy_s=max(result["copy_s"] for result in results),
        )
        # A rank that found too many changes has no delta.
        sizes = tuple(size for result in results if (size := result["num_bytes"]) is not None)
        if base is not None and len(sizes) == len(results) and sum(sizes) < full.num_wire_bytes:
            num_changed = sum(result["num_changed"] for result in results)
            encoded = replace(
                encoded,
                transfer=replace(full, base_version=base.version, wire_bytes=sizes),
                density=num_changed / sum(tensor.num_elements for tensor in self._layout.tensors),
            )
        self._encoded = captured.version, base_version, encoded
        return encoded

    async def _deliver(self, encoded: EncodedVersion, members: list[Member]) -> None:
        """Send the version until it is whole at the members that can receive it.

        The version is marked available when the first has verified it, and released at each.
        """
        version, sent = encoded.transfer.version, encoded
        record: asyncio.Future[Mapping[str, Scalar]] = asyncio.get_running_loop().create_future()

        async def on_arrival(client: ReceiverClient) -> None:
            await self._board.record_staged(client.name, version)
            if not self.availability.has(version):
                await self.availability.mark(version, record)
            await self._release(client, version)

        for _ in range(1 + _MAX_RESENDS):
            delivery = await self._broadcaster.deliver(sent, members, on_arrival)
            if delivery.arrived and not record.done():
                self._num_deltas = 0 if sent.transfer.is_full else self._num_deltas + 1
                record.set_result(
                    publish_record(
                        sent,
                        delivery,
                        num_bytes=self._layout.num_bytes,
                        epoch=self._broadcaster.epoch,
                        available_at=self.availability.at,
                    )
                )
            if not delivery.torn:
                break
            # The receivers that have the version do not wait for this.
            sent, members = encoded.in_full(self._layout), await self._fleet.members(delivery.torn)
        if not record.done():
            self.availability.obstacle = f"version {version} reached no receiver: see weights_event"

    async def _release(self, client: ReceiverClient, version: int) -> None:
        """Let the engines beside this receiver take the version, which it has whole."""
        if await self._fleet.release(client, version):
            self._catch_up.forget_failures(client)

    # The available version -----------------------------------------------------------------------

    async def _tend(self) -> None:
        """Serve receivers that lack the available version, while no new version is pending."""
        version = self.availability.newest
        clients = await self._fleet.registered()
        if version is not None and (lacking := await self._catch_up.tend(version, clients)):
            await self._send_again(version, lacking)

    async def _send_again(self, version: int, clients: list[ReceiverClient]) -> None:
        """Send from this trainer's snapshot, because no receiver has the version any more."""

        async def on_arrival(client: ReceiverClient) -> None:
            await self._board.record_staged(client.name, version)
            await self._release(client, version)
            await self._fleet.report("catch_up", client.name, f"version {version} from the trainer")

        with self._buffers.reading(version) as captured:
            if captured is None:
                return  # a newer version is pending; they get that one with the others
            encoded = await self._encode(captured, None)
            members = await self._fleet.members(clients)
            delivery = await self._broadcaster.deliver(encoded, members, on_arrival)
        for client in clients:
            if client not in delivery.arrived:
                await self._catch_up.failed(
                    client, "no peer had it, and the trainer could not send it"
                )


class Availability:
    """Remembers the newest available version and wakes its waiters. Used in one event loop."""

    def __init__(
        self, board: VersionBoard, commit_timeout_s: float, tasks: asyncio.TaskGroup
    ) -> None:
        self._board = board
        self._commit_timeout_s = commit_timeout_s
        self._tasks = tasks
        self.newest: int | None = None
        self.at = 0.0
        """Unix time at which the newest version was marked available."""
        self._reports: dict[int, asyncio.Task[None]] = {}
        """The task that will write the record of a publish, by version."""
        self._has_changed = asyncio.Condition()
        self.obstacle = "no receiver is registered"
        """Why the next version is not available yet."""

    def has(self, version: int) -> bool:
        return self.newest is not None and self.newest >= version

    async def mark(self, version: int, record: asyncio.Future[Mapping[str, Scalar]]) -> None:
        """Mark `version` available on the board; a second call changes nothing.

        `record` resolves to the fields of the publish record when the broadcast has ended.
        """
        async with self._has_changed:
            if self.has(version):
                return
            await self._board.mark_available(version)
            self.newest, self.at = version, time.time()
            self._reports[version] = self._tasks.create_task(self._report(version, record))
            self._has_changed.notify_all()

    async def _report(self, version: int, record: asyncio.Future[Mapping[str, Scalar]]) -> None:
        """Write the record once every engine serves the version, or at the timeout."""
        converged_at = None
        try:
            engines = await self._board.wait_engines_at(version, self._commit_timeout_s)
            converged_at = time.time()
        except TimeoutError:
            engines = await self._board.engine_versions()
        fields = {**await record, "num_engines": len(engines)}
        if converged_at is not None:
            fields["converged_at"] = converged_at
            fields["convergence_s"] = converged_at - float(fields["snapshot_at"])
        await self._board.append_metrics(fields, "publish")
        del self._reports[version]

    async def wait(self, version: int, timeout_s: float) -> None:
        """Wait until `version` or later is available. Raises WeightSyncError with the obstacle."""
        try:
            async with asyncio.timeout(timeout_s), self._has_changed:
                await self._has_changed.wait_for(lambda: self.has(version))
        except TimeoutError:
            raise WeightSyncError(
                f"version {version} was not available within {timeout_s:g} s: {self.obstacle}"
            ) from None

    async def wait_committed(self, version: int, timeout_s: float) -> None:
        """As `CheckpointEngine.wait_committed`."""
        deadline = time.monotonic() + timeout_s
        await self.wait(version, timeout_s)
        try:
            await self._board.wait_engines_at(version, max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise WeightSyncError(str(error)) from None

    async def drain(self, version: int, timeout_s: float) -> None:
        """As `CheckpointEngine.drain`."""
        deadline = time.monotonic() + timeout_s
        await self.wait(version, timeout_s)
        reports = [task for other, task in self._reports.items() if other <= version]
        if reports:
            await asyncio.wait(reports, timeout=max(0.0, deadline - time.monotonic()))


def skipped_record(captured: Captured) -> Mapping[str, Scalar]:
    """Record of a version that a newer one replaced before any receiver had it."""
    return {**_snapshot(captured), "mode": "skipped"}


def publish_record(
    encoded: EncodedVersion,
    delivery: Delivery,
    *,
    num_bytes: int,
    epoch: int,
    available_at: float,
) -> Mapping[str, Scalar]:
    """Record of an available version, without the time at which all engines have it.

    `num_bytes`: size of the whole model.
    """
    return {
        **_snapshot(encoded.captured),
        "mode": "full" if encoded.transfer.is_full else "delta",
        "copy_s": encoded.copy_s,
        "encode_at": encoded.encode_at,
        "encode_s": encoded.encode_s,
        "wire_at": delivery.wire_at,
        "wire_s": delivery.wire_s,
        "num_chains": len(delivery.chains_s),
        "fastest_chain_s": min(delivery.chains_s),
        "slowest_chain_s": max(delivery.chains_s),
        "verify_at": delivery.verify_at,
        "verify_s": delivery.verify_s,
        "available_at": available_at,
        "stage_s": available_at - encoded.encode_at,
        "bytes": num_bytes,
        "wire_bytes": encoded.transfer.num_wire_bytes,
        "density": encoded.density,
        "epoch": epoch,
        "num_receivers": len(delivery.arrived),
    }


def _snapshot(captured: Captured) -> Mapping[str, Scalar]:
    return {
        "version": captured.version,
        "snapshot_wait_s": captured.wait_s,
        "snapshot_at": captured.snapshot_at,
        "snapshot_s": captured.snapshot_s,
    }
