"""Sends one version to a set of receivers, each of which verifies it.

    weight group of the epoch ──► every rank sends, every receiver receives ──► verify
      ▲                              │ a member died, stalled, gave up or refused
      └── the other receivers that ◄─┘
          still respond, from the first bucket that one lacks

The first failure ends an epoch, whose number is never reused. An attempt that fails although all
members still respond is futile. After a few of those the receivers are served one at a time, which
identifies the faulty one. A receiver that fails alone, while others can be served, is backed off:
it is left out for a time that grows with each failure, and then served after the others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tensors.layout import Layout
from weight_sync.buckets import plan_buckets
from weight_sync.coordinator.fleet import Backoff, Fleet, Member
from weight_sync.group import forget_epochs
from weight_sync.receiver.client import ReceiverClient
from weight_sync.sender.control import ControlError, Message, RankControl, RankError
from weight_sync.timeouts import Timeouts, wire_s
from weight_sync.types import (
    REFUSALS,
    Captured,
    ChecksumMismatch,
    GroupSpec,
    Manifest,
    StoreBusyError,
    Transfer,
    WeightSyncError,
)

_MAX_FUTILE = 2
"""Futile attempts before receivers are served one at a time."""

Clients = list[ReceiverClient]
OnArrival = Callable[[ReceiverClient], Awaitable[None]]
"""Called at once for a receiver that has the version whole and verified."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EncodedVersion:
    """A version that is ready to be sent on every rank."""

    captured: Captured
    transfer: Transfer
    encode_at: float
    encode_s: float
    copy_s: float = 0.0
    """Copy time of the slowest rank; on a GPU the copy runs beside training."""
    density: float = 1.0
    """Fraction of the elements that are sent."""

    def in_full(self, layout: Layout) -> EncodedVersion:
        """The same version without a base."""
        full = Transfer.full(self.transfer.version, layout, self.transfer.bucket_bytes)
        return replace(self, transfer=full, density=1.0)


@dataclass(kw_only=True, slots=True)
class Delivery:
    """Outcome of one broadcast; `*_at` in Unix time."""

    arrived: Clients = field(default_factory=list)
    """Have the version, whole and verified."""
    torn: Clients = field(default_factory=list)
    """Received bytes that do not match the manifest, and discarded them."""
    left_out: Clients = field(default_factory=list)
    """Had no slot for it, or were still busy with an attempt that the others had given up."""
    wire_at: float = 0.0
    wire_s: float = 0.0
    """From the first byte of the first attempt to the last byte of the first successful one."""
    chains_s: tuple[float, ...] = ()
    """By chain, the time that its slowest rank took to send in that attempt."""
    verify_at: float = 0.0
    verify_s: float = 0.0
    """Verification time of the slowest receiver."""


class Broadcaster:
    """Owns the membership epochs. Delivers one version at a time.

        broadcaster = Broadcaster(fleet, ranks, timeouts, group, store)
        delivery = await broadcaster.deliver(encoded, await fleet.members(clients), on_arrival)

    If receivers a and b respond, and b dies when 7 of 9 buckets have arrived:

        epoch 1 of a, b    all buckets from 0 on; the ranks and a give up at bucket 7
        epoch 2 of a       buckets 7 and 8; a verifies the version, and on_arrival(a) is called
        delivery.arrived   [a]
    """

    def __init__(
        self,
        fleet: Fleet,
        ranks: RankControl,
        timeouts: Timeouts,
        group: GroupSpec,
        store: TCPStore,
    ) -> None:
        """`group` is the epoch before the first one, which no member joins.

        `store`: the rendezvous of every epoch.
        """
        self._fleet = fleet
        self._ranks = ranks
        self._timeouts = timeouts
        self._group = group
        self._store = store
        self._members: Clients = []
        """Receivers of the current epoch, in the order of their ranks; empty after a failure."""
        self.backoff = Backoff(*timeouts.backoff_s)
        """Receivers that failed while others could be served."""

    @property
    def epoch(self) -> int:
        return self._group.epoch

    async def deliver(
        self, encoded: EncodedVersion, members: Iterable[Member], on_arrival: OnArrival
    ) -> Delivery:
        """Receivers that end up neither `arrived` nor `torn` have failed; events say why."""
        delivery = Delivery()
        ready = await self._make_room(encoded, members)
        trusted = [member for member in ready if not self.backoff.has_failed(member.client)]
        alone = [member for member in ready if self.backoff.has_failed(member.client)]
        failed = await self._serve(encoded, trusted, delivery, on_arrival, _MAX_FUTILE)
        if len(failed) > 1:
            alone, failed = failed + alone, []
        for member in alone:
            failed += await self._serve(encoded, [member], delivery, on_arrival, 1)
        for client in delivery.arrived:
            self.backoff.worked(client)
        for member in failed if delivery.arrived else ():  # at fault: others could be served
            rest_s = self.backoff.failed(member.client)
            detail = f"left to its peers for {rest_s:g} s: it cannot be served, but others can"
            await self._fleet.report("set_aside", member.name, detail)
        return delivery

    async def _make_room(self, encoded: EncodedVersion, members: Iterable[Member]) -> list[Member]:
        """The members that have room for the version."""
        by_client = {member.client: member for member in members}
        layout = self._timeouts.layout

        async def make_room(client: ReceiverClient) -> None:
            status = by_client[client].status
            if status.layout_digest != layout.digest:
                request = client.set_layout(layout, timeout_s=self._timeouts.prepare_s)
                await self._fleet.call(client, request)
            elif status.obstacle and encoded.transfer.version not in status.complete:
                raise StoreBusyError(status.obstacle)

        return [by_client[c] for c in await self._fleet.ask(by_client, make_room, "left_out")]

    async def _serve(
        self,
        encoded: EncodedVersion,
        members: list[Member],
        delivery: Delivery,
        on_arrival: OnArrival,
        max_futile: int,
    ) -> list[Member]:
        """Send and verify. Returns receivers that respond but could not be served."""
        num_futile = 0
        while members:
            clients = [member.client for member in members]
            try:
                manifest = await self._send(encoded, members, delivery)
            except ControlError:
                raise
            except WeightSyncError as failure:
                self._members = []
                tried = [client for client in clients if client not in delivery.left_out]
                members = await self._fleet.members(tried)
                num_futile += len(members) == len(clients)
                if num_futile == max_futile:
                    for member in members:
                        detail = str(failure)
                        await self._fleet.report_failure(member.client, "undelivered", detail)
                    return members
            else:
                await self._verify(manifest, clients, delivery, on_arrival)
                return []
        return []

    async def _send(
        self, encoded: EncodedVersion, members: list[Member], delivery: Delivery
    ) -> Manifest:
        """Send, in one epoch, every bucket that a member lacks. Returns what they must have then.

        Raises the first failure of a member.
        """
        clients = [member.client for member in members]
        if self._members != clients:
            await self._join(clients, delivery)
        delivery.wire_at = delivery.wire_at or time.time()
        transfer, layout = encoded.transfer, self._timeouts.layout
        placed = min(member.num_placed(transfer) for member in members)
        # Whole at all of them: nothing is left to send.
        first = len(plan_buckets(layout, transfer)) if placed == math.inf else int(placed)
        timeout_s = self._timeouts.answer_s(transfer.num_wire_bytes)
        receives = {
            client: client.receive(transfer, self.epoch, first, timeout_s=timeout_s)
            for client in clients
        }
        message: Message = {
            "do": "send",
            "transfer": asdict(transfer),
            "buffer": encoded.captured.buffer,
            "first": first,
            "total_s": wire_s(transfer.num_wire_bytes, self._timeouts.config),
        }
        sent = await self._together(receives, self._ranks.command(message, timeout_s), delivery)
        if not delivery.arrived:
            delivery.wire_s = time.time() - delivery.wire_at
            number = self._group.num_chains
            ranks = [sent[chain::number] for chain in range(number)]
            delivery.chains_s = tuple(max(reply["send_s"] for reply in each) for each in ranks)
        checksums = tuple(tuple(reply["checksums"]) for reply in sent)
        return Manifest.of(transfer.version, layout, checksums)

    async def _join(self, clients: Clients, delivery: Delivery) -> None:
        """Form a new epoch of these receivers."""
        names = tuple(client.name for client in clients)
        spec = replace(self._group, epoch=self._group.epoch + 1, receivers=names)
        self._group = spec
        detail = f"epoch {spec.epoch} of the weight group"
        await self._fleet.report("epoch", ", ".join(sorted(names)), detail)
        timeout_s = self._timeouts.join_s
        joins = {client: client.join(spec, timeout_s=timeout_s) for client in clients}
        command = self._ranks.command({"do": "join", "group": asdict(spec)}, timeout_s)
        await self._together(joins, command, delivery)
        self._members = clients
        forget_epochs(self._store, spec.name, spec.epoch)

    async def _together(
        self,
        requests: Mapping[ReceiverClient, Coroutine[Any, Any, object]],
        command: Coroutine[Any, Any, list[Message]],
        delivery: Delivery,
    ) -> list[Message]:
        """Run a command on the ranks and the requests to the receivers; both need each other.

        Returns the ranks' results, or raises the first failure of a member. After one, the others
        give up by themselves. A receiver that takes longer to give up than a bucket may take is
        left out, as is one that has no slot for the version. Always waits for the ranks, which must
        be free for the next command.
        """
        ranks = asyncio.ensure_future(command)
        calls: dict[asyncio.Task[object], ReceiverClient] = {
            asyncio.ensure_future(self._fleet.call(client, request)): client
            for client, request in requests.items()
        }
        tasks: list[asyncio.Task[Any]] = [ranks, *calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            notice_s = self._timeouts.notice_s(self._group.num_sharing)
            _, late = await asyncio.wait(tasks, timeout=notice_s)
            late.discard(ranks)
            await asyncio.wait([ranks])
            error = _first_error(task.exception() for task in tasks if task not in late)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task, client in calls.items():
            if task in late:
                detail = f"busy for {notice_s:g} s after the others had given up: {error}"
            elif isinstance(refusal := task.exception(), REFUSALS):
                detail = str(refusal)
            else:
                continue
            delivery.left_out.append(client)
            await self._fleet.report_failure(client, "left_out", detail)
        if error is not None:
            raise error
        return ranks.result()

    async def _verify(
        self, manifest: Manifest, clients: Clients, delivery: Delivery, on_arrival: OnArrival
    ) -> None:
        """Each receiver verifies by itself: a stalled one delays no other."""
        delivery.verify_at = delivery.verify_at or time.time()
        start = time.monotonic()

        async def verify(client: ReceiverClient) -> None:
            request = client.verify(manifest, timeout_s=self._timeouts.verify_s)
            try:
                await self._fleet.call(client, request)
            except ChecksumMismatch as error:
                delivery.torn.append(client)
                await self._fleet.report("torn", client.name, str(error))
                return
            delivery.verify_s = max(delivery.verify_s, time.monotonic() - start)
            delivery.arrived.append(client)
            await on_arrival(client)

        await self._fleet.ask(clients, verify, "unverified")


def _first_error(outcomes: Iterable[BaseException | None]) -> WeightSyncError | None:
    """The first failure of a member. Any other error, such as the loss of a rank, is raised."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    for error in errors:
        if isinstance(error, ControlError) or not isinstance(error, WeightSyncError):
            raise error
    # A receiver's own error says more than a rank's error about the receiver.
    errors.sort(key=lambda error: isinstance(error, RankError))
    return errors[0] if errors else None  # type: ignore[return-value]
