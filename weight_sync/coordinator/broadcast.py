"""Whom to leave alone for a while, and for how long.

Brings one version to a set of receivers, whatever happens to some of them on the way.

    begin ──► weight group of the epoch ──► every rank sends, every receiver receives ──► finish
      ▲                                        │ a member died, stalled or broke off
      └── who still answers, from the first ◄──┘
          bucket that one of them lacks

An epoch ends with the first failure in it, and its number is never used again. Each attempt that
fails must cost a member its place, or counts: after a few that do not, the members are served one
at a time, which shows whose fault it is. Whoever fails alone while others can be served is set
aside: for a growing while it is not asked to take part, and then only after the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from weight_sync.coordinator.fleet import Fleet
from weight_sync.errors import ChecksumMismatch
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.receiver.client import ReceiverClient
from weight_sync.sender.commands import ControlError, Message, RankError, Ranks
from weight_sync.timeouts import Limits
from weight_sync.types import GroupSpec, WeightSyncError

K = TypeVar("K")


class Backoff(Generic[K]):
    """The time to rest doubles with each failure in a row. Keeps nobody alive."""

    def __init__(
        self, first_s: float, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._failures: WeakKeyDictionary[K, tuple[int, float]] = WeakKeyDictionary()
        """How many in a row, and until when to rest."""

    def failed(self, who: K) -> float:
        """Returns the seconds of rest from now on."""
        number, _ = self._failures.get(who, (0, 0.0))
        rest_s = min(self._most_s, self._first_s * 2.0 ** min(number, 60))
        self._failures[who] = number + 1, self._clock() + rest_s
        return rest_s

    def worked(self, who: K) -> None:
        self._failures.pop(who, None)

    def has_failed(self, who: K) -> bool:
        """Since it last worked."""
        return who in self._failures

    def is_resting(self, who: K) -> bool:
        return who in self._failures and self._clock() < self._failures[who][1]


_MAX_FUTILE = 2
"""Failed attempts, all of whose members still answer, before they are served one at a time."""

Clients = list[ReceiverClient]
Offer = Callable[[ReceiverClient], Awaitable[None]]
"""What is to be done at once with a receiver that has the version, whole and verified."""
ForgetEpochs = Callable[[int], None]
"""Epochs before this one are over: nothing of them need be kept."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shipment:
    """A version that lies ready on every rank."""

    transfer: Transfer
    layout: Layout
    slot: int
    """Of the snapshot buffers."""
    encode_at: float
    encode_s: float
    copy_s: float = 0.0
    """Of the slowest rank's snapshot, which on a GPU runs beside training."""
    density: float = 1.0
    """Share of the elements that travel."""

    @property
    def version(self) -> int:
        return self.transfer.version

    @property
    def num_wire_bytes(self) -> int:
        return sum(self.transfer.wire_bytes)

    @property
    def is_full(self) -> bool:
        return self.transfer.base_version is None

    def as_delta(self, base: int, sizes: Sequence[int | None], num_changed: int) -> Shipment:
        """Only what differs from `base`, if every rank found that few enough and it is smaller.

        `sizes`: bytes of each rank's delta; None where too much has changed.
        """
        found = tuple(size for size in sizes if size is not None)
        if len(found) < len(sizes) or sum(found) >= self.num_wire_bytes:
            return self
        num_elements = sum(tensor.num_elements for tensor in self.layout.tensors)
        delta = replace(self.transfer, base_version=base, wire_bytes=found)
        return replace(self, transfer=delta, density=num_changed / num_elements)

    def in_full(self) -> Shipment:
        """The same version without a base."""
        sizes = tuple(self.layout.stream_bytes(rank) for rank in range(self.layout.num_ranks))
        full = replace(self.transfer, base_version=None, wire_bytes=sizes)
        return replace(self, transfer=full, density=1.0)


@dataclass(kw_only=True, slots=True)
class Delivery:
    """Who has the version, whole and verified, and when; `*_at` in Unix time."""

    arrived: Clients = field(default_factory=list)
    torn: Clients = field(default_factory=list)
    """Got bytes that are not those of the manifest, and discarded them."""
    late: Clients = field(default_factory=list)
    """Still busy with an attempt that the others had given up."""
    wire_at: float = 0.0
    wire_s: float = 0.0
    """From the first byte of the first attempt to the last byte for those that arrived first."""
    verify_at: float = 0.0
    verify_s: float = 0.0
    """Of the slowest receiver."""


class Courier:
    """Owns the membership epochs. Delivers one shipment at a time."""

    def __init__(
        self,
        fleet: Fleet,
        ranks: Ranks,
        limits: Limits,
        group: GroupSpec,
        forget_epochs: ForgetEpochs,
    ) -> None:
        """`group` is the epoch before the first, which nobody joins."""
        self._fleet = fleet
        self._ranks = ranks
        self._limits = limits
        self._group = group
        self._forget_epochs = forget_epochs
        self._members: Clients = []
        """Of the epoch, in the order of their ranks; none after a failure in it."""
        self._aside: Backoff[ReceiverClient] = Backoff(*limits.aside_s)

    @property
    def epoch(self) -> int:
        return self._group.epoch

    def is_aside(self, client: ReceiverClient) -> bool:
        """It could not be served lately, while others could."""
        return self._aside.is_resting(client)

    async def deliver(
        self, shipment: Shipment, clients: Iterable[ReceiverClient], offer: Offer
    ) -> Delivery:
        """Whoever is neither arrived nor torn in the end has cost itself; events tell why."""
        delivery = Delivery()
        asked = list(clients)
        trusted = [client for client in asked if not self._aside.has_failed(client)]
        alone = [client for client in asked if self._aside.has_failed(client)]
        failed = await self._serve(shipment, trusted, delivery, offer, _MAX_FUTILE)
        if len(failed) > 1:
            alone, failed = failed + alone, []
        for client in alone:
            failed += await self._serve(shipment, [client], delivery, offer, 1)
        await self._set_aside(failed, delivery)
        return delivery

    async def _serve(
        self,
        shipment: Shipment,
        clients: Clients,
        delivery: Delivery,
        offer: Offer,
        max_futile: int,
    ) -> Clients:
        """Send, verify and offer. Returns who still answers but could not be served."""
        num_futile = 0
        while received := await self._begin(shipment, clients):
            error = await self._attempt(shipment, received, delivery)
            if error is None:
                await self._finish(shipment, list(received), delivery, offer)
                return []
            self._members = []
            tried = [client for client in received if client not in delivery.late]
            alive = [member.client for member in await self._fleet.members(tried)]
            num_futile += len(alive) == len(clients)
            if num_futile == max_futile:
                for client in alive:
                    await self._fleet.trouble(client, "undelivered", str(error))
                return alive
            clients = alive
        return []

    async def _set_aside(self, failed: Clients, delivery: Delivery) -> None:
        """Those that failed alone: their fault, if the way to others was open."""
        for client in delivery.arrived:
            self._aside.worked(client)
        for client in failed if delivery.arrived else ():
            rest_s = self._aside.failed(client)
            detail = f"left to its peers for {rest_s:g} s: it cannot be served, but others can"
            await self._fleet.tell("set_aside", client.name, detail)

    async def _begin(self, shipment: Shipment, clients: Clients) -> dict[ReceiverClient, int]:
        """How many buckets each has already; who has no room, or lacks the base, is left out."""
        call, timeout_s = self._fleet.call, self._limits.prepare_s

        async def begin(client: ReceiverClient) -> int:
            await call(client, client.layout(shipment.layout, timeout_s=timeout_s))
            return await call(client, client.begin(shipment.transfer, timeout_s=timeout_s))

        return await self._fleet.ask(clients, begin, "left_out")

    async def _attempt(
        self, shipment: Shipment, received: dict[ReceiverClient, int], delivery: Delivery
    ) -> WeightSyncError | None:
        """Send to all what one of them lacks, in one epoch. Returns what went wrong."""
        clients = list(received)
        if self._members != clients and (error := await self._join(clients, delivery)):
            return error
        delivery.wire_at = delivery.wire_at or time.time()
        error = await self._transmit(shipment, clients, min(received.values()), delivery)
        if error is None and not delivery.arrived:
            delivery.wire_s = time.time() - delivery.wire_at
        return error

    async def _join(self, clients: Clients, delivery: Delivery) -> WeightSyncError | None:
        """A new epoch, of these members."""
        spec = replace(self._group, epoch=self._group.epoch + 1, receivers=_names(clients))
        self._group = spec
        await self._fleet.tell("epoch", spec.receivers, f"epoch {spec.epoch} of the weight group")
        timeout_s = self._limits.join_s
        joins = {
            client: client.join(spec, spec.num_senders + index, timeout_s=timeout_s)
            for index, client in enumerate(clients)
        }
        command = self._ranks.command({"do": "join", "group": spec.to_json()}, timeout_s)
        error = await self._together(joins, command, delivery)
        if error is None:
            self._members = clients
            self._forget_epochs(spec.epoch)
        return error

    async def _transmit(
        self, shipment: Shipment, clients: Clients, first: int, delivery: Delivery
    ) -> WeightSyncError | None:
        timeout_s = self._limits.answer_s(shipment.num_wire_bytes)
        receives = {
            client: client.receive(self.epoch, shipment.version, first, timeout_s=timeout_s)
            for client in clients
        }
        message: Message = {
            "do": "send",
            "transfer": shipment.transfer.to_json(),
            "slot": shipment.slot,
            "first": first,
            "total_s": self._limits.wire_s(shipment.num_wire_bytes),
        }
        return await self._together(receives, self._ranks.command(message, timeout_s), delivery)

    async def _together(
        self,
        requests: Mapping[ReceiverClient, Coroutine[Any, Any, object]],
        command: Coroutine[Any, Any, object],
        delivery: Delivery,
    ) -> WeightSyncError | None:
        """What members and ranks can only do together. Returns the first failure in it.

        After that the others break off by themselves; who takes longer for it than a bucket may is
        late. The ranks are always waited for: they must be free for the next command.
        """
        ranks: asyncio.Task[object] = asyncio.ensure_future(command)
        calls: dict[asyncio.Task[object], ReceiverClient] = {
            asyncio.ensure_future(self._fleet.call(client, request)): client
            for client, request in requests.items()
        }
        tasks = [ranks, *calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            notice_s = self._limits.notice_s(self._group.world_size)
            _, pending = await asyncio.wait(tasks, timeout=notice_s)
            await asyncio.wait([ranks])
            late = [task for task in calls if task in pending]
            error = _first_error(task.exception() for task in tasks if task not in late)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for client in (calls[task] for task in late):
            delivery.late.append(client)
            detail = f"busy for {notice_s:g} s after the others had given up: {error}"
            await self._fleet.trouble(client, "left_out", detail)
        return error

    async def _finish(
        self, shipment: Shipment, clients: Clients, delivery: Delivery, offer: Offer
    ) -> None:
        """Each is offered as soon as it has verified: who stalls now costs the others nothing."""
        delivery.verify_at = delivery.verify_at or time.time()
        start = time.monotonic()
        # Made while the bytes were on their way.
        question: Message = {"do": "checksums", "version": shipment.version}
        sums = await self._ranks.command(question, self._limits.encode_s)
        manifest = Manifest(
            version=shipment.version,
            layout=shipment.layout,
            checksums=tuple(tuple(rank["checksums"]) for rank in sums),
        )

        async def finish(client: ReceiverClient) -> None:
            verify_s = self._limits.verify_s
            request = client.finish(manifest, timeout_s=verify_s)
            try:
                await self._fleet.call(client, request)
            except ChecksumMismatch as error:
                delivery.torn.append(client)
                await self._fleet.tell("torn", client.name, str(error))
                return
            delivery.verify_s = max(delivery.verify_s, time.monotonic() - start)
            delivery.arrived.append(client)
            await offer(client)

        await self._fleet.ask(clients, finish, "unverified")


def _names(clients: Clients) -> tuple[str, ...]:
    return tuple(client.name for client in clients)


def _first_error(outcomes: Iterable[BaseException | None]) -> WeightSyncError | None:
    """The first failure of a member. What is none, such as the loss of a rank, is raised."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    for error in errors:
        if isinstance(error, ControlError) or not isinstance(error, WeightSyncError):
            raise error
    # What a rank says of the others' end is less telling than what a receiver says of its own.
    errors.sort(key=lambda error: isinstance(error, RankError))
    return errors[0] if errors else None  # type: ignore[return-value]
