"""Dumps a run's buffer to a file without changing it, and loads such a file into another run.

What a dump promises: the groups in it are those that each shard held at one moment (of all shards,
if there are several, within milliseconds). Each appears once, with the state and hash of the moment
when its turn came. One that was acked or dropped until then is left out and counted as gone. Groups
that arrive meanwhile are not in it.
The file's format is described in dump_file.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from buffer.chunks import MAX_CHUNKS, join_payload
from buffer.client import DamagedRunError
from buffer.codec import decode_group
from buffer.dump_file import (
    STATES,
    DumpedGroup,
    DumpedShard,
    DumpHeader,
    DumpWriter,
    check_dump,
    read_dump,
    read_header,
)
from buffer.keys import Keys
from buffer.lua import RunNotOpenError
from buffer.replay_buffer import ReplayBuffer
from buffer.replies import number, readable, setting_number
from buffer.staleness import renumber
from buffer.types import TrajectoryGroup

__all__ = [
    "DumpHeader",
    "DumpReport",
    "DumpWriter",
    "DumpedGroup",
    "DumpedShard",
    "LoadReport",
    "check_dump",
    "dump_buffer",
    "load_buffer",
    "read_dump",
    "read_header",
]

_BATCH_GROUPS = 256
_BATCH_BYTES = 32 * 2**20
"""Bounds of what is asked for at once, so that others' commands come in between."""
_MAX_SHARDS = 16_384  # as many as a cluster has slots


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpReport:
    """What `dump_buffer` wrote."""

    groups: Mapping[str, int]
    """By state."""
    gone: int
    """Groups that were acked or dropped before their turn came."""
    bytes: int
    """Size of the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadReport:
    """What became of the groups of a dump: every one is counted once."""

    pushed: Mapping[str, int]
    """By what the push replied: stored, duplicate, stale, ..."""
    skipped: Mapping[str, int]
    """Not asked for, by state."""
    unreadable: Mapping[str, str]
    """What is wrong with the payload, by group id."""


async def dump_buffer(redis: Redis, run: str, path: Path) -> DumpReport:
    """Writes all groups that the run's buffer holds to a new file.

    Only reads. The list of ids is taken in one transaction a shard, which holds the server for
    about 5 ms per 100,000 groups; payloads follow in batches. Raises RunNotOpenError, and
    OSError that names the file.
    """
    held = cast("bytes", await redis.hget(Keys(run)("settings"), "num_shards") or b"1")
    num_shards = setting_number("num_shards", readable(held))
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise DamagedRunError(f"{run}: no run has {num_shards:g} shards, as its settings say")
    shards = [Keys(run, shard) for shard in range(int(num_shards))]
    pictures = [await _picture(redis, keys) for keys in shards]
    header = DumpHeader(run=run, created=time.time(), shards=[picture for picture, _ in pictures])
    with DumpWriter(path, header) as dump:
        for keys, (_, ids) in zip(shards, pictures, strict=True):
            async for group in _read_groups(redis, keys, ids):
                if group is None:
                    dump.num_gone += 1
                else:
                    dump.write(group)
    return DumpReport(groups=dump.counts, gone=dump.num_gone, bytes=dump.num_bytes)


async def load_buffer(
    buffer: ReplayBuffer, path: Path, *, include_consumed: bool = False
) -> LoadReport:
    """Pushes the ready and leased groups of a dump into a run that is open; both become ready.

    May be repeated: a group that is there already is a duplicate. Consumed groups are trained
    already, so they come along only if asked for; quarantined ones never do. Nothing is pushed
    from a file that is damaged: ValueError names the record. A full buffer raises what a push does.
    """
    check_dump(path)
    wanted = {"ready", "leased"} | ({"consumed"} if include_consumed else set())
    pushed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unreadable: dict[str, str] = {}
    for dumped in read_dump(path):
        if dumped.state not in wanted:
            skipped[dumped.state] += 1
            continue
        try:
            group = _restored(dumped)
        except ValueError as error:
            unreadable[dumped.group_id] = str(error)
            continue
        pushed[(await buffer.push(group)).value] += 1
    return LoadReport(pushed=dict(pushed), skipped=dict(skipped), unreadable=unreadable)


async def _picture(redis: Redis, keys: Keys) -> tuple[DumpedShard, list[str]]:
    """The shard's settings and counters and the ids of its groups, all of one moment."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys("settings"))
        pipe.hgetall(keys("stats"))
        for state in STATES:
            pipe.zrange(keys(state), 0, -1)
        settings, stats, *ids = await pipe.execute()
    if not settings:
        raise RunNotOpenError(
            f"there is no {keys('settings')} in this Redis: check the run's name and the URL"
        )
    picture = DumpedShard(settings=_texts(settings), stats=_texts(stats))
    return picture, [readable(group_id) for of_state in ids for group_id in of_state]


async def _read_groups(
    redis: Redis, keys: Keys, ids: Sequence[str]
) -> AsyncIterator[DumpedGroup | None]:
    """Each group, or None if it is not held any more."""
    for first in range(0, len(ids), _BATCH_GROUPS):
        some = ids[first : first + _BATCH_GROUPS]
        async with redis.pipeline(transaction=False) as pipe:
            for group_id in some:
                pipe.hmget(keys(f"group:{group_id}"), ["bytes", "chunks"])
            replies = await pipe.execute(raise_on_error=False)
        sizes = [
            (0, 0) if isinstance(of_group, Exception) else _sizes(*of_group) for of_group in replies
        ]
        for batch in _batches(list(zip(some, sizes, strict=True))):
            for group in await _fetch(redis, keys, batch):
                yield group


def _sizes(num_bytes: bytes | None, chunks: bytes | None) -> tuple[int, int]:
    return number(num_bytes), min(number(chunks), MAX_CHUNKS)


def _batches(groups: Sequence[tuple[str, tuple[int, int]]]) -> Iterable[list[tuple[str, int]]]:
    """(id, number of chunks) of groups that together have few enough bytes; at least one."""
    batch: list[tuple[str, int]] = []
    total = 0
    for group_id, (size, chunks) in groups:
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append((group_id, chunks))
        total += size
    if batch:
        yield batch


async def _fetch(
    redis: Redis, keys: Keys, batch: Sequence[tuple[str, int]]
) -> list[DumpedGroup | None]:
    # The payload first: it does not change while the group is held, so if the hash says afterwards
    # that it is, they belong together.
    async with redis.pipeline(transaction=False) as pipe:
        for group_id, num_chunks in batch:
            payload = keys.payload(group_id)
            pipe.mget([payload, *(f"{payload}:{i}" for i in range(1, num_chunks + 1))])
            pipe.hgetall(keys(f"group:{group_id}"))
        replies = await pipe.execute(raise_on_error=False)
    return [
        # A key that holds something else than we put there is as good as gone.
        None if isinstance(fields, Exception) else _dumped(group_id, _texts(fields), values)
        for (group_id, _), values, fields in zip(batch, replies[::2], replies[1::2], strict=True)
    ]


def _dumped(
    group_id: str, fields: dict[str, str], values: Sequence[bytes | None]
) -> DumpedGroup | None:
    state = fields.get("state", "")
    if state not in STATES:
        return None
    first, *rest = values
    try:
        payload = b"" if first is None else bytes(join_payload(first, rest))
    except ValueError:  # what is left of it would not help anybody
        payload = b""
    return DumpedGroup(group_id=group_id, state=state, fields=fields, payload=payload)


def _restored(dumped: DumpedGroup) -> TrajectoryGroup:
    """The group with the numbers that its versions had after the run's last rollback."""
    if not dumped.payload:
        raise ValueError("its payload was gone when the dump was made")
    group = decode_group(dumped.payload)
    if group.group_id != dumped.group_id:
        raise ValueError(f"its payload is that of group {group.group_id!r}")
    if "moved" in dumped.fields:
        entries = dumped.fields.get("versions", "").split()
        group = renumber(group, [int(entry.split(":")[0]) for entry in entries])
    return group


def _texts(fields: Mapping[Any, Any]) -> dict[str, str]:
    return {readable(name): readable(value) for name, value in fields.items()}
