"""What can go wrong between a sender, a receiver and their coordinator, told apart by type."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.types import WeightSyncError


class ReceiverUnreachable(WeightSyncError):
    """The receiver gave no answer in time, or nothing listens at its URL."""


class TransferFailed(WeightSyncError):
    """Bytes stopped on their way; what has arrived stays for the next epoch."""

    def __init__(self, message: str, received: int) -> None:
        super().__init__(message)
        self.received = received
        """Buckets of the global order that the receiver has placed."""


class ChecksumMismatch(WeightSyncError):
    """A version did not arrive as it was sent; its receiver has discarded it."""

    def __init__(self, message: str, tensors: Sequence[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class UnknownVersion(WeightSyncError):
    """The receiver does not hold this version, or does not hold it whole."""


class StoreFullError(WeightSyncError):
    """The file system of weight_sync.stage_dir has no room."""


class StoreBusyError(WeightSyncError):
    """No slot can be taken now; the message says who holds which."""
