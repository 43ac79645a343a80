"""Errors between a sender, a receiver and their coordinator, distinguished by type."""

from __future__ import annotations

from weight_sync.types import WeightSyncError


class ReceiverUnreachable(WeightSyncError):
    """The receiver did not respond in time, or nothing listens at its URL."""


class TransferFailed(WeightSyncError):
    """A transfer stopped half-way; the next epoch continues after the buckets that arrived."""


class ChecksumMismatch(WeightSyncError):
    """A version did not arrive as it was sent; its receiver has discarded it."""


class UnknownVersion(WeightSyncError):
    """The receiver does not hold this version, or does not hold it whole."""


class UnknownLayout(WeightSyncError):
    """The receiver does not have the layout of this digest yet."""


class StoreFullError(WeightSyncError):
    """The file system of weight_sync.stage_dir has no room."""


class StoreBusyError(WeightSyncError):
    """No slot is free, or an earlier call has not ended; the message names the holders."""


BY_STATUS: dict[int, type[WeightSyncError]] = {
    404: UnknownVersion,
    409: WeightSyncError,
    412: UnknownLayout,
    422: ChecksumMismatch,
    423: StoreBusyError,
    502: TransferFailed,
    507: StoreFullError,
}
"""The error for each HTTP status of a receiver."""

REFUSALS = (StoreBusyError, StoreFullError, UnknownLayout, UnknownVersion)
"""A receiver that raises one of these cannot take a version; other receivers may."""
