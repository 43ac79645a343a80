"""Reads a run's state in Redis at one moment, key by key, without the buffer's own code.

All of a picture comes from one transaction: the audit stream's entries since the last picture, and
every place where a group or a prompt can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis


@dataclass(kw_only=True, slots=True, frozen=True)
class Event:
    at_ms: int
    """By the server's clock, which is this machine's."""
    what: str
    group_ids: tuple[str, ...]
    detail: Mapping[str, str]


@dataclass(kw_only=True, slots=True, frozen=True)
class Picture:
    events: tuple[Event, ...]
    """Since the picture before."""
    running: Mapping[str, int]
    """Index of the prompt of each running group that has one."""
    retries: tuple[int, ...]
    """Prompts queued to run again."""
    ready: frozenset[str]
    leased: frozenset[str]
    consumed: frozenset[str]
    quarantined: frozenset[str]
    quarantined_prompts: frozenset[int]
    positions: Mapping[int, int]
    """Each worker's position in its tasks."""
    engines: frozenset[str]
    """Engines that serve."""
    counters: Mapping[str, float]
    """The workers' counters."""
    stats: Mapping[str, int]

    @property
    def places(self) -> int:
        """Pushed groups, counted where they are."""
        dropped = sum(n for name, n in self.stats.items() if name.startswith("dropped:"))
        held = (self.ready, self.leased, self.consumed, self.quarantined)
        return self.stats.get("acked", 0) + dropped + sum(map(len, held))


class Camera:
    """Takes pictures of one run at one server."""

    def __init__(self, url: str, run: str, first_event: str = "-") -> None:
        # A busy disk delays its writes.
        self._client = redis.Redis.from_url(url, socket_timeout=60.0)
        self._prefix = f"{{leash:{run}}}:"
        self.next_event = first_event

    def take(self) -> Picture:
        pipe = self._client.pipeline(transaction=True)
        key = self._prefix
        pipe.xrange(key + "events", min=self.next_event)
        pipe.hgetall(key + "prompts")
        pipe.lrange(key + "retries", 0, -1)
        for places in ("ready", "leased", "consumed", "quarantined"):
            pipe.zrange(key + places, 0, -1)
        for mapping in ("quarantined_prompts", "tasks", "engine_versions", "counters", "stats"):
            pipe.hgetall(key + mapping)
        entries, prompts, retries, *rest = pipe.execute()
        ready, leased, consumed, quarantined, poisonous, tasks, engines, counters, stats = rest
        if entries:
            self.next_event = "(" + entries[-1][0].decode()
        return Picture(
            events=tuple(_event(*entry) for entry in entries),
            running={i.decode(): _index(text) for i, text in prompts.items()},
            retries=tuple(_index(text) for text in retries),
            ready=_names(ready),
            leased=_names(leased),
            consumed=_names(consumed),
            quarantined=_names(quarantined),
            quarantined_prompts=frozenset(int(name.split()[0]) for name in poisonous),
            positions={int(worker): int(place) for worker, place in tasks.items()},
            engines=_names(engines),
            counters={name.decode(): float(n) for name, n in counters.items()},
            stats={name.decode(): int(n) for name, n in stats.items()},
        )

    def payloads(self, group_ids: list[str]) -> dict[str, bytes]:
        """Returns the payloads of the groups that have one at this moment."""
        if not group_ids:
            return {}
        found = self._client.mget([f"{self._prefix}payload:{i}" for i in group_ids])
        return {i: data for i, data in zip(group_ids, found, strict=True) if data is not None}

    def close(self) -> None:
        self._client.close()


def _event(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event:
    detail = {name.decode(): value.decode() for name, value in fields.items()}
    return Event(
        at_ms=int(entry_id.split(b"-")[0]),
        group_ids=tuple(detail.pop("g").split()),
        what=detail.pop("e"),
        detail=detail,
    )


def _index(text: bytes) -> int:
    """Returns the index in 'attempt index task'."""
    return int(text.split()[1])


def _names(items: Any) -> frozenset[str]:
    return frozenset(item.decode() for item in items)
