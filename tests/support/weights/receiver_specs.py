"""Settings that all receivers of these tests share."""

from __future__ import annotations

from pathlib import Path

from weight_sync.types import ReceiverSpec

KEY = "the-key-of-this-run"
CALL_S = 60.0


def receiver_spec(name: str, folder: Path, timeout_s: float = 60.0) -> ReceiverSpec:
    return ReceiverSpec(
        name=name,
        host="127.0.0.1",
        folder=str(folder / name),
        num_slots=2,
        num_buffers=2,
        timeout_s=timeout_s,
        min_bandwidth=50e6,
        key=KEY,
    )
