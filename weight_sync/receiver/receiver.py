"""The receiver of one node: receives versions into its store, for the engines there.

One version at a time goes through

    receive ──► finish ──► release        whole and verified from finish on,
      ▲  │                                 visible to engines from release on
    join ▼ a member is lost: buckets that arrived stay,
    (next epoch)  and the next epoch continues from there
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from weight_sync.errors import (
    ChecksumMismatch,
    StoreBusyError,
    TransferFailed,
    UnknownLayout,
    UnknownVersion,
)
from weight_sync.group import WeightGroup, bucket_timeout_s
from weight_sync.group_thread import GroupThread
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.receiver.arrival import Arrival, Relay
from weight_sync.receiver.client import CatchUpReport, ReceiverStatus, StagedVersion
from weight_sync.receiver.peer import RANGE_BYTES, copy_from_peer
from weight_sync.receiver.store import StagedStore
from weight_sync.types import GroupSpec, ReceiverSpec, WeightSyncError


class Receiver:
    """Thread-safe: calls that change a version run one after the other, reads at any time.

    The HTTP API calls it as the coordinator asks. For one version:

        receiver = Receiver(spec, os.getpid())
        receiver.set_layout(layout)             # once for a model: creates the slots
        receiver.join(group_spec)               # once for an epoch
        receiver.receive(transfer, group_spec.epoch, first=0)
        receiver.finish(manifest)               # whole, if the checksums agree
        receiver.store.release(transfer.version)    # from here on engines may load it:
        folder = receiver.newest().path         # holds model.safetensors
    """

    def __init__(self, spec: ReceiverSpec, pid: int) -> None:
        self.spec = spec
        self._pid = pid
        self.store = StagedStore(Path(spec.folder), spec.num_slots)
        # One buffer more than those that arrive: for the bucket that is forwarded.
        self._group_thread = GroupThread(
            "weights-receiver", spec.num_buffers + 1, torch.device(spec.device)
        )
        self._arrival: Arrival | None = None
        self._turn = threading.Lock()  # guards _group_thread, _arrival and the steps of a version
        self._doing = "nothing"

    def status(self) -> ReceiverStatus:
        spec, arrival, layout = self._group_thread.spec, self._arrival, self.store.layout
        return ReceiverStatus(
            name=self.spec.name,
            pid=self._pid,
            newest=self.store.newest,
            complete=tuple(self.store.complete_versions),
            receiving=arrival.transfer if arrival else None,
            received=arrival.received if arrival else 0,
            epoch=spec.epoch if spec else None,
            layout_digest=layout.digest if layout and self.store.has_room else None,
            obstacle=self.store.obstacle,
        )

    def set_layout(self, layout: Layout) -> None:
        """Make room for this model's versions. Raises StoreFullError."""
        with self._one_at_a_time("taking a layout"):
            known = self.store.layout
            if known is None or known.digest != layout.digest:
                self._arrival = None
            self.store.set_layout(layout)

    def layout(self, digest: str) -> Layout:
        """The layout of this digest. Raises UnknownLayout if it is not set."""
        layout = self.store.layout
        if layout is None or layout.digest != digest:
            raise UnknownLayout(f"{self.spec.name} does not have this model's layout")
        return layout

    def join(self, spec: GroupSpec) -> None:
        """Block until the epoch's group has formed, for at most twice its timeout."""
        if self.spec.name not in spec.receivers:
            raise ValueError(f"{self.spec.name} is not a receiver of {spec}")
        with self._one_at_a_time(f"joining epoch {spec.epoch}"):
            rank = spec.num_senders + spec.receivers.index(self.spec.name)
            self._group_thread.join(spec, rank)

    def receive(self, transfer: Transfer, epoch: int, first: int) -> int:
        """Receive the buckets from `first` on; returns the number of buckets held: all of them.

        On an error it leaves the group, so that no other member waits for it. Raises
        TransferFailed, and StoreBusyError, UnknownLayout or UnknownVersion if it cannot take the
        version.
        """
        try:
            with self._one_at_a_time(f"receiving version {transfer.version}"):
                arrival = self._begin(transfer)
                spec = self._group_thread.spec
                if spec is None or spec.epoch != epoch:
                    message = f"{self.spec.name} is not a member of epoch {epoch}"
                    raise TransferFailed(message)
                if first > arrival.received:
                    message = (
                        f"buckets from {first} on would leave a gap: {arrival.received} are here"
                    )
                    raise TransferFailed(message)
                self._walk(arrival, first)
                return arrival.received
        except BaseException:
            self._group_thread.leave()
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

    def _walk(self, arrival: Arrival, first: int) -> None:
        buckets = arrival.buckets[first:]

        def relay(group: WeightGroup) -> None:
            in_flight = arrival.max_bucket_bytes * self.spec.num_buffers * group.spec.world_size
            Relay(
                group,
                self._group_thread.staging,
                arrival,
                num_buffers=self.spec.num_buffers,
                limit_s=self._limit_s(in_flight),
            ).run(buckets)

        # The senders give up earlier; this is for a call that ignores every other timeout.
        limit_s = self.spec.timeout_s + self._limit_s(sum(b.num_bytes for b in buckets))
        try:
            self._group_thread.walk(relay, limit_s)
        except WeightSyncError as error:
            raise TransferFailed(str(error)) from None

    def _limit_s(self, num_bytes: int) -> float:
        return bucket_timeout_s(num_bytes, self.spec.timeout_s, self.spec.min_bandwidth)

    def finish(self, manifest: Manifest) -> None:
        """Raises ChecksumMismatch: the version is discarded."""
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

    def catch_up(self, version: int, peers: Sequence[str], layout: Layout) -> CatchUpReport:
        """Copy, verify and release `version`. Raises TransferFailed if no peer has it."""
        start, source = time.perf_counter(), None
        with self._one_at_a_time(f"catching up with version {version}"):
            if version not in self.store.complete_versions:
                self._arrival = None
                source = self._copy_from_a_peer(version, peers, layout)
            self.store.release(version)
        return CatchUpReport(peer=source, seconds=time.perf_counter() - start)

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
        """The newest released version."""
        while (version := self.store.newest) is not None:
            with contextlib.suppress(UnknownVersion):  # a newer one has just replaced it
                return StagedVersion(version=version, path=str(self.store.get(version).path))
        return None

    def close(self, should_remove: bool) -> None:
        """Leave the group and the store; `should_remove` deletes the staged versions."""
        self._group_thread.leave()
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
