"""What a group lived through, as the audit stream of its shard tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.replies import texts


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupEvent:
    """One change of one group's state."""

    at: float
    """Unix time by the server's clock."""
    event: str
    """admitted, begun, abandoned, rerun, prompt_quarantined, full, pushed, leased, expired, nacked,
    requeued, consumed, acked, dropped, quarantined or reconciled."""
    group_id: str
    detail: Mapping[str, str]
    """s: step, v: version, r: reason, o: owner, p: prompt; as far as they apply."""


def parse_events(flat: Sequence[Any]) -> list[GroupEvent]:
    """Reads [entry id, [name, value, ...], ...]; each has the names g (group) and e (event)."""
    return [
        _parse(entry_id, fields)
        for entry_id, fields in zip(flat[::2], flat[1::2], strict=True)
        if {b"g", b"e"} <= set(fields[::2])  # else the entry is not of our writing
    ]


def _parse(entry_id: bytes, fields: Sequence[bytes]) -> GroupEvent:
    names = texts(fields[::2])
    detail = dict(zip(names, texts(fields[1::2]), strict=True))
    milliseconds = entry_id.split(b"-")[0]
    return GroupEvent(
        at=int(milliseconds) / 1000,
        event=detail.pop("e"),
        group_id=detail.pop("g"),
        detail=detail,
    )
