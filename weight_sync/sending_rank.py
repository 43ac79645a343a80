"""What every trainer rank does for a publish, in a thread beside training, as rank 0 commands."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from weight_sync import delta
from weight_sync.buckets import plan_buckets
from weight_sync.checksums import piece_checksums
from weight_sync.control import Message
from weight_sync.limits import Limits
from weight_sync.manifest import Transfer
from weight_sync.sender import Sender
from weight_sync.snapshot import Snapshots
from weight_sync.types import GroupSpec, WeightSyncError

log = logging.getLogger(__name__)


class SendingRank:
    """Answers commands: {"result": ...}, or {"error": text} when this one could not be done.

    encode     begin the checksums of a captured version; find what changed since another one
    join       the weight group of an epoch
    send       this rank's buckets to its first receiver, while the checksums are made
    checksums  of the version that was encoded last
    noop       says that rank 0 lives
    close      leave the group: the end
    """

    def __init__(self, limits: Limits, rank: int, snapshots: Snapshots, sender: Sender) -> None:
        self._limits = limits
        self._layout = limits.layout
        self._rank = rank
        self._snapshots = snapshots
        self._sender = sender
        self._delta: tuple[int, Tensor] | None = None
        """Version and payload of the last encoding."""
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="weights-checksums")
        self._checksums: tuple[int, Future[tuple[int, ...]]] | None = None
        """Those of that version, when they are made."""

    def handle(self, command: Message) -> Message | None:
        """None for close."""
        try:
            match command["do"]:
                case "encode":
                    return {"result": self._encode(command)}
                case "join":
                    self._sender.join(GroupSpec.from_json(command["group"]))
                case "send":
                    return {"result": self._send(command)}
                case "checksums":
                    return {"result": {"checksums": self._made_checksums(command["version"])}}
                case "close":
                    self._sender.leave()
                    self._summing.shutdown(wait=False)
                    return None
            return {"result": {}}
        except Exception as error:
            # Told to rank 0, which decides; the other ranks may have succeeded.
            is_ours = isinstance(error, WeightSyncError)
            if not is_ours:
                log.exception("trainer rank %d could not %s", self._rank, command["do"])
            return {"error": f"trainer rank {self._rank}: {error if is_ours else repr(error)}"}

    def _encode(self, command: Message) -> Message:
        """With a base: its delta, unless too much has changed."""
        version = int(command["version"])
        stream = self._stream(command["slot"], version)
        copy_s = self._snapshots.copy_s(command["slot"])
        start = time.perf_counter()
        summing = self._summing.submit(piece_checksums, self._layout, self._rank, stream)
        self._checksums = version, summing
        result: Message = {"num_bytes": None, "num_changed": 0}
        self._delta = None  # frees the last one before the next is made
        if command["base_slot"] is not None:
            base = self._stream(command["base_slot"], int(command["base_version"]))
            found = self._changes(base, stream, command["max_density"])
            if found is not None:
                self._delta = version, found.payload
                result["num_bytes"] = found.payload.numel()
                result["num_changed"] = found.num_changed
        return result | {"encode_s": time.perf_counter() - start, "copy_s": copy_s}

    def _made_checksums(self, version: int) -> tuple[int, ...]:
        assert self._checksums is not None and self._checksums[0] == version, "encode comes first"
        return self._checksums[1].result()

    def _changes(self, base: Tensor, stream: Tensor, max_density: float) -> delta.Delta | None:
        try:
            return delta.encode(self._layout, self._rank, base, stream, max_density)
        except MemoryError as error:  # the version itself needs no more memory
            log.warning("trainer rank %d sends its weights in full: %s", self._rank, error)
            return None

    def _send(self, command: Message) -> Message:
        transfer = Transfer.from_json(command["transfer"])
        if transfer.base_version is None:
            stream = self._stream(command["slot"], transfer.version)
        else:
            assert self._delta is not None and self._delta[0] == transfer.version
            stream = self._delta[1]
        start = time.perf_counter()
        buckets = plan_buckets(self._layout, transfer)
        self._sender.send(buckets, stream, int(command["first"]), float(command["total_s"]))
        return {"seconds": time.perf_counter() - start}

    def _stream(self, slot: int, version: int) -> Tensor:
        return self._snapshots.stream(slot, version, self._limits.control_s)
