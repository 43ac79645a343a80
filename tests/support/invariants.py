"""Checks a shard for inconsistent parts, orphans and unconserved groups.

Every part is read atomically, so nothing is reported only because the run goes on meanwhile.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import NoScriptError

from buffer.connect import Buffer
from buffer.redis.replies import readable
from buffer.redis.scripts import assemble
from buffer.replay_buffer import ReplayBuffer
from buffer.results import BufferStats
from buffer.sharded import ShardedReplayBuffer

_KEYS_AT_ONCE = 1000
_GROUPS_AT_ONCE = 100


class _Sizes(NamedTuple):
    """Sums over all held groups."""

    bytes: int = 0
    bytes_consumed: int = 0
    bytes_quarantined: int = 0
    tokens: int = 0


async def find_violations(buffer: Buffer) -> list[str]:
    """Describes all violations; empty if there are none. Reads every group: not cheap."""
    shards = buffer.shards if isinstance(buffer, ShardedReplayBuffer) else [buffer]
    found = [await find_violations_of_shard(shard) for shard in shards]
    if len(shards) == 1:
        return found[0]
    return [f"shard {k}: {text}" for k, part in enumerate(found) for text in part]


async def find_violations_of_shard(shard: ReplayBuffer) -> list[str]:
    before = await shard.stats()
    violations = [] if before.is_conserved else [_law(before)]
    group_ids, steps = await _names(shard)
    sizes = _Sizes()
    for start in range(0, len(group_ids), _GROUPS_AT_ONCE):
        part = group_ids[start : start + _GROUPS_AT_ONCE]
        wrong, *numbers = await _run(shard, "check_groups", group_ids=part)
        sizes = _Sizes(*(a + int(b) for a, b in zip(sizes, numbers, strict=True)))
        for group_id, text in zip(wrong[::2], wrong[1::2], strict=True):
            violations.append(f"group {readable(group_id)}: {readable(text)}")
    for start in range(0, len(steps), _GROUPS_AT_ONCE):
        part = steps[start : start + _GROUPS_AT_ONCE]
        for step in await _run(shard, "check_batches", steps=part):
            violations.append(f"lease:{readable(step)} and the set batches do not agree")
    for name in await _run(shard, "check_kept"):
        violations.append(f"kept:{readable(name)} has no prompt that runs, or will run again")
    after = await shard.stats()
    if _moved(before) == _moved(after):  # else the sums over many calls mean nothing
        violations += _wrong_sums(before, sizes)
    return violations


async def _run(shard: ReplayBuffer, name: str, **request: Any) -> Any:
    text = _source(name)
    digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
    redis, arguments = shard._redis, (shard.keys.prefix, msgspec.msgpack.encode(request))
    try:
        return await redis.evalsha(digest, 1, *arguments)
    except NoScriptError:
        return await redis.eval(text, 1, *arguments)


@cache
def _source(name: str) -> str:
    return assemble(Path(__file__).parent / "lua" / f"{name}.lua")


async def _names(shard: ReplayBuffer) -> tuple[list[str], list[str]]:
    """Ids of all groups with any data, and steps with a record."""
    groups: dict[str, None] = {}
    steps: dict[str, None] = {}
    for source in (
        "keys",
        "running",
        "credits",
        "prompts",
        "ready",
        "order",
        "leased",
        "consumed",
        "quarantined",
        "batches",
    ):
        cursor = "0"
        while True:
            reply = await _run(
                shard, "scan_names", source=source, cursor=cursor, bound=_KEYS_AT_ONCE
            )
            cursor = reply[0].decode()
            groups |= dict.fromkeys(map(readable, reply[1]))
            steps |= dict.fromkeys(map(readable, reply[2]))
            if cursor == "0":
                break
    return list(groups), list(steps)


def _moved(stats: BufferStats) -> tuple[object, ...]:
    return (stats.counters, stats.leased, stats.ready, stats.consumed)


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
