"""Reads TensorBoard's event files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def drawn(folder: Path) -> dict[str, dict[int, float]]:
    """Returns the values that TensorBoard draws, by tag and step."""
    scalars: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):
        for event in _events(file.read_bytes()):
            if event.session_log.status == SessionLog.START:
                for values in scalars.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def _events(data: bytes) -> Iterator[Event]:
    """Each is its length, a checksum of that, the event, and its checksum."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
