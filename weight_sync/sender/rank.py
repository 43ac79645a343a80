"""A trainer rank's part of a publish, in a thread of its own, at the command of rank 0.

`SendingRank` carries out the commands; `Sender` sends the buckets.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import torch
from msgspec import convert
from torch import Tensor
from torch._C._distributed_c10d import Work

from configs.schema import WeightSyncConfig
from tensors.checksums import piece_checksums
from tensors.snapshots import SnapshotError, Snapshots
from weight_sync import delta
from weight_sync.buckets import Bucket, plan_buckets
from weight_sync.group import WeightGroup
from weight_sync.group_thread import GroupThread
from weight_sync.sender.control import Message
from weight_sync.timeouts import Timeouts, wire_s
from weight_sync.types import GroupSpec, Transfer, WeightSyncError

log = logging.getLogger(__name__)


class SendingRank:
    """Replies to each command with {"result": ...}, or {"error": text} if it failed.

    encode     start the checksums of a captured version; find what changed since another one
    join       join the weight group of an epoch
    send       send this rank's buckets to the first receiver; return its pieces' checksums
    noop       nothing: a sign of life from rank 0
    close      leave the group for good
    """

    def __init__(self, timeouts: Timeouts, rank: int, snapshots: Snapshots, sender: Sender) -> None:
        self._timeouts = timeouts
        self._layout = timeouts.layout
        self._rank = rank
        self._snapshots = snapshots
        self._sender = sender
        self._delta: tuple[int, Tensor] | None = None
        """Version and payload of the last delta."""
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="weights-checksums")
        self._checksums: tuple[int, Future[tuple[int, ...]]] | None = None
        """Version and checksums of the last encoding, computed while the bytes are sent."""

    def handle(self, command: Message) -> Message | None:
        """None for close."""
        try:
            match command["do"]:
                case "encode":
                    return {"result": self._encode(command)}
                case "join":
                    self._sender.join(convert(command["group"], GroupSpec))
                case "send":
                    return {"result": self._send(command)}
                case "close":
                    self._sender.group_thread.leave()
                    self._summing.shutdown(wait=False)
                    return None
            return {"result": {}}
        except Exception as error:
            # Rank 0 decides what follows; the other ranks may have succeeded.
            is_ours = isinstance(error, (WeightSyncError, SnapshotError))
            if not is_ours:
                log.exception("trainer rank %d could not %s", self._rank, command["do"])
            return {"error": f"trainer rank {self._rank}: {error if is_ours else repr(error)}"}

    def _encode(self, command: Message) -> Message:
        """Start the checksums; with a base also make the delta, unless too much has changed."""
        version = int(command["version"])
        stream = self._stream(command["buffer"], version)
        copy_s = self._snapshots.copy_s(command["buffer"])
        start = time.perf_counter()
        summing = self._summing.submit(piece_checksums, self._layout, self._rank, stream)
        self._checksums = version, summing
        result: Message = {"num_bytes": None, "num_changed": 0}
        self._delta = None  # frees the last one before the next is made
        if command["base_buffer"] is not None:
            base = self._stream(command["base_buffer"], int(command["base_version"]))
            found, most = None, command["max_density"]
            try:
                found = delta.encode(self._layout, self._rank, base, stream, most)
            except MemoryError as error:  # a full version needs no further memory
                log.warning("trainer rank %d sends its weights in full: %s", self._rank, error)
            if found is not None:
                self._delta = version, found.payload
                result["num_bytes"] = found.payload.numel()
                result["num_changed"] = found.num_changed
        return result | {"encode_s": time.perf_counter() - start, "copy_s": copy_s}

    def _send(self, command: Message) -> Message:
        transfer = convert(command["transfer"], Transfer)
        if transfer.is_full:
            payload = self._stream(command["buffer"], transfer.version)
        else:
            assert self._delta is not None and self._delta[0] == transfer.version
            payload = self._delta[1]
        buckets = plan_buckets(self._layout, transfer)
        start = time.perf_counter()
        self._sender.send(buckets, payload, int(command["first"]), float(command["total_s"]))
        send_s = time.perf_counter() - start
        assert self._checksums is not None and self._checksums[0] == transfer.version
        return {"checksums": self._checksums[1].result(), "send_s": send_s}

    def _stream(self, buffer: int, version: int) -> Tensor:
        return self._snapshots.stream(buffer, version, self._timeouts.control_s)


class Sender:
    """Sends a rank's buckets to the first receiver. Used by one thread at a time."""

    def __init__(self, rank: int, config: WeightSyncConfig, device: torch.device) -> None:
        self._rank = rank
        self._config = config
        self.group_thread = GroupThread(f"weights-sender-{rank}", config.num_buffers, device)

    def join(self, epoch: GroupSpec) -> None:
        """Join the epoch in this rank's chain."""
        chain = replace(epoch, chain=self._rank % epoch.num_chains)
        self.group_thread.join(chain, chain.senders.index(self._rank))

    def send(
        self,
        buckets: Sequence[Bucket],
        payload: Tensor,
        first: int,
        total_s: float = math.inf,
    ) -> None:
        """Send this rank's buckets of the plan from bucket `first` on.

        `payload`: uint8, the rank's bytes on the wire. `total_s` bounds the whole transfer, so that
        small delays at every bucket cannot add up to hours. Raises WeightSyncError naming the
        bucket, the peer and the epoch. The group is closed then, which the other members notice:
        `join` the next epoch.
        """
        spec = self.group_thread.spec
        if spec is None:
            raise WeightSyncError(f"sender {self._rank} is a member of no weight group")
        mine = [b for b in buckets if b.rank == self._rank and b.index >= first]
        largest = max((b.num_bytes for b in mine), default=0)
        limit_s = wire_s(largest * self._config.num_buffers * spec.num_sharing, self._config)
        deadline = time.monotonic() + total_s
        first_receiver = len(spec.senders)

        def send_over(group: WeightGroup) -> None:
            in_flight: deque[tuple[Bucket, Work]] = deque()

            def wait_oldest() -> None:
                bucket, work = in_flight.popleft()
                wait_s = max(0.001, min(limit_s, deadline - time.monotonic()))
                with group.naming(f"sending bucket {bucket.index}", first_receiver):
                    work.wait(timedelta(seconds=wait_s))

            for turn, bucket in enumerate(mine):
                if len(in_flight) == self._config.num_buffers:
                    wait_oldest()
                wire = self.group_thread.staging.upload(turn, payload[bucket.start : bucket.stop])
                in_flight.append((bucket, group.send(wire, first_receiver, bucket.index)))
            while in_flight:
                wait_oldest()

        self.group_thread.run(send_over, total_s + self._config.timeout_s / 2)
