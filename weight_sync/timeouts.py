"""How long each part of a publish may take: a fixed patience, and what its bytes need besides."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import WeightSyncConfig
from weight_sync.layout import Layout

_STATUS_S = 5.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """Seconds, from `weight_sync.timeout_s` and `weight_sync.min_bandwidth`."""

    config: WeightSyncConfig
    layout: Layout
    control_s: float
    """Longest silence of a trainer rank, whose training thread may be ahead of the others."""

    @property
    def status_s(self) -> float:
        """An answer that takes no work: without one in this time a receiver is left out."""
        return min(_STATUS_S, self.config.timeout_s / 2)

    @property
    def order_s(self) -> float:
        """An order that moves no bytes."""
        return self.config.timeout_s

    @property
    def prepare_s(self) -> float:
        """Allocating every staged version, and copying a delta's base."""
        return self._for_bytes(self.layout.num_bytes * (self.config.num_staged + 1))

    @property
    def verify_s(self) -> float:
        return self._for_bytes(self.layout.num_bytes)

    @property
    def join_s(self) -> float:
        """The group's own timeout bounds finding each other, then connecting."""
        return 2 * self.config.timeout_s + self.status_s

    @property
    def encode_s(self) -> float:
        """Waiting until this rank has captured the version, then comparing it with its base."""
        return self.control_s + self._for_bytes(2 * self.layout.num_bytes)

    def wire_s(self, num_bytes: int) -> float:
        """From the first byte to the last, as the senders see it."""
        return self._for_bytes(num_bytes)

    def notice_s(self, num_members: int) -> float:
        """For the others to break off by themselves after one has: they wait for a bucket each."""
        in_flight = self.config.bucket_bytes * self.config.num_buffers * num_members
        return self._for_bytes(in_flight) + self.status_s

    @property
    def aside_s(self) -> tuple[float, float]:
        """A member that fails while others can be served is left out: first, and at most.

        Each further try may hold up the next version for about twice the `timeout_s`.
        """
        return 10 * self.config.timeout_s, 100 * self.config.timeout_s

    def answer_s(self, num_bytes: int) -> float:
        """Until everyone has told how that went: the senders break it off, not this."""
        return self.wire_s(num_bytes) + self.config.timeout_s

    def _for_bytes(self, num_bytes: int) -> float:
        return self.config.timeout_s + num_bytes / self.config.min_bandwidth
