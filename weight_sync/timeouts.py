"""Timeouts of each part of a publish: a fixed time plus the time that its bytes need."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import WeightSyncConfig
from tensors.adapters import merged_layout
from tensors.layout import Layout
from weight_sync.types import ReceiverSpec

_STATUS_S = 5.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Timeouts:
    """Seconds, derived from `weight_sync.timeout_s` and `weight_sync.min_bandwidth`."""

    config: WeightSyncConfig
    layout: Layout
    control_s: float
    """Longest silence of a trainer rank: its training thread may be behind the others'."""

    @property
    def status_s(self) -> float:
        """A status request takes no work. A receiver that needs longer is excluded."""
        return min(_STATUS_S, self.config.timeout_s / 2)

    @property
    def prepare_s(self) -> float:
        """Allocating every staged version, merged ones too if they are adapters, and copying
        one."""
        merged = merged_layout(self.layout)
        num_bytes = self.layout.num_bytes + (0 if merged is None else merged.num_bytes)
        return wire_s(num_bytes * (self.config.num_staged + 1), self.config)

    @property
    def verify_s(self) -> float:
        """Copying a delta's base, and comparing the version with its manifest."""
        return wire_s(2 * self.layout.num_bytes, self.config)

    @property
    def join_s(self) -> float:
        """The group's own timeout applies twice: to the rendezvous, then to connecting."""
        return 2 * self.config.timeout_s + self.status_s

    @property
    def encode_s(self) -> float:
        """A rank captures the version, then compares it with its base."""
        return self.control_s + wire_s(2 * self.layout.num_bytes, self.config)

    def notice_s(self, num_members: int) -> float:
        """Members give up by themselves after another failed: each waits for a bucket."""
        in_flight = self.config.bucket_bytes * self.config.num_buffers * num_members
        return wire_s(in_flight, self.config) + self.status_s

    @property
    def backoff_s(self) -> tuple[float, float]:
        """First and longest pause of a receiver that fails while others can be served.

        Each retry may delay the next version by about twice the `timeout_s`.
        """
        return 10 * self.config.timeout_s, 100 * self.config.timeout_s

    def answer_s(self, num_bytes: int) -> float:
        """All members report the transfer's outcome; the senders end it before this."""
        return wire_s(num_bytes, self.config) + self.config.timeout_s


def wire_s(num_bytes: int, limits: WeightSyncConfig | ReceiverSpec) -> float:
    """Longest time for `num_bytes` on a link, from the first byte to the last; also that of a copy
    of them."""
    return limits.timeout_s + num_bytes / limits.min_bandwidth
