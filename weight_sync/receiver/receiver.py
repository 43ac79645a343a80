"""The receiver of one node: receives versions into its store, for the engines there.

One version at a time goes through

    receive ──► verify ──► release        whole from verify on,
      ▲  │                                 for engines from release on (adapters once merged)
    join ▼ a member is lost: buckets that arrived stay,
    (next epoch)  and the next epoch continues from there

It receives the buckets from the previous member, puts them in place, and forwards them down the
chain. With several chains it does so in each of them at once, into one slot. num_buffers receives
are always posted ahead. While a bucket is checked and put in place, the next ones arrive, and the
bucket itself is forwarded:

    receive    2   3   4   5        (posted ahead)
    place      0   1   2   3
    forward    0   1   2   3
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from tensors.checksums import StreamChecksums, mismatches, staged_checksums
from tensors.layout import Count, Layout
from weight_sync import delta
from weight_sync.buckets import Bucket, plan_buckets
from weight_sync.group import Message, WeightGroup
from weight_sync.group_thread import GroupThread, Staging
from weight_sync.receiver.client import ReceiverStatus, StagedVersion
from weight_sync.receiver.merging import Merging
from weight_sync.receiver.peer import RANGE_BYTES, copy_from_peer
from weight_sync.receiver.store import Slot, StagedStore
from weight_sync.timeouts import wire_s
from weight_sync.types import (
    ChecksumMismatch,
    GroupSpec,
    Manifest,
    ReceiverSpec,
    Seconds,
    StoreBusyError,
    Transfer,
    TransferFailed,
    UnknownLayout,
    UnknownVersion,
    WeightSyncError,
)


class Receiver:
    """Thread-safe: calls that change a version run one after the other, reads at any time.

    The HTTP API calls it as the coordinator asks. For one version:

        receiver = Receiver(spec)
        receiver.set_layout(layout)             # once for a model: creates the slots
        receiver.join(group_spec)               # once for an epoch
        receiver.receive(transfer, group_spec.epoch, first=0)
        receiver.verify(manifest)               # whole, if the checksums agree
        receiver.release(transfer.version)      # from here on engines may load it:
        folder = receiver.newest().path         # contains model.safetensors
    """

    def __init__(self, spec: ReceiverSpec) -> None:
        self.spec = spec
        device = torch.device(spec.device)
        self.store = StagedStore(
            Path(spec.folder), spec.num_slots, should_pin=device.type == "cuda"
        )
        """Versions as they arrive, and as peers copy them."""
        self.on_merged: Callable[[], object] = lambda: None
        """Called in another thread, once `newest` is an adapter that was merged."""
        self._merging: Merging | None = None
        if spec.merge is not None:
            folder = Path(spec.folder) / "merged"
            self._merging = Merging(
                spec.merge, folder, spec.num_slots, self.store, device, lambda: self.on_merged()
            )
        self._chains = [self._chain(0)]
        self._arrival: Arrival | None = None
        self._turn = threading.Lock()  # guards _chains, _arrival and the steps of a version
        self._doing = "nothing"

    def _chain(self, number: int) -> GroupThread:
        device = device_of(number, torch.device(self.spec.device))
        # One buffer more than those that arrive: for the bucket that is forwarded.
        return GroupThread(f"weights-receiver-{number}", self.spec.num_buffers + 1, device)

    @property
    def served(self) -> StagedStore:
        """The store that engines load from."""
        return self.store if self._merging is None else self._merging.store

    def status(self) -> ReceiverStatus:
        spec, arrival, layout = self._chains[0].spec, self._arrival, self.store.layout
        has_room = layout is not None and self.store.has_room
        if self._merging is not None and layout is not None:
            has_room = has_room and self._merging.is_ready_for(layout)
        return ReceiverStatus(
            name=self.spec.name,
            pid=os.getpid(),
            newest=self.store.newest,
            complete=tuple(self.store.complete_versions),
            receiving=arrival.transfer if arrival else None,
            received=arrival.received if arrival else 0,
            epoch=spec.epoch if spec else None,
            layout_digest=layout.digest if layout and has_room else None,
            obstacle=self.store.obstacle,
        )

    def set_layout(self, layout: Layout) -> None:
        """Make room for all staged versions of this model.

        Raises StoreFullError, and StoreBusyError if a version of another model is being read.
        """
        with self._one_at_a_time("setting a layout"):
            known = self.store.layout
            if known is None or known.digest != layout.digest:
                self._arrival = None
            if self._merging is not None:
                self._merging.set_layout(layout)
            self.store.set_layout(layout)

    def layout(self, digest: str) -> Layout:
        """The layout of this digest. Raises UnknownLayout if it is not set."""
        layout = self.store.layout
        if layout is None or layout.digest != digest:
            raise UnknownLayout(f"{self.spec.name} does not have this model's layout")
        return layout

    def join(self, group: GroupSpec) -> None:
        """Leave the last epoch's groups and join all chains of this one; blocks until they have
        formed, for at most twice its timeout."""
        if self.spec.name not in group.receivers or group.num_chains > group.num_senders:
            raise ValueError(f"{self.spec.name} is not a receiver of {group}, or a chain is empty")

        def join(chain: int) -> None:
            spec = replace(group, chain=chain)
            rank = len(spec.senders) + group.receivers.index(self.spec.name)
            self._chains[chain].join(spec, rank)

        with self._one_at_a_time(f"joining epoch {group.epoch}"):
            if len(self._chains) != group.num_chains:
                self._leave()
                self._chains = [self._chain(number) for number in range(group.num_chains)]
            self._in_all_chains(join, group.epoch)

    def _in_all_chains(self, step: Callable[[int], None], epoch: int) -> None:
        """Carry out `step` for every chain at once. The first failure ends the others' epoch."""
        with ThreadPoolExecutor(len(self._chains)) as pool:
            steps = [pool.submit(step, chain) for chain in range(len(self._chains))]
            failed = [each for each in wait(steps, None, FIRST_EXCEPTION).done if each.exception()]
            if failed:  # the others give up at their next bucket; none may still write afterwards
                self._leave(epoch)
        try:
            if failed:
                self._leave(epoch)  # a group may have formed meanwhile
                failed[0].result()
        finally:
            del steps, failed  # an error's traceback refers to this frame

    def _leave(self, epoch: int | None = None) -> None:
        for chain in self._chains:
            chain.leave(epoch)

    def receive(self, transfer: Transfer, epoch: Count, first: Count) -> int:
        """Receive the buckets from `first` on; returns the number of buckets received: all of them.

        On an error it leaves the epoch, so that no other member waits for it. Raises
        TransferFailed, StoreBusyError if every slot is being read, and UnknownLayout or
        UnknownVersion without the layout or a delta's base.
        """
        try:
            with self._one_at_a_time(f"receiving version {transfer.version}"):
                arrival = self._begin(transfer)
                specs = [chain.spec for chain in self._chains]
                if any(spec is None or spec.epoch != epoch for spec in specs):
                    message = f"{self.spec.name} is not a member of epoch {epoch}"
                    raise TransferFailed(message)
                if first > arrival.received:
                    message = (
                        f"buckets from {first} on would leave a gap: {arrival.received} are here"
                    )
                    raise TransferFailed(message)
                self._relay(arrival, first, epoch)
                return arrival.received
        except BaseException:
            self._leave(epoch)  # the next one may have been joined meanwhile
            raise

    def _begin(self, transfer: Transfer) -> Arrival:
        """A new arrival, or the one of this transfer with the buckets received so far."""
        layout = self.layout(transfer.layout_digest)
        if self._arrival is None or self._arrival.transfer != transfer:
            self._arrival = base = slot = None
            if transfer.version not in self.store.complete_versions:
                if transfer.base_version is not None:
                    base = self.store.get(transfer.base_version)
                slot = self.store.begin(transfer)
            self._arrival = Arrival(layout, transfer, slot, base)
        return self._arrival

    def _relay(self, arrival: Arrival, first: int, epoch: int) -> None:
        buckets = arrival.buckets[first:]
        # The senders give up earlier; this is for a call that ignores every other timeout.
        limit_s = self.spec.timeout_s + wire_s(sum(b.num_bytes for b in buckets), self.spec)

        def relay(chain: int) -> None:
            thread = self._chains[chain]

            def relay_over(group: WeightGroup) -> None:
                spec = group.spec
                in_flight = arrival.max_bucket_bytes * self.spec.num_buffers * spec.num_sharing
                Relay(
                    group,
                    thread.staging,
                    arrival,
                    num_buffers=self.spec.num_buffers,
                    limit_s=wire_s(in_flight, self.spec),
                ).run([bucket for bucket in buckets if bucket.rank in spec.senders])

            thread.run(relay_over, limit_s)

        try:
            self._in_all_chains(relay, epoch)
        except WeightSyncError as error:
            raise TransferFailed(str(error)) from None

    def verify(self, manifest: Manifest) -> None:
        """Compare the whole version with its manifest; a delta is applied first.

        Raises ChecksumMismatch: the version is discarded.
        """
        version = manifest.version
        with self._one_at_a_time(f"verifying version {version}"):
            arrival = self._arrival
            if version in self.store.complete_versions:
                if self.store.get(version).manifest != manifest:
                    raise ChecksumMismatch(f"version {version} is whole here, but another one")
                self._arrival = None
                return
            if arrival is None or arrival.transfer.version != version:
                raise UnknownVersion(f"{self.spec.name} has not begun version {version}")
            self._arrival = None
            assert arrival.slot is not None, "a version without a slot is whole"
            try:
                arrival.verify(arrival.slot, manifest)
                self.store.complete(arrival.slot, manifest)
            except BaseException:
                self.store.discard(version)
                raise

    def release(self, version: Count) -> None:
        """Let engines load the version, an adapter once it is merged. Raises UnknownVersion if it
        is not whole."""
        self.store.release(version)
        if self._merging is not None:
            self._merging.wake()

    def hold(self, version: Count, who: str, ttl_s: Seconds, as_sent: bool) -> None:
        """Keep the version as engines load it, or for a peer `as_sent`; see `StagedStore.hold`."""
        (self.store if as_sent else self.served).hold(version, who, ttl_s)

    def let_go(self, version: Count, who: str) -> None:
        """End a hold; an unknown one is no error, because it may have expired."""
        self.store.let_go(version, who)
        if self._merging is not None:
            self._merging.store.let_go(version, who)
            self._merging.wake()

    def catch_up(self, version: int, peers: Sequence[str], layout: Layout) -> str:
        """Copy `version` from the first of the peers (URLs) that has it, verify and release it.
        Returns that peer; "" if it was here already. Raises TransferFailed with each one's error.
        """
        source = ""
        with self._one_at_a_time(f"catching up with version {version}"):
            if version not in self.store.complete_versions:
                self._arrival = None
                source = self._copy_from_a_peer(version, peers, layout)
            self.release(version)
        return source

    def _copy_from_a_peer(self, version: int, peers: Sequence[str], layout: Layout) -> str:
        slot = self.store.begin(Transfer.full(version, layout, RANGE_BYTES))
        failures = []
        for url in peers:
            try:
                copying = copy_from_peer(url, version, layout, slot.data, self.spec)
                self.store.complete(slot, asyncio.run(copying))
                return url
            except WeightSyncError as error:
                failures.append(str(error))
        self.store.discard(version)
        raise TransferFailed(
            f"no peer sent version {version}: {'; '.join(failures) or 'none was named'}"
        )

    def newest(self) -> StagedVersion | None:
        """The newest released version that engines can load."""
        while (version := self.served.newest) is not None:
            with contextlib.suppress(UnknownVersion):  # a newer one has just replaced it
                return StagedVersion(
                    version=version,
                    path=str(self.served.get(version).path),
                    merge_s=0.0 if self._merging is None else self._merging.last_s,
                )
        return None

    def close(self, should_remove: bool) -> None:
        """Leave the group and the store; `should_remove` deletes the staged versions."""
        self._leave()
        if self._merging is not None:
            self._merging.close(should_remove)
        self.store.close(remove=should_remove)

    @contextlib.contextmanager
    def _one_at_a_time(self, doing: str) -> Iterator[None]:
        if not self._turn.acquire(timeout=self.spec.timeout_s):
            raise StoreBusyError(
                f"{self.spec.name} was busy {self._doing} for {self.spec.timeout_s:g} s and could "
                f"not start {doing}"
            )
        try:
            self._doing = doing
            yield
        finally:
            self._turn.release()


def device_of(chain: int, first: torch.device) -> torch.device:
    """A GPU for each chain, from the `first` on: NCCL takes the network card nearest to it."""
    if first.type == "cpu":
        return first
    return torch.device("cuda", ((first.index or 0) + chain) % torch.cuda.device_count())


class Arrival:
    """Places buckets across epochs, each chain's in their global order; ignores those that it has
    already. Chains call it at once: no rank's buckets come in two of them.

    A full version goes straight into its slot, and its checksums are computed as it arrives. A
    delta is collected first and applied once it is complete.
    """

    def __init__(
        self, layout: Layout, transfer: Transfer, slot: Slot | None, base: Slot | None = None
    ) -> None:
        """`slot` is None for a version that is whole already: its buckets are only forwarded.

        `base` is the slot of the version that a delta changes.
        """
        self.transfer = transfer
        self.buckets = plan_buckets(layout, transfer)
        self.slot = slot
        self._base = base
        self._is_here = bytearray([slot is None]) * len(self.buckets)
        """By bucket: 1 if it is in place."""
        self._layout = layout
        self._sums = [StreamChecksums(layout, rank) for rank in range(layout.num_ranks)]
        self._payloads: list[Tensor] = []
        if slot is not None and not transfer.is_full:
            self._payloads = [torch.empty(n, dtype=torch.uint8) for n in transfer.wire_bytes]

    @property
    def received(self) -> int:
        """Number of buckets before the first that is missing; later ones may be in place."""
        first = self._is_here.find(0)
        return len(self.buckets) if first < 0 else first

    @property
    def max_bucket_bytes(self) -> int:
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    def place_of(self, bucket: Bucket) -> Tensor | None:
        if self._is_here[bucket.index] or self.slot is None:
            return None
        if not self.transfer.is_full:
            return self._payloads[bucket.rank][bucket.start : bucket.stop]
        if (only := bucket.direct) is not None:
            return self.slot.data[only.file_start : only.file_start + only.num_bytes]
        return None

    def place(self, bucket: Bucket, data: Tensor) -> None:
        if self._is_here[bucket.index]:
            return
        assert self.slot is not None
        if self.transfer.is_full:
            self._sums[bucket.rank].feed(bucket.start, data)
            for extent in bucket.extents if bucket.direct is None else ():
                start = extent.stream_start - bucket.start
                place = self.slot.data[extent.file_start : extent.file_start + extent.num_bytes]
                place.copy_(data[start : start + extent.num_bytes])
        self._is_here[bucket.index] = 1

    def verify(self, slot: Slot, manifest: Manifest) -> None:
        """Apply a delta, and compare the version with its manifest. Raises ChecksumMismatch."""
        what = f"version {manifest.version}"
        if self.received < len(self.buckets):
            raise ChecksumMismatch(
                f"{what} ended after {self.received} of {len(self.buckets)} buckets"
            )
        if wrong := mismatches(self._layout, manifest.checksums, self._checksums(slot)):
            shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
            raise ChecksumMismatch(
                f"{what} did not arrive as it was sent: {len(wrong)} of "
                f"{len(self._layout.tensors)} tensors differ ({shown})"
            )

    def _checksums(self, slot: Slot) -> Sequence[Sequence[int]]:
        if self.transfer.is_full:
            return [sums.result() for sums in self._sums]
        assert self._base is not None, "a delta has a base"
        # Only now: during the transfer other members would have to wait for this copy.
        slot.data.copy_(self._base.data)
        try:
            for rank, payload in enumerate(self._payloads):
                delta.apply(self._layout, rank, payload, slot.data)
        except ValueError as error:
            message = f"the delta of version {self.transfer.version} is damaged: {error}"
            raise ChecksumMismatch(message) from error
        return staged_checksums(self._layout, slot.data)


@dataclass(kw_only=True, slots=True)
class _Passing:
    """A bucket while it passes through this receiver."""

    bucket: Bucket
    place: Tensor | None
    message: Message
    coming: Work | None = None
    leaving: Work | None = None


class Relay:
    """Used by one thread."""

    def __init__(
        self,
        group: WeightGroup,
        staging: Staging,
        arrival: Arrival,
        *,
        num_buffers: int,
        limit_s: float,
    ) -> None:
        """`staging` has num_buffers + 1 buffers: for the ones that arrive and the one forwarded.

        `limit_s`: longest wait for one bucket.
        """
        self._group = group
        self._staging = staging
        self._arrival = arrival
        self._num_buffers = num_buffers
        self._limit = timedelta(seconds=limit_s)
        self._next = group.rank + 1 if group.rank + 1 < group.spec.world_size else None

    def run(self, buckets: Sequence[Bucket]) -> None:
        """Raises WeightSyncError naming the bucket, the peer and the epoch."""
        expected: deque[_Passing] = deque()
        before: _Passing | None = None
        for turn, bucket in enumerate(buckets[: self._num_buffers]):
            expected.append(self._prepare(turn, bucket))
            _, expected[-1].coming = self._group.exchange(None, expected[-1].message)
        for turn in range(self._num_buffers, len(buckets) + self._num_buffers):
            current = expected.popleft()
            self._wait_here(current)
            if before is not None:
                self._wait_gone(before)
            if turn < len(buckets):  # into the buffer that `before` has left
                expected.append(self._prepare(turn, buckets[turn]))
            self._exchange(current, expected[-1] if turn < len(buckets) else None)
            data = self._staging.download(current.message.tensor, current.place)
            self._arrival.place(current.bucket, data)
            before = current
        if before is not None:
            self._wait_gone(before)

    def _prepare(self, turn: int, bucket: Bucket) -> _Passing:
        senders = self._group.spec.senders
        is_first = self._group.rank == len(senders)
        source = senders.index(bucket.rank) if is_first else self._group.rank - 1
        place = self._arrival.place_of(bucket)
        wire = self._staging.room(turn, bucket.num_bytes, place)
        return _Passing(bucket=bucket, place=place, message=Message(wire, source, bucket.index))

    def _exchange(self, current: _Passing, following: _Passing | None) -> None:
        onward = None
        if self._next is not None:
            onward = Message(current.message.tensor, self._next, current.bucket.index)
        expected = None if following is None else following.message
        current.leaving, coming = self._group.exchange(onward, expected)
        if following is not None:
            following.coming = coming

    def _wait_here(self, passing: _Passing) -> None:
        assert passing.coming is not None
        with self._group.naming(f"receiving bucket {passing.bucket.index}", passing.message.peer):
            passing.coming.wait(self._limit)

    def _wait_gone(self, passing: _Passing) -> None:
        if passing.leaving is not None and self._next is not None:
            with self._group.naming(f"forwarding bucket {passing.bucket.index}", self._next):
                passing.leaving.wait(self._limit)
