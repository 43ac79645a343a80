"""A picture of the buffer at one moment, and the law that it must obey."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class BufferStats:
    """Groups by state, in numbers, read in one atomic step.

    pushed = acked + consumed + dropped + quarantined + ready + leased, at any moment.
    """

    pushed: int
    acked: int
    consumed: int
    """Trained, but the checkpoint is not durable yet."""
    dropped: Mapping[str, int]
    """By reason."""
    quarantined: int
    ready: int
    leased: int
    running: int
    """Being generated."""
    abandoned: int
    """Were running and will never be pushed; not part of the law."""
    abandoned_by_reason: Mapping[str, int]
    requeued: int
    """Prompts put in line again since their group went stale."""
    retries_waiting: int
    retries_exhausted: int
    expired: int
    """Groups that came back from a lease that was not renewed."""
    by_staleness: Mapping[int, int]
    """Ready groups by how far they lag behind the trainer's version."""
    trainer_version: int
    engine_versions: Mapping[str, int]
    max_staleness: int
    max_staleness_trained: int | None
    """The largest staleness of any group that was ever consumed; None before the first."""
    groups_per_step: int
    bytes: int
    """Size of the payloads that are held."""
    tokens: int
    """Tokens of the groups that are held (ready, leased or consumed)."""
    tokens_pushed: int
    tokens_trained: int
    """Trainable tokens of all groups that were ever consumed."""

    @property
    def trained(self) -> int:
        return self.acked + self.consumed

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def is_conserved(self) -> bool:
        """Whether every pushed group is in exactly one place."""
        places = self.trained + self.num_dropped + self.quarantined + self.ready + self.leased
        return self.pushed == places


def parse_stats(reply: list[Any]) -> BufferStats:
    """Reads the reply of stats.lua."""
    running, ready, leased, consumed, retries_waiting = (int(number) for number in reply[:5])
    settings, counters = _pairs(reply[5]), _pairs(reply[6])
    trainer_version = int(settings["trainer_version"])
    abandoned = _by_reason(counters, "abandoned:")
    trained_staleness = counters.get("max_staleness_trained")

    def count(name: str) -> int:
        return int(counters.get(name, 0))

    return BufferStats(
        pushed=count("pushed"),
        acked=count("acked"),
        consumed=consumed,
        dropped=_by_reason(counters, "dropped:"),
        quarantined=0,  # no verb moves a group there yet
        ready=ready,
        leased=leased,
        running=running,
        abandoned=sum(abandoned.values()),
        abandoned_by_reason=abandoned,
        requeued=count("requeued"),
        retries_waiting=retries_waiting,
        retries_exhausted=count("retries_exhausted"),
        expired=count("expired"),
        by_staleness={
            trainer_version - int(version): int(number)
            for version, number in zip(reply[8][::2], reply[8][1::2], strict=True)
        },
        trainer_version=trainer_version,
        engine_versions={name: int(version) for name, version in _pairs(reply[7]).items()},
        max_staleness=int(settings["max_staleness"]),
        max_staleness_trained=None if trained_staleness is None else int(trained_staleness),
        groups_per_step=int(settings["groups_per_step"]),
        bytes=count("bytes"),
        tokens=count("tokens"),
        tokens_pushed=count("tokens_pushed"),
        tokens_trained=count("tokens_trained"),
    )


def _pairs(flat: list[bytes]) -> dict[str, str]:
    texts = [item.decode() for item in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _by_reason(counters: Mapping[str, str], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): int(number)
        for name, number in counters.items()
        if name.startswith(prefix)
    }
