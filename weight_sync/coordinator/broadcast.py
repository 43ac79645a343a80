"""Delivers one version to a set of receivers, even if some of them fail meanwhile.

    weight group of the epoch ──► every rank sends, every receiver receives ──► finish
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
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch._C._distributed_c10d import TCPStore

from weight_sync.coordinator.fleet import Fleet, Member
from weight_sync.errors import REFUSALS, ChecksumMismatch, StoreBusyError
from weight_sync.group import forget_epochs
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.receiver.client import ReceiverClient
from weight_sync.sender.commands import ControlError, Message, RankError, Ranks
from weight_sync.timeouts import Timeouts
from weight_sync.types import GroupSpec, WeightSyncError

K = TypeVar("K")

_MAX_FUTILE = 2
"""Futile attempts before receivers are served one at a time."""

Clients = list[ReceiverClient]
Offer = Callable[[ReceiverClient], Awaitable[None]]
"""Called at once for a receiver that holds the version whole and verified."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EncodedVersion:
    """A version that is ready to be sent on every rank."""

    transfer: Transfer
    buffer: int
    """Index of the snapshot buffer that holds it."""
    encode_at: float
    encode_s: float
    copy_s: float = 0.0
    """Copy time of the slowest rank; on a GPU the copy runs beside training."""
    density: float = 1.0
    """Share of the elements that are sent."""

    @property
    def version(self) -> int:
        return self.transfer.version

    def in_full(self, layout: Layout) -> EncodedVersion:
        """The same version without a base."""
        full = Transfer.full(self.version, layout, self.transfer.bucket_bytes)
        return replace(self, transfer=full, density=1.0)


@dataclass(kw_only=True, slots=True)
class Delivery:
    """Outcome of one broadcast; `*_at` in Unix time."""

    arrived: Clients = field(default_factory=list)
    """Hold the version, whole and verified."""
    torn: Clients = field(default_factory=list)
    """Received bytes that do not match the manifest, and discarded them."""
    left_out: Clients = field(default_factory=list)
    """Had no slot for it, or were still busy with an attempt that the others had given up."""
    wire_at: float = 0.0
    wire_s: float = 0.0
    """From the first byte of the first attempt to the last byte of the first successful one."""
    verify_at: float = 0.0
    verify_s: float = 0.0
    """Verification time of the slowest receiver."""


class Broadcaster:
    """Owns the membership epochs. Delivers one version at a time."""

    def __init__(
        self,
        fleet: Fleet,
        ranks: Ranks,
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
        self._backoff: Backoff[ReceiverClient] = Backoff(*timeouts.backoff_s)

    @property
    def epoch(self) -> int:
        return self._group.epoch

    def is_backed_off(self, client: ReceiverClient) -> bool:
        """Whether it recently failed while others could be served."""
        return self._backoff.is_resting(client)

    async def deliver(
        self, encoded: EncodedVersion, members: Iterable[Member], offer: Offer
    ) -> Delivery:
        """Receivers that end up neither `arrived` nor `torn` have failed; events say why."""
        delivery = Delivery()
        prepared = await self._prepare(encoded, members)
        trusted = [member for member in prepared if not self._backoff.has_failed(member.client)]
        alone = [member for member in prepared if self._backoff.has_failed(member.client)]
        failed = await self._serve(encoded, trusted, delivery, offer, _MAX_FUTILE)
        if len(failed) > 1:
            alone, failed = failed + alone, []
        for member in alone:
            failed += await self._serve(encoded, [member], delivery, offer, 1)
        await self._back_off([member.client for member in failed], delivery)
        return delivery

    async def _prepare(self, encoded: EncodedVersion, members: Iterable[Member]) -> list[Member]:
        """The members that have room for the version."""
        by_client = {member.client: member for member in members}

        async def prepare(client: ReceiverClient) -> None:
            status = by_client[client].status
            layout = self._timeouts.layout
            if status.layout_digest != layout.digest:
                request = client.set_layout(layout, timeout_s=self._timeouts.prepare_s)
                await self._fleet.call(client, request)
            elif status.obstacle and encoded.version not in status.complete:
                raise StoreBusyError(status.obstacle)

        ready = await self._fleet.ask(by_client, prepare, "left_out")
        return [by_client[client] for client in ready]

    async def _serve(
        self,
        encoded: EncodedVersion,
        members: list[Member],
        delivery: Delivery,
        offer: Offer,
        max_futile: int,
    ) -> list[Member]:
        """Send, verify and offer. Returns receivers that respond but could not be served."""
        num_futile = 0
        while members:
            clients = [member.client for member in members]
            first = min(member.num_placed(encoded.transfer) for member in members)
            error = await self._attempt(encoded, clients, first, delivery)
            if error is None:
                await self._finish(encoded, clients, delivery, offer)
                return []
            self._members = []
            tried = [client for client in clients if client not in delivery.left_out]
            members = await self._fleet.members(tried)
            num_futile += len(members) == len(clients)
            if num_futile == max_futile:
                for member in members:
                    await self._fleet.report_failure(member.client, "undelivered", str(error))
                return members
        return []

    async def _back_off(self, failed: Clients, delivery: Delivery) -> None:
        """Receivers that failed alone are at fault if others could be served."""
        for client in delivery.arrived:
            self._backoff.worked(client)
        for client in failed if delivery.arrived else ():
            rest_s = self._backoff.failed(client)
            detail = f"left to its peers for {rest_s:g} s: it cannot be served, but others can"
            await self._fleet.report("set_aside", client.name, detail)

    async def _attempt(
        self, encoded: EncodedVersion, clients: Clients, first: float, delivery: Delivery
    ) -> WeightSyncError | None:
        """Send, in one epoch, every bucket from `first` on. Returns the error, if any."""
        if self._members != clients and (error := await self._join(clients, delivery)):
            return error
        delivery.wire_at = delivery.wire_at or time.time()
        error = None
        if first < math.inf:
            error = await self._transmit(encoded, clients, int(first), delivery)
        if error is None and not delivery.arrived:
            delivery.wire_s = time.time() - delivery.wire_at
        return error

    async def _join(self, clients: Clients, delivery: Delivery) -> WeightSyncError | None:
        """Form a new epoch of these receivers."""
        spec = replace(self._group, epoch=self._group.epoch + 1, receivers=_names(clients))
        self._group = spec
        await self._fleet.report("epoch", spec.receivers, f"epoch {spec.epoch} of the weight group")
        timeout_s = self._timeouts.join_s
        joins = {client: client.join(spec, timeout_s=timeout_s) for client in clients}
        command = self._ranks.command({"do": "join", "group": asdict(spec)}, timeout_s)
        error = await self._together(joins, command, delivery)
        if error is None:
            self._members = clients
            forget_epochs(self._store, spec.name, spec.epoch)
        return error

    async def _transmit(
        self, encoded: EncodedVersion, clients: Clients, first: int, delivery: Delivery
    ) -> WeightSyncError | None:
        num_bytes = encoded.transfer.num_wire_bytes
        timeout_s = self._timeouts.answer_s(num_bytes)
        receives = {
            client: client.receive(encoded.transfer, self.epoch, first, timeout_s=timeout_s)
            for client in clients
        }
        message: Message = {
            "do": "send",
            "transfer": asdict(encoded.transfer),
            "buffer": encoded.buffer,
            "first": first,
            "total_s": self._timeouts.wire_s(num_bytes),
        }
        return await self._together(receives, self._ranks.command(message, timeout_s), delivery)

    async def _together(
        self,
        requests: Mapping[ReceiverClient, Coroutine[Any, Any, object]],
        command: Coroutine[Any, Any, object],
        delivery: Delivery,
    ) -> WeightSyncError | None:
        """Run a command on the ranks and the requests to the receivers; both need each other.

        Returns the first failure of a member. After one, the others give up by themselves. A
        receiver that takes longer to give up than a bucket may take is left out, as is one that has
        no slot for the version. Always waits for the ranks, which must be free for the next
        command.
        """
        ranks: asyncio.Task[object] = asyncio.ensure_future(command)
        calls: dict[asyncio.Task[object], ReceiverClient] = {
            asyncio.ensure_future(self._fleet.call(client, request)): client
            for client, request in requests.items()
        }
        tasks = [ranks, *calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            notice_s = self._timeouts.notice_s(self._group.world_size)
            _, pending = await asyncio.wait(tasks, timeout=notice_s)
            await asyncio.wait([ranks])
            late = [task for task in calls if task in pending]
            error = _first_error(task.exception() for task in tasks if task not in late)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task, client in calls.items():
            detail = f"busy for {notice_s:g} s after the others had given up: {error}"
            if task not in late:
                refusal = task.exception()
                if not isinstance(refusal, REFUSALS):
                    continue
                detail = str(refusal)
            delivery.left_out.append(client)
            await self._fleet.report_failure(client, "left_out", detail)
        return error

    async def _finish(
        self, encoded: EncodedVersion, clients: Clients, delivery: Delivery, offer: Offer
    ) -> None:
        """Offer each receiver as soon as it has verified, so that a stalled one delays no other."""
        delivery.verify_at = delivery.verify_at or time.time()
        start = time.monotonic()
        # The ranks computed them during the transfer.
        question: Message = {"do": "checksums", "version": encoded.version}
        sums = await self._ranks.command(question, self._timeouts.encode_s)
        checksums = tuple(tuple(rank["checksums"]) for rank in sums)
        manifest = Manifest.of(encoded.version, self._timeouts.layout, checksums)

        async def finish(client: ReceiverClient) -> None:
            verify_s = self._timeouts.verify_s
            request = client.finish(manifest, timeout_s=verify_s)
            try:
                await self._fleet.call(client, request)
            except ChecksumMismatch as error:
                delivery.torn.append(client)
                await self._fleet.report("torn", client.name, str(error))
                return
            delivery.verify_s = max(delivery.verify_s, time.monotonic() - start)
            delivery.arrived.append(client)
            await offer(client)

        await self._fleet.ask(clients, finish, "unverified")


def _names(clients: Clients) -> tuple[str, ...]:
    return tuple(client.name for client in clients)


def _first_error(outcomes: Iterable[BaseException | None]) -> WeightSyncError | None:
    """The first failure of a member. Any other error, such as the loss of a rank, is raised."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    for error in errors:
        if isinstance(error, ControlError) or not isinstance(error, WeightSyncError):
            raise error
    # A receiver's own error says more than a rank's error about the receiver.
    errors.sort(key=lambda error: isinstance(error, RankError))
    return errors[0] if errors else None  # type: ignore[return-value]


class Backoff(Generic[K]):
    """Pauses for keys that failed; a pause doubles with each failure in a row."""

    def __init__(
        self, first_s: float, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        # Weak: a client that is no longer registered need not be removed here.
        self._failures: WeakKeyDictionary[K, tuple[int, float]] = WeakKeyDictionary()
        """Number of failures in a row, and until when to pause."""

    def failed(self, key: K) -> float:
        """Returns the seconds to pause from now on."""
        number, _ = self._failures.get(key, (0, 0.0))
        rest_s = min(self._most_s, self._first_s * 2.0 ** min(number, 60))
        self._failures[key] = number + 1, self._clock() + rest_s
        return rest_s

    def worked(self, key: K) -> None:
        self._failures.pop(key, None)

    def has_failed(self, key: K) -> bool:
        """Whether it failed since it last worked."""
        return key in self._failures

    def is_resting(self, key: K) -> bool:
        return key in self._failures and self._clock() < self._failures[key][1]
