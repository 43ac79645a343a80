"""What the coordinator writes down of each version; `*_at` is Unix time, `*_s` seconds (pure)."""

from __future__ import annotations

from weight_sync.courier import Delivery, Shipment
from weight_sync.slots import Captured

Fields = dict[str, float | int | str]


def skipped_record(captured: Captured) -> Fields:
    """Of a version that was given up for a newer one before anyone had it."""
    return {**_snapshot(captured), "mode": "skipped"}


def publish_record(
    captured: Captured, shipment: Shipment, delivery: Delivery, *, epoch: int, released_at: float
) -> Fields:
    """Of a version that engines may take now; when they all have is not known yet."""
    return {
        **_snapshot(captured),
        "mode": "full" if shipment.is_full else "delta",
        "copy_s": shipment.copy_s,
        "encode_at": shipment.encode_at,
        "encode_s": shipment.encode_s,
        "wire_at": delivery.wire_at,
        "wire_s": delivery.wire_s,
        "verify_at": delivery.verify_at,
        "verify_s": delivery.verify_s,
        "released_at": released_at,
        "stage_s": released_at - shipment.encode_at,
        "bytes": shipment.layout.num_bytes,
        "wire_bytes": shipment.num_wire_bytes,
        "density": shipment.density,
        "epoch": epoch,
        "num_receivers": len(delivery.arrived),
    }


def _snapshot(captured: Captured) -> Fields:
    return {
        "version": captured.version,
        "snapshot_wait_s": captured.wait_s,
        "snapshot_at": captured.snapshot_at,
        "snapshot_s": captured.snapshot_s,
    }
