"""One trainer rank's end of the wire: sends its share of the buckets to the first receiver."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from configs.schema import WeightSyncConfig
from weight_sync.buckets import Bucket
from weight_sync.group import WeightGroup, bucket_timeout_s
from weight_sync.membership import Membership
from weight_sync.staging import Staging
from weight_sync.types import GroupSpec, WeightSyncError


class Sender:
    """Used by one thread at a time. A failure spends the group: `join` the next epoch's then."""

    def __init__(self, rank: int, config: WeightSyncConfig, device: torch.device) -> None:
        """`device`: this rank's GPU where the groups are nccl, else the CPU."""
        self._rank = rank
        self._config = config
        self._device = device
        self._staging = Staging(config.num_buffers, device)
        self._membership = Membership(f"weights-sender-{rank}")

    def join(self, spec: GroupSpec) -> None:
        """Blocks until every member has come, twice `spec.timeout_s` at most.

        Raises WeightSyncError naming who did not come.
        """
        self._membership.join(spec, partial(self._meet, spec))

    def _meet(self, spec: GroupSpec) -> WeightGroup:
        with self._staging.side_stream():
            return WeightGroup.join(spec, self._rank, device=self._device)

    def send(
        self,
        buckets: Sequence[Bucket],
        stream: Tensor,
        first: int,
        total_s: float = math.inf,
    ) -> None:
        """Send this rank's buckets of the plan from bucket `first` on.

        `stream`: uint8, the rank's bytes on the wire. `total_s` bounds the whole of it: a member
        that is a little slow at every bucket must not add up to hours. Raises WeightSyncError
        naming the bucket, the peer and the epoch; the group is closed then, which the other
        members notice.
        """
        spec = self._membership.spec
        if spec is None:
            raise WeightSyncError(f"sender {self._rank} is a member of no weight group")
        mine = [b for b in buckets if b.rank == self._rank and b.index >= first]
        if mine and mine[-1].stop > stream.numel():
            raise ValueError(
                f"stream of sender {self._rank} has {stream.numel()} bytes, its buckets end at "
                f"{mine[-1].stop}"
            )
        limit_s = bucket_timeout_s(
            max((b.num_bytes for b in mine), default=0)
            * self._config.num_buffers
            * spec.world_size,
            self._config.timeout_s,
            self._config.min_bandwidth,
        )
        deadline = time.monotonic() + total_s
        self._membership.walk(
            lambda group: self._send(group, mine, stream, limit_s, deadline),
            total_s + self._config.timeout_s / 2,
        )

    def _send(
        self,
        group: WeightGroup,
        buckets: Sequence[Bucket],
        stream: Tensor,
        limit_s: float,
        deadline: float,
    ) -> None:
        first_receiver = group.spec.num_senders
        in_flight: deque[tuple[Bucket, Work]] = deque()
        with self._staging.side_stream():
            for turn, bucket in enumerate(buckets):
                if len(in_flight) == self._config.num_buffers:
                    self._wait(
                        group, *in_flight.popleft(), min(limit_s, deadline - time.monotonic())
                    )
                wire = self._staging.upload(turn, stream[bucket.start : bucket.stop])
                in_flight.append((bucket, group.send(wire, first_receiver, bucket.index)))
            while in_flight:
                self._wait(group, *in_flight.popleft(), min(limit_s, deadline - time.monotonic()))

    def _wait(self, group: WeightGroup, bucket: Bucket, work: Work, limit_s: float) -> None:
        with group.naming(f"sending bucket {bucket.index}", group.spec.num_senders):
            work.wait(timedelta(seconds=max(0.001, limit_s)))

    def leave(self) -> None:
        """Leave the group, if in one."""
        self._membership.leave()
