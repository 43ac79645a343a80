"""Looks for damage in a shard: parts of it that do not agree, orphans, and a broken law.

Every part is read atomically, so nothing is reported only because the run goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from buffer.redis.replies import readable, texts
from buffer.redis.scripts import Scripts
from buffer.results import BufferStats

_KEYS_AT_ONCE = 1000
_GROUPS_AT_ONCE = 100


class _Sizes(NamedTuple):
    """Sums over all groups that are held."""

    bytes: int = 0
    bytes_consumed: int = 0
    bytes_quarantined: int = 0
    tokens: int = 0


async def find_violations(
    scripts: Scripts, stats: Callable[[], Awaitable[BufferStats]]
) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    before = await stats()
    violations = [] if before.is_conserved else [_law(before)]
    group_ids, steps = await _names(scripts)
    sizes = _Sizes()
    for start in range(0, len(group_ids), _GROUPS_AT_ONCE):
        part = group_ids[start : start + _GROUPS_AT_ONCE]
        wrong, *numbers = await scripts.run("inspect/check_groups", *part)
        sizes = _Sizes(*(a + int(b) for a, b in zip(sizes, numbers, strict=True)))
        for group_id, text in zip(wrong[::2], wrong[1::2], strict=True):
            violations.append(f"group {readable(group_id)}: {readable(text)}")
    for start in range(0, len(steps), _GROUPS_AT_ONCE):
        for step in await scripts.run(
            "inspect/check_batches", *steps[start : start + _GROUPS_AT_ONCE]
        ):
            violations.append(f"lease:{readable(step)} and the set batches do not agree")
    if await _is_quiet(before, stats):
        violations += _wrong_sums(before, sizes)
    return violations


async def _names(scripts: Scripts) -> tuple[list[str], list[str]]:
    """Ids of all groups that anything is kept of, and steps with a record."""
    groups: dict[str, None] = {}
    steps: dict[str, None] = {}
    for source in (
        "keys",
        "running",
        "credits",
        "prompts",
        "ready",
        "arrivals",
        "leased",
        "consumed",
        "quarantined",
        "batches",
    ):
        cursor = "0"
        while True:
            reply = await scripts.run("inspect/scan_names", source, cursor, _KEYS_AT_ONCE)
            cursor = reply[0].decode()
            groups |= dict.fromkeys(texts(reply[1]))
            steps |= dict.fromkeys(texts(reply[2]))
            if cursor == "0":
                break
    return list(groups), list(steps)


async def _is_quiet(before: BufferStats, stats: Callable[[], Awaitable[BufferStats]]) -> bool:
    """Whether nothing moved since: sums over many calls mean something only then."""
    after = await stats()
    return (before.counters, before.leased, before.ready, before.consumed) == (
        after.counters,
        after.leased,
        after.ready,
        after.consumed,
    )


def _law(stats: BufferStats) -> str:
    return (
        f"{stats.pushed} groups were pushed, but {stats.acked} acked + {stats.consumed} consumed + "
        f"{stats.num_dropped} dropped + {stats.quarantined} quarantined + {stats.ready} ready + "
        f"{stats.leased} leased = {stats.num_placed}"
    )


def _wrong_sums(stats: BufferStats, sizes: _Sizes) -> list[str]:
    counted = _Sizes(stats.bytes, stats.bytes_consumed, stats.bytes_quarantined, stats.tokens)
    return [
        f"the counter {name} says {said}, the groups that are held have {found}"
        for name, said, found in zip(_Sizes._fields, counted, sizes, strict=True)
        if said != found
    ]
